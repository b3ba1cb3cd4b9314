"""The lanes of this sampler's pool: found on the server, read one by one, folded into one fair queue.

Each lane has its own durable and reader.  A reader asks for no more than the free slots (shared
among the lanes that have work) plus a small prefetch, and never cancels a fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from rollgrid_contracts import topology
from rollgrid_contracts.fleet import LaneOpened
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.pulling import Delivery, Puller

log = get_logger(__name__)
DISCOVER_EVERY_S = 1.0
FETCH_WAIT_S = 1.0
MOST_AT_ONCE = 64
"""Jobs asked for in one request, whatever is free."""


def parse_durable(pool: str, durable: str) -> PoolLane | None:
    """The lane a durable of `topology.pool_consumer` reads; None for any other durable."""
    prefix = topology.pool_durable_prefix(pool)
    if not durable.startswith(prefix):
        return None
    priority, _, tenant = durable.removeprefix(prefix).partition("_")
    try:
        return PoolLane(pool, Priority(priority), tenant) if tenant else None
    except ValueError:
        return None


class Lanes:
    """Readers of all lanes of one pool.

    `allowance(lane)` is how many jobs the lane may ask for now (0 = wait), `changed` is set when
    that may have risen, `take` receives each delivery.
    """

    def __init__(
        self,
        bus: Bus,
        pool: str,
        allowance: Callable[[PoolLane], int],
        changed: Callable[[], Awaitable[None]],
        take: Callable[[PoolLane, Delivery], Awaitable[None]],
    ) -> None:
        self._bus, self._pool = bus, pool
        self._allowance, self._changed, self._take = allowance, changed, take
        self._readers: dict[PoolLane, asyncio.Task[None]] = {}
        self.working: set[PoolLane] = set()
        """Lanes whose last fetch found something."""
        self.stopping = False
        self.doubtful_below = 0
        """Jobs up to this sequence may have been begun before this connection; 0 = not known yet."""
        self._doubt_epoch = -1
        self._hint = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self._readers)

    def doubtful(self, delivery: Delivery) -> bool:
        """Whether somebody may have worked on this job already.

        The delivery count alone undercounts across a kill of the server, and after a power cut
        closed jobs come back as new; so everything older than the connection is doubted.
        """
        unsettled = self._doubt_epoch != self._bus.connection_epoch
        return delivery.delivered > 1 or unsettled or delivery.sequence <= self.doubtful_below

    async def run(self) -> None:
        """Follow the lanes of the pool until cancelled."""
        try:
            while True:
                if not self.stopping:
                    try:
                        await self._settle_doubt()
                        await self._discover()
                    except BusError as error:
                        log.warning("lanes_not_listed", error=error.message)
                await self._hint_or_pause()
        finally:
            for reader in self._readers.values():
                reader.cancel()

    async def on_opened(self, opened: LaneOpened, _reply: str) -> None:
        """A lane was made a moment ago: look at once, its first job is on the way."""
        if parse_durable(self._pool, opened.durable) is not None:
            self._hint.set()

    async def _hint_or_pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCOVER_EVERY_S):
                await self._hint.wait()
        self._hint.clear()

    async def stop(self) -> None:
        """Read no more; what was delivered and not taken goes back."""
        self.stopping = True
        readers = list(self._readers.values())
        if readers:
            await asyncio.wait(readers)

    async def _settle_doubt(self) -> None:
        epoch = self._bus.connection_epoch
        if epoch != self._doubt_epoch:
            info = await self._bus.stream_info(topology.JOBS.name)
            self.doubtful_below = info.state.last_seq
            self._doubt_epoch = epoch

    async def _discover(self) -> None:
        for durable in await self._bus.consumer_names(topology.JOBS.name):
            lane = parse_durable(self._pool, durable)
            if lane is not None and lane not in self._readers:
                log.info("lane_found", priority=lane.priority.value, tenant=lane.tenant)
                task = asyncio.create_task(self._read(lane), name=f"lane-{durable}")
                self._readers[lane] = task
                task.add_done_callback(partial(self._ended, lane))

    def _ended(self, lane: PoolLane, task: asyncio.Task[None]) -> None:
        self._readers.pop(lane, None)
        self.working.discard(lane)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("lane_reader_failed", tenant=lane.tenant, error=repr(error))

    async def _read(self, lane: PoolLane) -> None:
        puller: Puller = self._bus.puller(topology.pool_consumer(lane))
        try:
            while not self.stopping:
                limit = self._allowance(lane)
                if limit < 1:
                    await self._changed()
                    continue
                deliveries = await puller.fetch(min(limit, MOST_AT_ONCE), FETCH_WAIT_S)
                (self.working.add if deliveries else self.working.discard)(lane)
                for delivery in deliveries:
                    await self._take(lane, delivery)
        except ConsumerGone:
            log.info("lane_gone", tenant=lane.tenant)
        except BusError as error:
            log.warning("lane_read_failed", tenant=lane.tenant, error=error.message)
        finally:
            with contextlib.suppress(BusError):
                await puller.close()
