"""Wiring, start, drain and stop of one sampler, and the loops that keep it honest.

Flow: lanes read deliveries → triage (deadline, version, what the record already has) → fair queue →
slots → handler → ack.  Heartbeats for everything held go out only while the engine's own loop
answers; when the engine dies, held work goes back and the process ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine
from functools import partial
from typing import Any, cast

import msgspec
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.fleet import CancelWork, DrainWorker, LaneOpened, WorkerCommand, WorkerState
from rollgrid_contracts.jobs import Job, OpenEpisode, Priority, SampleGroup, VersionRule
from rollgrid_contracts.subjects import EVERY_WORKER, PoolLane
from rollgrid_contracts.topology import JOBS, lane_consumer
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, PayloadGone, StorageError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.pulling import Delivery
from rollgrid_runtime.service import connections, instance_name, spare_collector
from rollgrid_runtime.settings import NatsSettings, RedisSettings, S3Settings
from rollgrid_runtime.state import State

from . import metrics, traces
from .engines.base import EngineDead
from .engines.choice import make_engine, prove
from .fair import WEIGHTS, FairQueue
from .handler import Context, Handler
from .headroom import Headroom
from .heartbeats import Heartbeats
from .jobs import HeldJob, Outcome
from .lane_claims import LaneClaims
from .lanes import Lane, Lanes
from .lease import Lease
from .ledger import LedgerDesk
from .parsing import ParserDesk
from .partials import Partials
from .settings import EngineKind, SamplerSettings
from .slots import Slots
from .streaming import Pace
from .suspects import Suspects
from .triage import Triage, Verdict
from .weights import Weights

log = get_logger(__name__)
ANY_JOB = cast(type[SampleGroup | OpenEpisode], Job)
ANY_COMMAND = cast(type[CancelWork | DrainWorker], WorkerCommand)
REMEMBERED = 20_000
"""Refused jobs remembered."""
DRAIN_MARGIN_S = 2.0
"""Kept back from the drain's time for handing work back and flushing."""
GIVE_UP_LANES_S = 1.0
"""A worker that ends tells the others so long that its lanes are free."""
PRIVATE_AHEAD = 4
"""Jobs of private lanes in hand, as a multiple of the slots: nobody else would have them, and the fair queue sees more tenants."""


