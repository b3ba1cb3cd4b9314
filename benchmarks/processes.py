"""CPU seconds of processes and of what they started, read from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from tests.support.stack import Stack

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its living descendants, and of those it has reaped."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICKS  # utime, stime, cutime, cstime
    return total


class Spent:
    """CPU seconds of every part of a stack, and of this process, since it was made."""

    def __init__(self, pipe: Stack) -> None:
        self._pids = {name: process.pid for name, process in pipe.processes().items()}
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {"client": time.process_time(), **{name: cpu_seconds(pid) for name, pid in self._pids.items()}}

    def so_far(self) -> dict[str, float]:
        return {name: now - self._before[name] for name, now in self._now().items()}
