"""Counts system calls of a running process with strace."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from .processes import Process
from .waiting import wait_until


def unavailable() -> str | None:
    return None if shutil.which("strace") else "strace is not installed (Debian: apt-get install strace)"


class Flushes:
    """fsync and fdatasync calls seen so far."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def count(self) -> int:
        # a call that was interrupted is written in two lines, of which the second names it as resumed
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        return sum(1 for line in lines if "sync(" in line)


@contextlib.contextmanager
def counted_flushes(target: Process, folder: Path) -> Iterator[Flushes]:
    """Attach to all threads of `target` (needs root or a permissive ptrace scope)."""
    out = folder / "strace.out"
    argv = ["strace", "-f", "-e", "trace=fsync,fdatasync", "-e", "signal=none", "-o", str(out), "-p", str(target.pid)]
    with Process("strace", argv, folder / "strace.log") as tracer:
        tracer.start()
        wait_until(lambda: "attached" in tracer.log_tail(), 10, "strace to attach")
        yield Flushes(out)
        tracer.send(signal.SIGINT)
        wait_until(lambda: not tracer.running, 10, "strace to detach")
