"""How much of RG_SAMPLES samplers may fill: the rest is kept for what makes the stream shrink.

Were finishes let in up to the bound, the scores and cancels that close groups (after which the
ledger can purge) would find no room, and a slow scorer would end in a standstill for good.  A score
is smaller than the finish it judges, so half is enough.
"""

from __future__ import annotations

import asyncio
import time

from rollgrid_contracts.topology import SAMPLES
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import QueueFull

SAMPLERS_SHARE = 0.5
ASK_AGAIN_S = 1.0
PART_OF_ROOM = 8
"""One sampler takes at most this part of the free room before it looks again: others fill it too."""


class Headroom:
    """One per sampler process."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._budget = 0
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def take(self, size: int) -> None:
        """Room for an event of `size` bytes.  Raises QueueFull when the samplers' share is used up, BusError."""
        if size > self._budget or time.monotonic() - self._asked_at > ASK_AGAIN_S:
            async with self._asking:
                if size > self._budget or time.monotonic() - self._asked_at > ASK_AGAIN_S:
                    await self._ask(size)
        self._budget -= size

    async def _ask(self, size: int) -> None:
        info = await self._bus.stream_info(SAMPLES.name)
        bound = int(info.config.max_bytes or 0)
        self._asked_at = time.monotonic()
        if bound <= 0:
            self._budget = 1 << 62
            return
        room = int(SAMPLERS_SHARE * bound) - int(info.state.bytes)
        self._budget = max(size, room // PART_OF_ROOM) if room >= size else 0
        if not self._budget:
            raise QueueFull(f"samplers have filled their share of {SAMPLES.name}")