class SamplerService:
    """See `rollgrid_runtime.service.Service`."""

    name = "sampler"

    def __init__(
        self,
        settings: SamplerSettings,
        nats: NatsSettings | None = None,
        s3: S3Settings | None = None,
        redis: RedisSettings | None = None,
    ) -> None:
        self.settings = settings
        self.worker = instance_name(settings, self.name)
        self.incarnation = secrets.token_hex(8)
        self.pool = ids.pool_id(
            ids.policy_key(settings.tenant, settings.policy), settings.dtype, settings.device, settings.region
        )
        self.engine = make_engine(settings)
        self._nats, self._s3, self._redis = nats or NatsSettings(), s3 or S3Settings(), redis
        self._stack = contextlib.AsyncExitStack()
        self._slots = Slots(settings.places, settings.express_places)
        self._queue: FairQueue[PoolLane, HeldJob] = FairQueue()
        self._held: dict[int, HeldJob] = {}
        self._triage: set[asyncio.Task[None]] = set()
        self._refusals: OrderedDict[int, int] = OrderedDict()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None
        self._drain_asked = asyncio.Event()
        self._started_at = time.time()
        self._engine_ok_at = 0.0
        self._engine_problem: str | None = "starting"
        self._draining = False
        self._closing = False
        self._mean_cost = 8.0

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        self.bus, self.blobs = await self._stack.enter_async_context(connections(self.worker, self._nats, self._s3))
        self._wire(self.bus, self.blobs)

    def _wire(self, bus: Bus, blobs: Blobs) -> None:
        self._weights = Weights(bus, blobs, self.engine, self.settings, self.worker)
        self._lease = Lease(bus, self.lease, self._weights.changed)
        suspects = Suspects(bus)
        self._commit = GroupCommit(bus)
        scripted = self.settings.engine is EngineKind.SCRIPTED
        context = Context(
            bus,
            self._commit,
            Headroom(bus),
            self.engine,
            suspects,
            ParserDesk(lambda: self.engine.tokenizer, self.settings.model, optional=scripted),
            self._weights,
            self._partials(),
            self.settings,
            self.worker,
            self.incarnation,
        )
        self._handler = Handler(context, self._free_seat)
        self._lanes = Lanes(
            bus, self.pool, self.worker, self._allowance, self._wait_for_room, self._take, lambda: self._claims.held
        )
        self._claims = LaneClaims(
            bus, self.worker, self.incarnation, self.pool, self._lanes.look_soon, kept_s=self.settings.lane_kept_s
        )
        self._verdicts = Triage(
            self._weights,
            LedgerDesk(bus, self.settings.ledger_timeout_s),
            suspects,
            self._handler.endings,
            self._lease.workers,
            self._lanes.doubtful,
            self.settings.refuse_delay_s,
            self.pool,
        )
        self._expose()

    def _partials(self) -> Partials:
        state = State(self._redis) if self._redis is not None else None
        if state is not None:
            self._stack.push_async_callback(state.close)
        return Partials(state, Pace(self.settings.partial_interval_s, self.settings.partial_tokens))

    def _expose(self) -> None:
        """What is read when it is scraped."""
        metrics.SLOTS.set(self._slots.total)
        for gauge, read in (
            (metrics.BUSY, lambda: self._slots.busy),
            (metrics.QUEUED, lambda: len(self._queue)),
            (metrics.HELD, lambda: len(self._held)),
            (metrics.LANES, lambda: self._lanes.count),
            (metrics.HEALTH_AGE, metrics.age(lambda: self._engine_ok_at)),
            (metrics.VERSION, lambda: self._weights.current),
            (metrics.BEHIND, lambda: self._weights.behind),
        ):
            gauge.set_function(read)

    async def run(self) -> None:
        """Load the engine, then sample until drained.  Raises EngineDead."""
        self._failure = asyncio.get_running_loop().create_future()
        log.info("engine_starting", engine=self.settings.engine.value, pool=self.pool)
        try:
            await self._weights.load()
            await self._work()
        except BaseExceptionGroup as group:  # a loop's TaskGroup wraps what ended it
            dead = group.subgroup(EngineDead)
            raise (dead.exceptions[0] if dead is not None else group) from group
        finally:
            self._engine_problem = self._engine_problem or "stopped"
            if self._weights.quarantined is not None:
                await self._heal()

    async def _work(self) -> None:
        """All loops, until one of them ends."""
        loops = (
            self._commit.run(),
            self._weights.follow(),
            self._watch_engine(),
            Heartbeats(self._nats.ack_wait_s, self._held.values, lambda: self._engine_ok_at).run(),
            self._lease.keep(),
            self._dispatch(),
            self._claims.run(),
            self._lanes.run(),
            self._until_failure(),
            self._until_drained(),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._engine_problem = self._engine_problem or "stopped"
            await _cancelled(tasks)
            await self._hand_back()

    async def _open(self) -> None:
        """Once everything desired is loaded and a token has come out, work may come."""
        await self._weights.ready.wait()
        await prove(self.engine, self.settings.engine_timeout_s)
        self._engine_ok_at = time.monotonic()
        log.info("engine_ready", engine=self.engine.facts.name, version=self.engine.loaded.version)
        spare_collector()
        for target in (self.worker, EVERY_WORKER):
            await self.bus.subscribe(subjects.worker_control(target), ANY_COMMAND, self._on_command)
        await self.bus.subscribe(subjects.LANES_CONTROL, LaneOpened, self._lanes.on_opened)
        self._engine_problem = None
        self._room.set()

    async def _heal(self) -> None:
        """Out of rotation, and the lease says why: mend what can be mended before the process starts anew."""
        await self._lease.renew()
        telling = asyncio.create_task(self._lease.keep())
        try:
            await self._weights.heal()
        finally:
            await _cancelled([telling])

    async def drain(self) -> None:
        """Take nothing more but the own lane's, finish what runs, hand the rest back."""
        self._draining = True
        try:
            async with asyncio.timeout(max(0.0, self.settings.drain_s - DRAIN_MARGIN_S)):
                if hasattr(self, "_lanes"):
                    await self._lease.renew()
                    await self._lanes.stop_pool()
                    await self._claims.leave(own=False)
                    await self._return_unstarted(private=False)
                    await self._finish_lane()
                    await self._claims.leave(own=True)
                    await self._lanes.stop()
                    await self._return_unstarted(private=True)
                    while self._held:
                        self._idle.clear()
                        await self._idle.wait()
        except TimeoutError:
            log.warning("drain_cut_short", held=len(self._held))

    async def _finish_lane(self) -> None:
        """No session is bound here any more: what waits on the own lane is begun, for half of the time at most."""
        lane = lane_consumer(self.worker)
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout((self.settings.drain_s - DRAIN_MARGIN_S) / 2):
                while self.worker in self._claims.held:
                    info = await self.bus.consumer_info(JOBS.name, lane.durable)
                    waits = any(held.private and held.task is None for held in self._held.values())
                    if info is None or not (info.num_pending or waits):
                        break
                    await self._wait_for_room()
        self._closing = True

    async def stop(self) -> None:
        if hasattr(self, "_lease"):
            if self._weights.quarantined is None:  # else the lease tells why, as long as it lasts
                await self._lease.end()
            self._weights.release()
        await self.engine.close()
        await self._stack.aclose()

    # -- deliveries in ------------------------------------------------------------------------

    def _allowance(self, lane: Lane) -> int:
        """Jobs this lane may ask for now: its share of the free slots, and a small prefetch."""
        if self._engine_problem is not None:
            return 0
        if lane == self.worker:
            held = sum(one.private for one in self._held.values())
            return 0 if self._closing else max(0, PRIVATE_AHEAD * self._slots.total - held)
        if self._draining:
            return 0
        depth = self._queue.depth(lane) if isinstance(lane, PoolLane) else self._waiting_of(lane)
        free = max(0.0, self._slots.free - self._queue.cost) / self._mean_cost
        share = free / max(1, len(self._lanes.working | {lane}))
        return max(0, int(share) + self.settings.prefetch - depth) or (
            1 if self._slots.free > self._queue.cost and not depth else 0
        )

    def _waiting_of(self, worker: str) -> int:
        """Jobs of another worker's lane that wait here."""
        subject = subjects.jobs_worker(worker)
        return sum(one.task is None and one.delivery.subject == subject for one in self._held.values())

    async def _wait_for_room(self) -> None:
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._room.wait()

    async def _take(self, lane: Lane, delivery: Delivery) -> None:
        """A delivery from the lane's reader: hold it, and triage it beside the reading."""
        known = self._held.get(delivery.sequence)
        if known is not None:  # came back to us while we work on it: the newer delivery is the one to ack
            known.delivery = delivery
            return
        try:
            job = await delivery.message(ANY_JOB)
        except PayloadGone as error:
            log.error("job_payload_gone", sequence=delivery.sequence, error=error.message)
            await self._settle(delivery, Outcome.ACK)
            return
        except StorageError as error:
            log.warning("job_unreadable_now", sequence=delivery.sequence, error=error.message)
            await self._settle(delivery, Outcome.REFUSE)
            return
        except (msgspec.DecodeError, RecursionError) as error:
            log.error("job_undecodable", sequence=delivery.sequence, error=repr(error))
            await self._settle(delivery, Outcome.ACK)
            return
        if not isinstance(job, SampleGroup):
            await self._settle(delivery, Outcome.ACK)
            return
        refused = self._refusals.get(delivery.sequence, 0)
        begun = delivery.delivered - 1 - refused > 0
        held = HeldJob(delivery, job, _share_of(job, lane), suspect=begun, private=isinstance(lane, str))
        if begun and (job.weights.rule is not VersionRule.LATEST or job.pinned):
            held.suspect, held.refused = False, True  # others may have given it back as often as that
        self._held[held.sequence] = held
        metrics.delivered(held)
        traces.begin(held, self.worker)
        with bound(**held.ids):
            await self._triage_or_queue(held)

    async def _triage_or_queue(self, held: HeldJob) -> None:
        self._mean_cost += (max(1, len(held.job.indexes)) - self._mean_cost) / 16
        match self._verdicts.first(held):
            case Verdict.OVER:
                await self._end(held, Outcome.ACK)
            case Verdict.REFUSE:
                await self._end(held, Outcome.REFUSE)
            case Verdict.ASK:
                self._beside(self._ask(held))
            case Verdict.QUEUE:
                self._enqueue(held)

    def _beside(self, triage: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(triage)
        self._triage.add(task)
        task.add_done_callback(self._triage.discard)

    async def _ask(self, held: HeldJob) -> None:
        outcome = await self._verdicts.ask(held)
        if held.cancelled or self._held.get(held.sequence) is not held:
            return
        if outcome is None:
            self._enqueue(held)
        else:
            await self._end(held, outcome)

    def _enqueue(self, held: HeldJob) -> None:
        if held.cancelled or self._begins_no(held) or self._held.get(held.sequence) is not held:
            return
        self._queue.push(held.lane, held, max(1, len(held.missing)), WEIGHTS[held.lane.priority])
        self._room.set()

    def _begins_no(self, held: HeldJob) -> bool:
        return self._closing or (self._draining and not held.private)

    # -- work ---------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        """Start samples whenever there may be room for more."""
        await self._open()
        while True:
            self._fill()
            await self._wait_for_room()

    def _fill(self) -> None:
        """Start the samples whose turn it is, as many as there is room for."""
        while (held := self._next()) is not None:
            if held.task is None:
                self._slots.admit(held.sequence, held.job.tenant, alone=held.alone)
                held.span.event("dispatched", time.time())
                held.task = asyncio.create_task(self._handler.handle(held), name=held.job.group_id)
                held.task.add_done_callback(partial(self._worked, held))
            self._slots.start(held.sequence)
            held.seats.release()

    def _next(self) -> HeldJob | None:
        """The job whose next sample may start.  A suspect in turn waits until nothing else is in hand."""
        first = self._queue.peek()
        if first is not None and first.task is None and first.alone and not self._slots.admissible(alone=True):
            return self._queue.take(lambda held: held.task is not None and self._may_start(held))
        return self._queue.take(self._may_start)

    def _may_start(self, held: HeldJob) -> bool:
        if held.task is None and (self._begins_no(held) or not self._slots.admissible(alone=held.alone)):
            return False
        return self._slots.room(held.job.tenant, hurried=held.lane.priority is Priority.INTERACTIVE)

    def _free_seat(self, held: HeldJob) -> None:
        self._slots.release(held.sequence)
        self._fill()
        self._room.set()

    def _worked(self, held: HeldJob, task: asyncio.Task[Outcome]) -> None:
        self._queue.remove(lambda waiting: waiting is held)
        self._slots.leave(held.sequence)
        self._fill()
        self._room.set()
        if task.cancelled():
            return  # draining: handed back by whoever cancelled it
        error = task.exception()
        if error is not None:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return
        settling = asyncio.create_task(self._end(held, task.result()))
        self._triage.add(settling)
        settling.add_done_callback(self._triage.discard)

    async def _end(self, held: HeldJob, outcome: Outcome) -> None:
        self._held.pop(held.sequence, None)
        held.span.set(outcome=outcome.value)
        held.span.end()
        if outcome is Outcome.REFUSE:
            metrics.REFUSALS.inc()
            self._refusals[held.sequence] = self._refusals.get(held.sequence, 0) + 1
            while len(self._refusals) > REMEMBERED:
                self._refusals.popitem(last=False)
        else:
            self._refusals.pop(held.sequence, None)
        with bound(**held.ids):
            await self._settle(held.delivery, outcome)
            log.debug("job_settled", outcome=outcome.value, attempt=held.attempt)
        if not self._held:
            self._idle.set()
        self._room.set()

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        try:
            if outcome is Outcome.ACK:
                await delivery.ack()
            else:
                await delivery.nak(self.settings.refuse_delay_s if outcome is Outcome.REFUSE else 0.0)
        except BusError as error:  # it comes again after the ack-wait, and the record tells what is done
            log.warning("delivery_not_settled", sequence=delivery.sequence, outcome=outcome.value, error=error.message)

    async def _on_command(self, command: CancelWork | DrainWorker, _reply: str) -> None:
        if isinstance(command, DrainWorker):
            log.info("drain_asked", deadline=command.deadline)
            self._drain_asked.set()
            return
        cancels = self._verdicts.cancels
        cancels.note(command)
        for held in self._queue.remove(lambda held: held.task is None and cancels.wants(held.job)):
            if not cancels.ends(held.job):
                held.abort()
                self._beside(self._ask(held))
        for held in list(self._held.values()):
            if cancels.ends(held.job) and not held.cancelled:
                held.cancel()
                if held.task is None:
                    await self._end(held, Outcome.ACK)
            elif cancels.aborts(held.job):
                held.abort()

    # -- loops --------------------------------------------------------------------------------

    async def _watch_engine(self) -> None:
        """Round trips through the engine's loop.  Raises EngineDead."""
        while True:
            await self.engine.health()
            self._engine_ok_at = time.monotonic()
            await asyncio.sleep(min(1.0, self._nats.ack_wait_s / 6))

    def lease(self) -> WorkerState:
        return WorkerState(
            worker=self.worker,
            incarnation=self.incarnation,
            pool=self.pool,
            engine=self.engine.facts.name,
            device=self.settings.device,
            region=self.settings.region,
            dtype=self.settings.dtype,
            slots=self.settings.slots,
            busy=min(self._slots.busy, self.settings.slots),
            max_model_len=self.engine.facts.max_model_len,
            loaded=self._weights.loaded(),
            draining=self._draining,
            quarantined=self._weights.quarantined,
            started_at=self._started_at,
            renewed_at=time.time(),
            tokens_total=self._handler.tokens_total,
            samples_total=self._handler.samples_total,
            max_loras=self.engine.facts.max_loras,
            swapping=self._weights.swapping,
            weights_problem=self._weights.problem,
            waiting=self._queue.cost,
        )

    async def _until_failure(self) -> None:
        assert self._failure is not None
        try:
            await self._failure
        except EngineDead as error:
            self._engine_problem = error.message
            raise

    async def _until_drained(self) -> None:
        """A drain asked for on the control subject: finish, then end the process well."""
        await self._drain_asked.wait()
        await self.drain()

    # -- handing back -------------------------------------------------------------------------

    async def _return_unstarted(self, *, private: bool) -> None:
        self._queue.remove(lambda held: held.task is None and held.private is private)
        for held in [h for h in self._held.values() if h.task is None and h.private is private]:
            await self._end(held, Outcome.RETURN)

    async def _hand_back(self) -> None:
        """Stop all work; whatever is still held goes back at once for others to take."""
        self._draining = self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_LANES_S):
                await self._claims.leave(own=True)
        working = [held.task for held in self._held.values() if held.task is not None]
        await _cancelled([*working, *self._triage])
        for held in list(self._held.values()):
            await self._end(held, Outcome.RETURN)

    # -- health -------------------------------------------------------------------------------

    async def problems(self) -> dict[str, str]:
        found = {}
        if self._engine_problem is not None:
            found["engine"] = self._engine_problem
        if not self.bus.connected:
            found["nats"] = "not connected"
        if not self._lease.live:
            found["lease"] = "no lease written lately"
        if self._weights.problem is not None:
            found["weights"] = self._weights.problem
        if self._weights.quarantined is not None:
            found["quarantined"] = self._weights.quarantined
        if self._draining:
            found["draining"] = "takes no new work"
        return found

    def facts(self) -> dict[str, Any]:
        loaded = self.engine.loaded
        return {
            "worker": self.worker,
            "pool": self.pool,
            "policy": self.settings.policy,
            "engine": self.settings.engine.value,
            "version": self._weights.current,
            "fingerprint": loaded.fingerprint,
            "adapters": sorted(loaded.adapters),
            "slots": self.settings.slots,
            "busy": min(self._slots.busy, self.settings.slots),
            "held": len(self._held),
            "queued": len(self._queue),
            "lanes": self._lanes.count,
            "tokens_total": self._handler.tokens_total,
            "samples_total": self._handler.samples_total,
        }


def _share_of(job: SampleGroup, lane: Lane) -> PoolLane:
    """Whose turn it uses: what comes by a private lane counts to its tenant's share as what comes by the pool's."""
    if isinstance(lane, PoolLane):
        return lane
    return PoolLane(job.pool, Priority.INTERACTIVE if job.session is not None else job.priority, job.tenant)


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
