"""Purges RG_TRAJECTORIES of what is archived and old, or archived while the stream fills up.

The last message of a subject is never purged.  The compare-and-set of a close counts from it, and
on an emptied subject "expected last sequence 0" would succeed for a ledger of long ago; so the
last sequence of every run can always be read from the stream itself, for the size of one message.
What is purged is in a manifest by name, where the next take-over finds it (`take_over`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollgrid_contracts import subjects
from rollgrid_contracts.ids import new_key
from rollgrid_contracts.topology import TRAJECTORIES, AckPolicy, Consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer

from . import metrics
from .settings import TrajectoryLoggerSettings

log = get_logger(__name__)
RELIEF = 0.7
"""Under pressure purge down to this part of the share at which it began."""

TAILS_INACTIVE_S = 30.0


class Retention:
    """`archived_to` gives the sequence behind which nothing is archived yet, None while unknown."""

    def __init__(self, bus: Bus, settings: TrajectoryLoggerSettings, archived_to: Callable[[], int | None]) -> None:
        self._bus, self._settings, self._archived_to = bus, settings, archived_to
        self._purged_below = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retain_every_s)
            try:
                await self.purge_once(time.time())
            except (BusError, ConsumerGone) as error:
                log.warning("purge_failed", stream=TRAJECTORIES.name, error=error.message)

    async def purge_once(self, now: float) -> int:
        """Purge what may go; how many messages went."""
        archived = self._archived_to()
        info = await self._bus.stream_info(TRAJECTORIES.name)
        state = info.state
        metrics.ARCHIVE_LAG.set(int(state.last_seq) - (archived or 0))
        if not archived or not state.messages:
            return 0
        below = await self._older_than(now - self._settings.retain_s, int(state.first_seq), int(state.last_seq))
        bound = (info.config.max_bytes or 0) * self._settings.retain_share
        pressed = bound > 0 and state.bytes > bound
        if pressed:
            kept = int(state.messages * RELIEF * bound / state.bytes)
            below = max(below, int(state.last_seq) - kept + 1)
        below = min(below, archived + 1)
        step = 1 if pressed else self._settings.retain_step
        if below <= int(state.first_seq) or below < self._purged_below + step:
            return 0
        self._purged_below = below
        return await self._purge_below(below, int(state.messages))

    async def _older_than(self, moment: float, first: int, last: int) -> int:
        """The lowest sequence stored at UNIX second `moment` or later (`last` + 1 if none), by bisection.

        A sequence that is not stored was purged, so it is older than all that were not.
        """
        low, high = first, last + 1
        while low < high:
            middle = (low + high) // 2
            stored = await self._bus.stored(TRAJECTORIES.name, middle)
            if stored is None or stored.time is None or stored.time.timestamp() < moment:
                low = middle + 1
            else:
                high = middle
        return low

    async def _purge_below(self, below: int, before: int) -> int:
        tails = await self._tails()
        lowest = min(tails.values(), default=below)
        if lowest >= below:
            await self._bus.purge_below(TRAJECTORIES.name, below)
        else:
            for subject, tail in tails.items():
                await self._bus.purge_below(TRAJECTORIES.name, min(below, tail), subject)
        left = int((await self._bus.stream_info(TRAJECTORIES.name)).state.messages)
        metrics.PURGED.labels(TRAJECTORIES.name).inc(max(0, before - left))
        log.info("purged", stream=TRAJECTORIES.name, below=below, before=before, left=left)
        return before - left

    async def _tails(self) -> dict[str, int]:
        """The last sequence of every subject."""
        consumer = Consumer(
            stream=TRAJECTORIES.name,
            durable=f"tails-{new_key()[:12]}",
            filter_subject=subjects.TRAJECTORIES_ALL,
            max_ack_pending=-1,
            ack_policy=AckPolicy.NONE,
        )
        await ensure_consumer(
            self._bus, consumer, headers_only=True, inactive_s=TAILS_INACTIVE_S, last_per_subject=True
        )
        puller = self._bus.puller(consumer)
        tails: dict[str, int] = {}
        try:
            pending = 1
            while pending:
                batch = await puller.fetch(1000, 5.0)
                if not batch:
                    raise BusError("the last messages of the runs did not come")
                for delivery in batch:
                    tails[delivery.subject] = delivery.sequence
                pending = batch[-1].pending
            return tails
        finally:
            await puller.close()
            await self._bus.delete_consumer(consumer.stream, consumer.durable)
