"""The trajectory logger, killed (SIGKILL by itself) at the n-th passage of a named point.

`python -m tests.integration.trajectory_logger.dying_logger POINT N`.  Nothing is replaced: the real
call runs, or the process dies just before or just after it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rollgrid_contracts.columns import DATA_PREFIX, MANIFEST_PREFIX, TURNS_PREFIX
from rollgrid_contracts.topology import JOBS, SAMPLES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_trajectory_logger import __main__ as logger
from rollgrid_trajectory_logger import take_over

Matches = Callable[[tuple[Any, ...]], bool]


def always(args: tuple[Any, ...]) -> bool:
    return True


def key_below(prefix: str) -> Matches:
    return lambda args: str(args[1]).startswith(prefix)


POINTS: dict[str, tuple[Any, str, Matches, bool]] = {
    # name: (owner, attribute, which calls, die before it)
    "before the lease": (Table, "create", always, True),
    "after the lease": (Table, "create", always, False),
    "before reading jobs": (take_over, "_read_jobs", always, True),
    "before reading events": (take_over, "_events_start", always, True),
    "before a close": (Bus, "publish_batch", always, True),
    "after a close": (Bus, "publish_batch", always, False),
    "before an ack": (Bus, "publish_raw", lambda args: f"$JS.ACK.{JOBS.name}" in args[1], True),
    "after an ack": (Bus, "publish_raw", lambda args: f"$JS.ACK.{JOBS.name}" in args[1], False),
    "after an ack of events": (Bus, "publish_raw", lambda args: f"$JS.ACK.{SAMPLES.name}" in args[1], False),
    "before a delete": (Bus, "delete_message", always, True),
    "after a delete": (Bus, "delete_message", always, False),
    "before the object": (Blobs, "put", key_below(DATA_PREFIX), True),
    "between object and manifest": (Blobs, "put", key_below(DATA_PREFIX), False),
    "between turns and manifest": (Blobs, "put", key_below(TURNS_PREFIX), False),
    "between manifest and acks": (Blobs, "create", key_below(MANIFEST_PREFIX), False),
}


def arm(point: str, nth: int) -> None:
    owner, name, matches, before = POINTS[point]
    real, seen = getattr(owner, name), 0

    async def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if not matches(args):
            return await real(*args, **kwargs)
        seen += 1
        mine = seen == nth
        if mine and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await real(*args, **kwargs)
        if mine:
            if owner is Bus:
                await args[0].client.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(logger.main())
