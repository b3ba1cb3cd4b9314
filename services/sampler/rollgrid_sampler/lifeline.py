"""Ties the engine's processes to the sampler: when it dies, by SIGKILL too, they are killed by the kernel.

vLLM runs its engine core and workers as children that outlive a killed parent with all their memory.
Each of them runs `bind_to_parent` twice over: as the first thing a spawned child executes (the
sampler declares this module to be its main module, which multiprocessing runs in every child before
it imports anything else), and as a `vllm.general_plugins` entry point, which also covers forked
children.  vLLM swallows a plugin's failure, so each child leaves a mark and the sampler checks them.

Only children of a sampler are bound: without `OWNER` in the environment nothing happens, so that
other users of vLLM in the same environment are left alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

OWNER = "ROLLGRID_SAMPLER_OWNER_PID"
MARKS = "ROLLGRID_SAMPLER_LIFELINES"
MODULE = "rollgrid_sampler.lifeline"
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2


def adopt(marks: Path) -> None:
    """In the sampler, before the engine starts: make every child from now on bind itself.

    The kernel sends the signal when the *thread* that made the child ends, so the engine must be
    started by a thread that lives as long as the process.
    """
    os.environ[OWNER] = str(os.getpid())
    os.environ[MARKS] = str(marks)
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(MODULE)


def release() -> None:
    """After the engine's end: later children of this process are their own."""
    os.environ.pop(OWNER, None)
    os.environ.pop(MARKS, None)


def bind_to_parent() -> None:
    """Ask the kernel to kill this process with its parent, and leave a mark that it agreed."""
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()) or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if _orphaned(owner):  # the parent died before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)
    agreed = ctypes.c_int(0)
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(agreed), 0, 0, 0)
    if agreed.value == signal.SIGKILL:
        (Path(os.environ[MARKS]) / str(os.getpid())).touch()


def unbound(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that left no mark."""
    marks = Path(os.environ[MARKS])
    return [pid for pid in pids if not (marks / str(pid)).exists()]


def _orphaned(owner: int) -> bool:
    if os.getppid() == 1 and owner != 1:
        return True
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return True
    return False


if __name__ == "__mp_main__":
    bind_to_parent()
