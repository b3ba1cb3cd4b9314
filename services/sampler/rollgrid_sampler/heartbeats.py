"""Keeps what is held from being given to others, as long as the engine answers.

A lane's ack-wait is shorter than a pool's: its jobs are told of three times in it too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from rollgrid_contracts.topology import LANE_ACK_WAIT_S
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from .jobs import HeldJob

log = get_logger(__name__)


class Heartbeats:
    """`engine_ok_at()` is when the engine's loop last answered, on `time.monotonic`."""

    def __init__(
        self, ack_wait_s: float, held: Callable[[], Iterable[HeldJob]], engine_ok_at: Callable[[], float]
    ) -> None:
        self._ack_wait_s, self._held, self._engine_ok_at = ack_wait_s, held, engine_ok_at

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat(self._ack_wait_s, private=False))
            group.create_task(self._beat(LANE_ACK_WAIT_S, private=True))

    async def _beat(self, ack_wait_s: float, *, private: bool) -> None:
        while True:
            await asyncio.sleep(ack_wait_s / 3)
            held = [one for one in self._held() if one.private is private]
            if time.monotonic() - self._engine_ok_at() > ack_wait_s:
                if held:
                    log.warning("heartbeats_withheld", held=len(held))
                continue
            try:
                for one in held:
                    await one.delivery.in_progress()
            except BusError as error:
                log.warning("heartbeat_failed", error=error.message)
