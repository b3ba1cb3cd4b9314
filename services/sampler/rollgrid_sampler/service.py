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
from typing import Any, cast

from rollgrid_contracts import ids, subjects
from rollgrid_contracts.fleet import CancelWork, DrainWorker, LaneOpened, WorkerCommand, WorkerState
from rollgrid_contracts.subjects import EVERY_WORKER
from rollgrid_contracts.topology import JOBS, lane_consumer
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.service import connections, instance_name, spare_collector
from rollgrid_runtime.settings import NatsSettings, RedisSettings, S3Settings
from rollgrid_runtime.state import State

from . import metrics
from .engines.base import EngineDead
from .engines.choice import make_engine, prove
from .handler import Context, Handler
from .headroom import Headroom
from .heartbeats import Heartbeats
from .lane_claims import LaneClaims
from .lanes import Lane, Lanes
from .lease import Lease
from .ledger import LedgerDesk
from .parsing import ParserDesk
from .partials import Partials
from .settings import EngineKind, SamplerSettings
from .streaming import Pace
from .suspects import Suspects
from .triage import Triage
from .weights import Weights
from .work import Work, cancelled

log = get_logger(__name__)
ANY_COMMAND = cast(type[CancelWork | DrainWorker], WorkerCommand)
DRAIN_MARGIN_S = 2.0
"""Kept back from the drain's time for handing work back and flushing."""
GIVE_UP_LANES_S = 1.0
"""A worker that ends tells the others so long that its lanes are free."""


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
        self._handler: Handler
        self._verdicts: Triage
        self._claims: LaneClaims
        self.work = Work(settings, self.worker, lambda: self._handler, lambda: self._verdicts, self._fail)
        self._failure: asyncio.Future[None] | None = None
        self._drain_asked = asyncio.Event()
        self._started_at = time.time()
        self._engine_ok_at = 0.0
        self._engine_problem: str | None = "starting"

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
        self._handler = Handler(context, self.work.free_seat)
        self._lanes = Lanes(
            bus,
            self.pool,
            self.worker,
            self._allowance,
            self.work.wait_for_room,
            self.work.take,
            lambda: self._claims.held,
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
        metrics.SLOTS.set(self.work.slots.total)
        for gauge, read in (
            (metrics.BUSY, lambda: self.work.slots.busy),
            (metrics.QUEUED, lambda: self.work.queued),
            (metrics.HELD, lambda: len(self.work.held())),
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
            await self._loop()
        except BaseExceptionGroup as group:  # a loop's TaskGroup wraps what ended it
            dead = group.subgroup(EngineDead)
            raise (dead.exceptions[0] if dead is not None else group) from group
        finally:
            self._engine_problem = self._engine_problem or "stopped"
            if self._weights.quarantined is not None:
                await self._heal()

    async def _loop(self) -> None:
        """All loops, until one of them ends."""
        loops = (
            self._commit.run(),
            self._weights.follow(),
            self._watch_engine(),
            Heartbeats(self._nats.ack_wait_s, self.work.held, lambda: self._engine_ok_at).run(),
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
            await cancelled(tasks)
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
        self.work.look()

    async def _heal(self) -> None:
        """Out of rotation, and the lease says why: mend what can be mended before the process starts anew."""
        await self._lease.renew()
        telling = asyncio.create_task(self._lease.keep())
        try:
            await self._weights.heal()
        finally:
            await cancelled([telling])

    async def drain(self) -> None:
        """Take nothing more but the own lane's, finish what runs, hand the rest back."""
        self.work.draining = True
        try:
            async with asyncio.timeout(max(0.0, self.settings.drain_s - DRAIN_MARGIN_S)):
                if hasattr(self, "_lanes"):
                    await self._lease.renew()
                    await self._lanes.stop_pool()
                    await self._claims.leave(own=False)
                    await self.work.return_unstarted(private=False)
                    await self._finish_lane()
                    await self._claims.leave(own=True)
                    await self._lanes.stop()
                    await self.work.return_unstarted(private=True)
                    await self.work.ended()
        except TimeoutError:
            log.warning("drain_cut_short", held=len(self.work.held()))

    async def _finish_lane(self) -> None:
        """No session is bound here any more: what waits on the own lane is begun, for half of the time at most."""
        lane = lane_consumer(self.worker)
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout((self.settings.drain_s - DRAIN_MARGIN_S) / 2):
                while self.worker in self._claims.held:
                    info = await self.bus.consumer_info(JOBS.name, lane.durable)
                    if info is None or not (info.num_pending or self.work.private_waits()):
                        break
                    await self.work.wait_for_room()
        self.work.closing = True

    async def stop(self) -> None:
        if hasattr(self, "_lease"):
            if self._weights.quarantined is None:  # else the lease tells why, as long as it lasts
                await self._lease.end()
            self._weights.release()
        await self.engine.close()
        await self._stack.aclose()

    # -- work ---------------------------------------------------------------------------------

    def _allowance(self, lane: Lane) -> int:
        if self._engine_problem is not None:
            return 0
        if lane == self.worker:
            return self.work.private_allowance()
        return self.work.allowance(lane, len(self._lanes.working | {lane}))

    async def _dispatch(self) -> None:
        """Start samples whenever there may be room for more."""
        await self._open()
        while True:
            self.work.fill()
            await self.work.wait_for_room()

    async def _on_command(self, command: CancelWork | DrainWorker, _reply: str) -> None:
        if isinstance(command, DrainWorker):
            log.info("drain_asked", deadline=command.deadline)
            self._drain_asked.set()
        else:
            await self.work.cancel(command)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

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
            busy=min(self.work.slots.busy, self.settings.slots),
            max_model_len=self.engine.facts.max_model_len,
            loaded=self._weights.loaded(),
            draining=self.work.draining,
            quarantined=self._weights.quarantined,
            started_at=self._started_at,
            renewed_at=time.time(),
            tokens_total=self._handler.tokens_total,
            samples_total=self._handler.samples_total,
            max_loras=self.engine.facts.max_loras,
            swapping=self._weights.swapping,
            weights_problem=self._weights.problem,
            waiting=self.work.waiting,
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

    async def _hand_back(self) -> None:
        """Stop all work; whatever is still held goes back at once for others to take."""
        self.work.draining = self.work.closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_LANES_S):
                await self._claims.leave(own=True)
        await self.work.hand_back()

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
        if self.work.draining:
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
            "busy": min(self.work.slots.busy, self.settings.slots),
            "held": len(self.work.held()),
            "queued": self.work.queued,
            "lanes": self._lanes.count,
            "tokens_total": self._handler.tokens_total,
            "samples_total": self._handler.samples_total,
        }
