"""The lanes that this sampler reads: those of its pool, found on the server, and the private ones it holds the claim of.

Each lane has its own durable and reader, and all feed one fair queue.  A reader asks for no more than it is allowed to,
and never cancels a fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from rollgrid_contracts import subjects, topology
from rollgrid_contracts.fleet import LaneOpened
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import Consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.pulling import Delivery, Puller

log = get_logger(__name__)
Lane = PoolLane | str
"""A lane of the pool, or the worker whose private lane it is."""
PRIVATE = subjects.jobs_worker("")
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


def consumer_of(lane: Lane) -> Consumer:
    return topology.lane_consumer(lane) if isinstance(lane, str) else topology.pool_consumer(lane)


class Lanes:
    """Readers of all lanes of one pool, and of the private lanes that `claimed()` names.

    `allowance(lane)` is how many jobs the lane may ask for now (0 = wait), `changed` is set when
    that may have risen, `take` receives each delivery.
    """

    def __init__(
        self,
        bus: Bus,
        pool: str,
        worker: str,
        allowance: Callable[[Lane], int],
        changed: Callable[[], Awaitable[None]],
        take: Callable[[Lane, Delivery], Awaitable[None]],
        claimed: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._bus, self._pool, self._worker = bus, pool, worker
        self._allowance, self._changed, self._take, self._claimed = allowance, changed, take, claimed
        self._readers: dict[Lane, asyncio.Task[None]] = {}
        self.working: set[Lane] = set()
        """Lanes of the pool whose last fetch found something."""
        self.stopping = False
        self._closed_to_pool = False
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
        closed jobs come back as new; so everything older than the connection is doubted, and
        what comes from another worker's lane, whose durable may have been made anew.
        """
        unsettled = self._doubt_epoch != self._bus.connection_epoch
        anothers = delivery.subject.startswith(PRIVATE) and delivery.subject != PRIVATE + self._worker
        return delivery.delivered > 1 or unsettled or anothers or delivery.sequence <= self.doubtful_below

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

    def look_soon(self) -> None:
        """Other lanes are claimed now."""
        self._hint.set()

    async def _hint_or_pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCOVER_EVERY_S):
                await self._hint.wait()
        self._hint.clear()

    async def stop(self) -> None:
        """Read no more; what was delivered and not taken goes back."""
        self.stopping = True
        await self._ended(list(self._readers))

    async def stop_pool(self) -> None:
        """Read private lanes only."""
        self._closed_to_pool = True
        await self._ended([lane for lane in self._readers if not isinstance(lane, str)])

    async def _ended(self, lanes: list[Lane]) -> None:
        readers = [self._readers[lane] for lane in lanes]
        if readers:
            await asyncio.wait(readers)

    def _may_read(self, lane: Lane) -> bool:
        return not self.stopping and (lane in self._claimed() if isinstance(lane, str) else not self._closed_to_pool)

    async def _settle_doubt(self) -> None:
        epoch = self._bus.connection_epoch
        if epoch != self._doubt_epoch:
            info = await self._bus.stream_info(topology.JOBS.name)
            self.doubtful_below = info.state.last_seq
            self._doubt_epoch = epoch

    async def _discover(self) -> None:
        durables = await self._bus.consumer_names(topology.JOBS.name)
        pool = {durable: parse_durable(self._pool, durable) for durable in durables}
        for lane in (*pool.values(), *self._claimed()):
            if lane is None or lane in self._readers or not self._may_read(lane):
                continue
            if isinstance(lane, str) and consumer_of(lane).durable not in pool:
                await ensure_consumer(self._bus, consumer_of(lane))
            log.info("lane_found", lane=consumer_of(lane).durable)
            task = asyncio.create_task(self._read(lane), name=consumer_of(lane).durable)
            self._readers[lane] = task
            task.add_done_callback(partial(self._left, lane))

    def _left(self, lane: Lane, task: asyncio.Task[None]) -> None:
        self._readers.pop(lane, None)
        self.working.discard(lane)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("lane_reader_failed", lane=task.get_name(), error=repr(error))

    async def _read(self, lane: Lane) -> None:
        puller: Puller = self._bus.puller(consumer_of(lane))
        try:
            while self._may_read(lane):
                limit = self._allowance(lane)
                if limit < 1:
                    await self._changed()
                    continue
                deliveries = await puller.fetch(min(limit, MOST_AT_ONCE), FETCH_WAIT_S)
                if not isinstance(lane, str):
                    (self.working.add if deliveries else self.working.discard)(lane)
                for delivery in deliveries:
                    await self._take(lane, delivery)
        except ConsumerGone:
            log.info("lane_gone", lane=puller.durable)
        except BusError as error:
            log.warning("lane_read_failed", lane=puller.durable, error=error.message)
        finally:
            with contextlib.suppress(BusError):
                await puller.close()
