"""Which policies to look at: those just announced, and now and then all of them.

A wake-up carries no authority: it is acknowledged as soon as it is noted, and a lost one is made
good by the next listing of S3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from rollgrid_contracts import topology
from rollgrid_contracts.checkpoints import CheckpointPublished
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.pulling import Delivery

log = get_logger(__name__)
BATCH = 64
WAIT_S = 1.0


class Watch:
    """Collects keys of policies to reconcile; `next` gives them to the one reader."""

    def __init__(self, bus: Bus, every_s: float) -> None:
        self._bus, self._every_s = bus, every_s
        self._dirty: set[str] = set()
        self._noted = asyncio.Event()

    def note(self, keys: Iterable[str]) -> None:
        self._dirty.update(keys)
        if self._dirty:
            self._noted.set()

    async def next(self, everything: Iterable[str]) -> list[str]:
        """The keys noted since the last call, or `everything` when none was for `every_s`."""
        try:
            async with asyncio.timeout(self._every_s):
                await self._noted.wait()
        except TimeoutError:
            return sorted(everything)
        self._noted.clear()
        keys, self._dirty = sorted(self._dirty), set()
        return keys

    async def follow(self) -> None:
        """Read the wake-ups until cancelled."""
        puller = self._bus.puller(topology.CHECKPOINT_WATCH)
        while True:
            try:
                for delivery in await puller.fetch(BATCH, WAIT_S):
                    await self._on_wake_up(delivery)
            except ConsumerGone:
                await self._restore()
            except BusError as error:
                log.warning("watch_failed", error=error.message)
                await asyncio.sleep(WAIT_S)

    async def _on_wake_up(self, delivery: Delivery) -> None:
        try:
            event = await delivery.message(CheckpointPublished)
        except (msgspec.DecodeError, RecursionError, StorageError) as error:
            log.error("unreadable_wake_up", subject=delivery.subject, sequence=delivery.sequence, error=str(error))
        else:
            self.note([f"{event.tenant}.{event.policy}"])
        await delivery.ack()

    async def _restore(self) -> None:
        try:
            await ensure_consumer(self._bus, topology.CHECKPOINT_WATCH)
        except BusError as error:
            log.warning("consumer_not_restored", error=error.message)
            await asyncio.sleep(WAIT_S)
