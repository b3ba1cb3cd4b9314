"""The queue door: submissions from RG_SUBMIT, through the same translation and admission as HTTP.

A submission is accepted when the stream has it, so nothing behind this door is ever dropped: it ends
in jobs, in refused entries of its run, or in the run `_rejected`; and only then is it acknowledged.
What fails for a reason that may pass is tried again.  One durable per tenant, a few messages of each
at a time: no tenant's flood keeps another waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.topology import SUBMIT, submit_consumer, tenant_consumer
from rollgrid_runtime import telemetry
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone, RollgridError
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.pulling import Delivery
from rollgrid_runtime.reading import read_after

from . import metrics
from .auth import serving
from .handler import Handler
from .ledger_client import LedgerClient
from .queued import QueuedRequest, nanoseconds
from .refusals import Refusals
from .settings import IngestSettings
from .translate import Translator

log = get_logger(__name__)
FETCH_WAIT_S = 5.0
LOOK_AROUND_S = 2.0
"""How often new tenants, and messages on subjects of no tenant, are looked for."""

PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Between attempts at one message that this process keeps; behind the last it goes back for a while."""

NAK_S = 5.0
PACED_S = 1.0
"""How long a submission that is ahead of its run's pace stays in the stream before it is looked at again."""
ATTEMPTS_AT_A_BUG = 3
SWEEP_PAGE = 64
TRANSIENT = frozenset(
    {
        ErrorCode.NOT_READY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.BUS_ERROR,
        ErrorCode.STORAGE_ERROR,
        ErrorCode.EPISODE_REBUILDING,
        ErrorCode.ENGINE_UNAVAILABLE,
    }
)


class Paced(Exception):
    """The submission is further ahead of its run's training than it may be: it waits in the stream."""


