"""The processes that vLLM started below this one."""

from __future__ import annotations

import contextlib
import multiprocessing

import psutil


def engine_processes() -> list[psutil.Process]:
    """The engine core and its workers: what this process started through multiprocessing, and their children."""
    found = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            core = psutil.Process(child.pid)
            found += [core, *core.children(recursive=True)]
    return [process for process in found if not _is_tracker(process)]


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's own resource tracker (it ends when its last user does)."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
