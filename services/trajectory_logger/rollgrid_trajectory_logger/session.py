"""One life as the active ledger: from the take-over until the lease or the connection is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollgrid_contracts import subjects
from rollgrid_contracts.fleet import LedgerQuery
from rollgrid_contracts.topology import ledger_samples_consumer
from rollgrid_runtime.archive import ArchiveManifests
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.pulling import Puller

from .authority import Authority
from .closer import Closer
from .handler import LedgerHandler
from .held_jobs import HeldJobs
from .ledger import Ledger, unknown
from .policies import Policies
from .query import answer
from .settings import TrajectoryLoggerSettings
from .take_over import know_jobs_end, read_up, take_over
from .upkeep import Upkeep

log = get_logger(__name__)
FETCH_WAIT_S = 1.0
TICK_S = 0.25

Work = Callable[[], Coroutine[Any, Any, None]]
"""Something that works until it is cancelled."""


class Reconnected(Exception):
    """The connection was lost for a moment: messages in flight may be lost with it, so read everything again."""


class LedgerSession:
    """`run` ends only by an exception; its state dies with it and the next session reads it all again."""

    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        manifests: ArchiveManifests,
        authority: Authority,
        settings: TrajectoryLoggerSettings,
    ) -> None:
        self._bus, self._blobs, self._manifests = bus, blobs, manifests
        self._authority, self._settings = authority, settings
        self.ledger = Ledger(authority.epoch)
        self._jobs = HeldJobs(bus)
        self._handler = LedgerHandler(self.ledger, self._jobs)
        self._closer: Closer | None = None
        self._policies = Policies(bus)
        self._upkeep = Upkeep(bus, settings, authority.epoch, self._handler, self._jobs)
        self._asked = asyncio.Event()

    async def run(self, companions: Sequence[Work]) -> None:
        """Take over, then work, with `companions` beside it.  Raises an ExceptionGroup of LeaseLost, Reconnected, BusError, StorageError or ConsumerGone."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._authority.keep())
            tasks.create_task(self._watch_connection(self._bus.connection_epoch))
            tasks.create_task(self._policies.follow())
            tasks.create_task(self._work())
            for companion in companions:
                tasks.create_task(companion())

    @property
    def problems(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.ledger.live:
            found["ledger"] = "taking over"
        if self._closer is not None and self._closer.problem is not None:
            found["trajectories"] = self._closer.problem
        if self._upkeep.alarm is not None:
            found["books"] = self._upkeep.alarm
        return found

    @property
    def facts(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "epoch": ledger.epoch,
            "open_groups": len(ledger.open),
            "folded_to": ledger.folded_to,
            "events_to": ledger.events_to,
            "events_waiting": ledger.waiting,
            "closes_waiting": self._closer.backlog if self._closer else 0,
            "superseded": sum(ledger.superseded.values()),
        }

    async def _work(self) -> None:
        epoch = self._authority.epoch
        taken = await take_over(self._bus, self._manifests, self._settings, epoch, self._handler)
        closer = Closer(
            self._bus,
            self._blobs,
            self._authority,
            self._settings,
            taken.tails,
            self._handler.on_closed,
            self._policies.stamped,
        )
        self._closer = closer
        await self._policies.read()
        self._handler.go_live(closer)
        subscription = await self._bus.subscribe(subjects.LEDGER_QUERY, LedgerQuery, self._on_query)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(closer.run())
                tasks.create_task(self._jobs.run())
                tasks.create_task(self._read_jobs(taken.jobs))
                tasks.create_task(self._read_events(taken.events, closer.room))
                tasks.create_task(self._keep_time())
                tasks.create_task(self._look_for_jobs_end())
                tasks.create_task(self._upkeep.purge())
                tasks.create_task(self._upkeep.watch())
        finally:
            self.ledger.live = False
            await self._bus.unsubscribe(subscription)
            await taken.jobs.close()
            await taken.events.close()

    # -- reading ------------------------------------------------------------------------------

    async def _read_jobs(self, puller: Puller) -> None:
        while True:
            for delivery in await puller.fetch(self._settings.fetch, FETCH_WAIT_S):
                await self._handler.on_job(delivery)
            await asyncio.sleep(0)

    async def _read_events(self, puller: Puller, room: asyncio.Event) -> None:
        """Fold events, no further than closes can be written: an unwritten close is memory."""
        while True:
            batch = await puller.fetch(self._settings.fetch, FETCH_WAIT_S)
            await self._handler.on_events(batch)
            settled = self._handler.events_settled()
            if settled is not None:
                await self._bus.publish_raw(settled, b"+ACK")
            await room.wait()
            await asyncio.sleep(0)

    async def _look_for_jobs_end(self) -> None:
        """An event may name a job that was deleted before it was read: find out when nothing is left to read."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.ledger.waiting or self._asked.is_set():
                self._asked.clear()
                await know_jobs_end(self._bus, self._authority.epoch, self._handler)

    # -- time ---------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._upkeep.report()
            due = self.ledger.next_deadline
            if due is not None and due <= time.time():
                until = await self._events_known_until()
                asks = self.ledger.constrained(until)
                unmet = await self._policies.unmet() if asks else unknown
                self._handler.decide(self.ledger.advance(until, time.time(), unmet))

    async def _events_known_until(self) -> float:
        """Up to which UNIX second every stored event has been applied: what finished in time counts, however late we read it."""
        now = time.time()
        consumer = ledger_samples_consumer(self._authority.epoch)
        if self.ledger.waiting or not await read_up(self._bus, consumer, lambda: self._handler.events_read):
            return min(now, self._handler.applied_at)
        return now

    # -- others -------------------------------------------------------------------------------

    async def _on_query(self, query: LedgerQuery, reply: str) -> None:
        self._asked.set()
        try:
            await self._bus.respond(reply, answer(self.ledger, query))
        except BusError as error:
            log.warning("answer_not_sent", error=error.message)

    async def _watch_connection(self, epoch: int) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._bus.connection_epoch != epoch:
                raise Reconnected