class QueueDoor:
    """`tenants` are those who may submit now; `problems` is what keeps ingest from accepting."""

    def __init__(
        self,
        bus: Bus,
        translator: Translator,
        handler: Handler,
        ledger: LedgerClient,
        settings: IngestSettings,
        tenants: Callable[[], frozenset[str]],
        problems: Callable[[], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._bus, self._translator, self._handler, self._settings = bus, translator, handler, settings
        self._refusals = Refusals(bus, ledger, settings)
        self._tenants, self._problems = tenants, problems
        self._slots = asyncio.Semaphore(settings.queue_concurrency)
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._held: set[Delivery] = set()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    async def run(self) -> None:
        """Serve until `stop`."""
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as beside:
                beating = beside.create_task(self._keep_held())
                await self._until_usable()
                async with asyncio.TaskGroup() as work:
                    while not self._stopping.is_set():
                        tenants = self._tenants()
                        self._follow(tenants, work)
                        try:
                            await self._reject_unknown(tenants)
                        except RollgridError as error:
                            log.info("queue_not_swept", error=error.message)
                        await self._pause(LOOK_AROUND_S)
                    self._follow(frozenset(), work)
                beating.cancel()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Take nothing more; returns when what was in hand has ended or gone back."""
        self._stopping.set()
        await self._ended.wait()

    async def _until_usable(self) -> None:
        """Before the first look at the policies every model is unknown, and would be refused for good."""
        while not self._stopping.is_set() and set(await self._problems()) - {"tokenizers"}:
            await self._pause(0.5)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _keep_held(self) -> None:
        """Tell the server that what is in hand is being worked on."""
        while True:
            await asyncio.sleep(self._bus.settings.ack_wait_s / 3)
            for delivery in list(self._held):
                with contextlib.suppress(BusError):
                    await delivery.in_progress()

    # -- one lane per tenant ----------------------------------------------------------------------

    def _follow(self, tenants: frozenset[str], work: asyncio.TaskGroup) -> None:
        for tenant in set(self._lanes) - tenants:
            self._lanes.pop(tenant).cancel()
        for tenant in sorted(tenants - set(self._lanes)):
            self._lanes[tenant] = work.create_task(self._serve(tenant, work))

    async def _serve(self, tenant: str, work: asyncio.TaskGroup) -> None:
        while True:
            try:
                await ensure_consumer(self._bus, submit_consumer(tenant))
                await ensure_consumer(self._bus, tenant_consumer(tenant))
                await self._read(tenant, work)
            except (BusError, ConsumerGone) as error:
                log.warning("queue_lane_held", tenant=tenant, error=error.message)
                await asyncio.sleep(1.0)

    async def _read(self, tenant: str, work: asyncio.TaskGroup) -> None:
        puller = self._bus.puller(submit_consumer(tenant))
        room = asyncio.Semaphore(self._settings.queue_per_tenant)
        try:
            while True:
                await room.acquire()
                found: list[Delivery] = []
                try:
                    found = await puller.fetch(1, FETCH_WAIT_S)
                finally:
                    if not found:
                        room.release()
                for delivery in found:
                    self._held.add(delivery)
                    work.create_task(self._end(delivery)).add_done_callback(lambda _: room.release())
        finally:
            await puller.close()

    # -- one message ------------------------------------------------------------------------------

    async def _end(self, delivery: Delivery) -> None:
        """To its end, or back to the stream."""
        request = QueuedRequest.of(
            delivery.subject, delivery.sequence, delivery.stored_ns, delivery.headers, delivery.data
        )
        back_s = NAK_S
        try:
            for attempt, pause in enumerate(PAUSES_S):
                try:
                    async with self._slots:
                        await self._traced(request, attempt, again=delivery.delivered > 1 or attempt > 0)
                    await delivery.ack()
                    return
                except Paced:
                    back_s = PACED_S
                    break  # back to the stream, so that it holds nobody else's place meanwhile
                except Exception as error:  # noqa: BLE001 - one message must not end the door
                    metrics.QUEUED.labels("delayed").inc()
                    log.warning("queued_submission_delayed", sequence=request.sequence, why=repr(error))
                if self._stopping.is_set():
                    break
                await self._pause(pause)
            with contextlib.suppress(BusError):
                await delivery.nak(0.0 if self._stopping.is_set() else back_s)
        finally:
            self._held.discard(delivery)

    async def _traced(self, request: QueuedRequest, attempt: int, *, again: bool) -> None:
        """`_settle` below a span that begins where the message was stored."""
        stream, tenant, caller = SUBMIT.name, request.tenant, telemetry.valid(request.traceparent)
        with telemetry.root("submit", caller, kind="consumer", at=request.at, stream=stream, tenant=tenant) as span:
            context = span.traceparent
            telemetry.record("queue submissions", context, request.at, time.time(), kind="consumer", stream=stream)
            with bound(tenant=tenant, trace_id=telemetry.trace_id(context)), serving(tenant):
                await self._settle(request, attempt, again=again)

    async def _settle(self, request: QueuedRequest, attempt: int, *, again: bool) -> None:
        """Store its jobs, or what closes it.  Raises RollgridError for what may pass."""
        try:
            body, caller = request.read(self._settings.max_body_bytes)
            caller = msgspec.structs.replace(caller, traceparent=telemetry.current().traceparent)
            submission = await self._translator.rollout(body, caller)
            stored = msgspec.structs.replace(submission, stored=True)
            await self._handler.submit(stored, at=request.at, again=again, patience_s=0.0)
        except RollgridError as error:
            if error.code is ErrorCode.PACED and time.time() < request.at + max(g.deadline_s for g in stored.groups):
                metrics.QUEUED.labels("paced").inc()
                raise Paced from error
            if error.code in TRANSIENT:
                raise
            await self._refuse(request, error)
        except Exception as error:
            log.exception("queued_submission_failed", sequence=request.sequence)
            failure = RollgridError(ErrorCode.INTERNAL, f"this submission cannot be handled: {type(error).__name__}")
            if attempt + 1 < ATTEMPTS_AT_A_BUG:
                raise failure from error
            await self._refuse(request, failure)
        else:
            metrics.QUEUED.labels("accepted").inc()

    async def _refuse(self, request: QueuedRequest, error: RollgridError) -> None:
        metrics.REFUSED.labels(error.code.value).inc()
        try:
            closed = await self._refusals.close(request, error)
        except RollgridError:
            raise
        except Exception:
            log.exception("refusal_not_written", sequence=request.sequence)
            closed = False
            await self._refusals.reject(request, RollgridError(error.code, "refused, and the body cannot be quoted"))
        metrics.QUEUED.labels("refused" if closed else "rejected").inc()
        log.info("queued_submission_refused", sequence=request.sequence, code=error.code, in_its_run=closed)

    # -- subjects of nobody -----------------------------------------------------------------------

    async def _reject_unknown(self, tenants: frozenset[str]) -> None:
        """Messages on subjects that no tenant has end in `_rejected`, read by nobody else."""
        body = json.dumps({"subjects_filter": subjects.SUBMIT_ALL}).encode()
        answer = json.loads(await self._bus.request_raw(f"$JS.API.STREAM.INFO.{SUBMIT.name}", body, 5))
        for subject in (answer.get("state") or {}).get("subjects") or {}:
            if subjects.tenant_of_submit(subject) not in tenants:
                await self._reject_all(subject)

    async def _reject_all(self, subject: str) -> None:
        refusal = RollgridError(
            ErrorCode.FORBIDDEN,
            "no tenant of this name may submit here"
            if ids.is_name(subjects.tenant_of_submit(subject))
            else "no tenant",
            boundary=Boundary.CLIENT,
            field="subject",
        )
        page = await read_after(self._bus, SUBMIT.name, subject, 0, SWEEP_PAGE)
        for found in page.messages:
            stored_ns = nanoseconds(found.headers["Nats-Time-Stamp"])
            request = QueuedRequest.of(subject, found.sequence, stored_ns, found.headers, found.data)
            if time.time() - request.at < self._settings.queue_unknown_grace_s:
                return
            await self._refusals.reject(request, refusal)
            metrics.QUEUED.labels("rejected").inc()
            await self._bus.delete_message(SUBMIT.name, found.sequence)
