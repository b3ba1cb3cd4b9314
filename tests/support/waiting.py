"""Waiting for a condition instead of sleeping for a guess."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, every_s: float = 0.02) -> None:
    """Poll `condition`; raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(every_s)


async def until(
    condition: Callable[[], bool | Awaitable[bool]], timeout_s: float, what: str, every_s: float = 0.01
) -> None:
    """As `wait_until`, for a loop; `condition` may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        await asyncio.sleep(every_s)
