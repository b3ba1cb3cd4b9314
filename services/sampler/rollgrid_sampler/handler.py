"""What happens to one job: `SampleGroup` in, `SamplesFinished` (and replies) out.

A sample that cannot be generated is a failed sample with a typed error; it never disturbs its
neighbours.  Only a dead engine ends the handler, and with it the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import Priority, Reply, SampleGroup
from rollgrid_contracts.samples import Parsed, Sample
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import bound, get_logger

from . import metrics, traces
from .admission import check, judge
from .endings import Endings
from .engines.base import Delta, Engine, EngineDead, Generated, GenerationRequest, OnDelta, RequestFailed, Sent
from .generation import ConstraintLost, Generation
from .headroom import Headroom
from .jobs import Aborted, HeldJob, Outcome, sample_name
from .outcomes import Outcomes
from .parsing import ParserDesk, Reading
from .partials import Keeper, Partials
from .publishing import Origin, Publisher, recorded, reply
from .resume import sent_before
from .settings import SamplerSettings
from .streaming import Pace, SampleStream
from .suspects import Suspects
from .weights import Weights, needs_one

log = get_logger(__name__)
GIVE_BACK_S = 1.0
"""Undoing what was recorded of a job that is given back may take so long."""


class Context(NamedTuple):
    """What the handler works with."""

    bus: Bus
    commit: GroupCommit
    headroom: Headroom
    engine: Engine
    suspects: Suspects
    parsers: ParserDesk
    weights: Weights
    partials: Partials
    settings: SamplerSettings
    worker: str
    incarnation: str


class Work(NamedTuple):
    """One job as its samples need it; `sent` maps indexes to what they continue behind.

    `pin` is the one version that must make all of it, if any.
    """

    held: HeldJob
    prompt: list[int]
    reading: Reading | None
    sent: dict[int, Sent]
    pin: int | None


class Handler:
    """`free_seat` is called once for each sample that has left the engine."""

    def __init__(self, context: Context, free_seat: Callable[[HeldJob], None]) -> None:
        self._context = context
        self._free_seat = free_seat
        self._outcomes = Outcomes(context.weights, context.worker)
        self.endings = Endings(context.weights, self._outcomes, self._publisher, self._answer_recorded)
        self.tokens_total = 0
        self.samples_total = 0

    async def handle(self, held: HeldJob) -> Outcome:
        """Generate what is missing, record it, answer.

        Cancelling the call while `held.cancelled` is set ends it with ACK (the ledger has the
        outcome), otherwise with CancelledError once what was finished is recorded or given up.

        Raises EngineDead.
        """
        publisher = self._publisher(held)
        try:
            with bound(**held.ids):
                async with asyncio.timeout(max(0.0, held.seconds_left())):
                    return await self._handle(held, publisher)
        except TimeoutError:
            return await self.endings.expired(held)
        except asyncio.CancelledError:
            if not held.cancelled:
                raise
            return Outcome.ACK
        finally:
            publisher.stop()
            self._context.partials.forget(held)

    async def _handle(self, held: HeldJob, publisher: Publisher) -> Outcome:
        job, context = held.job, self._context
        if held.done:
            await self._answer_recorded(held)
        pin = await self._pin(held)
        if held.missing and pin is None and not context.weights.met(job):
            return Outcome.REFUSE
        counted = held.suspect or held.refused
        if counted and not held.missing:
            await self._clear_suspicion(job.call_id)
            return Outcome.ACK
        starts = 0
        if counted:
            try:
                if await context.suspects.starts(job.call_id) >= context.settings.max_starts:
                    self._quarantine(held, publisher)
                    await publisher.finish()
                    return Outcome.ACK
                starts = await context.suspects.record(job.call_id, context.worker)
                metrics.SUSPECTS.inc()
            except RollgridError as error:  # unrecorded, a crash would not be counted: do not begin
                log.warning("start_not_recorded", group=job.group_id, error=error.message)
                return Outcome.REFUSE
        try:
            with self._keeping(job, pin):
                outcome = await self._samples(held, publisher, pin)
            await publisher.finish()
            if outcome is Outcome.ACK:
                await context.partials.over(held)
        except asyncio.CancelledError:
            if starts and not held.cancelled and held.seconds_left() > 0:  # given back, which is no failed start
                await self._withdraw(job.call_id)
            raise
        if starts:
            await self._clear_suspicion(job.call_id)
        return outcome

    async def _pin(self, held: HeldJob) -> int | None:
        """The version that must make the whole group: that of what is done, else the one it would get now."""
        if not held.job.pinned:
            return None
        for sample in (await self._recorded(held)).values():
            if sample.version_spans:
                return sample.version_spans[0].version
        return self._context.weights.choose(held.job.weights) if self._context.weights.met(held.job) else None

    def _keeping(self, job: SampleGroup, pin: int | None) -> contextlib.AbstractContextManager[None]:
        """What one version must make keeps it loaded, within the grace."""
        version = pin if pin is not None else self._context.weights.choose(job.weights)
        if version is None or not needs_one(job):
            return contextlib.nullcontext()
        return self._context.weights.use(version, job)

    async def _samples(self, held: HeldJob, publisher: Publisher, pin: int | None) -> Outcome:
        """All missing samples at once.  Raises EngineDead."""
        job = held.job
        try:
            check(job, self._context.engine)
            reading = await self._context.parsers.open(job)
        except RequestFailed as refused:
            for index in held.missing:
                publisher.add(self._outcomes.failed(held, index, refused.info(), None, time.time()))
            return Outcome.ACK
        sent = await sent_before(
            self._context.bus, job, taken_over=held.taken_over, kept=partial(self._context.partials.taken, held)
        )
        work = Work(held, job.prompt_token_ids.tolist(), reading, sent, pin)
        try:
            async with asyncio.TaskGroup() as group:
                for index in held.missing:
                    group.create_task(self._sample(work, index, publisher))
        except BaseExceptionGroup as failed:
            dead, _ = failed.split(EngineDead)
            if dead is not None:
                await self._rescue(publisher)
                raise dead.exceptions[0] from failed
            if failed.split(ConstraintLost)[1] is None:
                return Outcome.REFUSE
            raise
        return Outcome.ACK

    async def _sample(self, work: Work, index: int, publisher: Publisher) -> None:
        await work.held.seats.acquire()
        try:
            sample = await self._generate(work, index)
        finally:
            self._free_seat(work.held)
        self.samples_total += 1
        self.tokens_total += len(sample.token_ids)
        metrics.ended(sample, len(work.prompt))
        traces.sampled(work.held, sample)
        publisher.add(sample)

    async def _generate(self, work: Work, index: int) -> Sample:
        held, request, started = work.held, self._request(work, index), time.time()
        try:
            result, parsed = await held.abortable(self._result(work, request))
        except (EngineDead, ConstraintLost):
            raise
        except Aborted:
            return self._outcomes.cancelled(held, index, request.seed, started)
        except RollgridError as error:
            return self._outcomes.failed(held, index, error.info(), request.seed, started)
        except Exception as error:
            log.exception("sample_failed_unexpectedly", group=held.job.group_id, index=index)
            unexpected = ErrorInfo(code=ErrorCode.INTERNAL, message=repr(error), boundary=Boundary.ENGINE)
            return self._outcomes.failed(held, index, unexpected, request.seed, started)
        return self._outcomes.succeeded(held, index, result, parsed, request.seed, started)

    async def _result(self, work: Work, request: GenerationRequest) -> tuple[Generated, Parsed | None]:
        """The sample and its parse, streamed if that is asked for; of a turn its progress is kept."""
        if work.held.job.session is None:
            return await self._streamed(work, request, None)
        async with self._context.partials.keeping(work.held, request) as keeper:
            return await self._streamed(work, request, keeper)

    async def _streamed(
        self, work: Work, request: GenerationRequest, keeper: Keeper | None
    ) -> tuple[Generated, Parsed | None]:
        job, context, settings = work.held.job, self._context, self._context.settings
        if job.reply is not Reply.STREAM:
            return await self._whole(work, request, keeper.take if keeper is not None else None)
        reader = work.reading.reader() if work.reading is not None else None
        pace = Pace(settings.stream_interval_s, settings.stream_tokens)
        attempt = work.held.attempt
        async with SampleStream(context.bus, job, request.index, attempt, request.sent, reader, pace) as stream:
            takers = (stream.take,) if keeper is None else (stream.take, keeper.take)
            result, parsed = await self._whole(work, request, together(takers))
            return result, await stream.finish(result, parsed)

    async def _whole(
        self, work: Work, request: GenerationRequest, on_delta: OnDelta | None
    ) -> tuple[Generated, Parsed | None]:
        """Raises RollgridError, ConstraintLost."""
        context = self._context
        generation = Generation(
            context.engine,
            context.weights,
            work.held.job,
            request,
            pin=work.pin,
            mode=context.settings.swap_mode,
            grace_s=context.settings.pin_grace_s,
            on_delta=on_delta,
        )
        result = await generation.run()
        judge(result, request.sampling)
        if not await context.weights.proven(result.version_spans):
            raise ConstraintLost
        return result, await work.reading.parsed(request.index, result) if work.reading is not None else None

    def _request(self, work: Work, index: int) -> GenerationRequest:
        job, name = work.held.job, sample_name(work.held.job, index)
        sampling, group_seed = job.sampling, job.sampling.seed
        if sampling.prompt_logprobs is not None and index != job.indexes[0]:  # all share the prompt: once is enough
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return GenerationRequest(
            request_id=f"{name}.a{work.held.attempt}",
            sample=name,
            index=index,
            prompt_token_ids=work.prompt,
            sampling=sampling,
            seed=None if group_seed is None else ids.sample_seed(group_seed, index),
            group_seed=group_seed,
            sent=work.sent.get(index, Sent()),
            hurried=job.priority is Priority.INTERACTIVE,
        )

    # -- around them --------------------------------------------------------------------------

    def _publisher(self, held: HeldJob) -> Publisher:
        context = self._context
        facts = context.engine.facts
        origin = Origin(
            worker=context.worker,
            incarnation=context.incarnation,
            engine=facts.name,
            logprobs_mode=facts.logprobs_mode,
            model_max_len=facts.max_model_len,
        )
        return Publisher(
            context.bus,
            context.commit,
            context.headroom,
            held.job,
            held.sequence,
            origin,
            coalesce_s=context.settings.coalesce_s,
            coalesce_samples=context.settings.coalesce_samples,
            traceparent=held.span.traceparent,
        )

    async def _answer_recorded(self, held: HeldJob) -> None:
        """The reply equals the record: samples that are done are answered from there."""
        mode = self._context.engine.facts.logprobs_mode
        for sample in (await self._recorded(held)).values():
            if sample.index in held.job.indexes:
                await reply(self._context.bus, held.job, (sample,), mode)

    async def _recorded(self, held: HeldJob) -> dict[int, Sample]:
        """The group's samples that are done; none while the record is out of reach."""
        if not held.done:
            return {}
        try:
            return await recorded(self._context.bus, held.done)
        except RollgridError as error:
            log.warning("record_unreadable", group=held.job.group_id, error=error.message)
            return {}

    def _quarantine(self, held: HeldJob, publisher: Publisher) -> None:
        """Too many starts without an end: the missing samples fail here."""
        metrics.POISON.inc()
        log.error("poison_job", group=held.job.group_id, starts=self._context.settings.max_starts)
        error = ErrorInfo(
            code=ErrorCode.POISON,
            message=f"{self._context.settings.max_starts} starts of this job ended with their sampler",
            boundary=Boundary.ENGINE,
            limit=str(self._context.settings.max_starts),
        )
        for index in held.missing:
            publisher.add(self._outcomes.failed(held, index, error, None, time.time()))

    async def _clear_suspicion(self, call_id: str) -> None:
        try:
            await self._context.suspects.clear(call_id)
        except BusError as error:  # it expires by itself
            log.warning("suspect_not_cleared", call=call_id, error=error.message)

    async def _withdraw(self, call_id: str) -> None:
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._context.suspects.withdraw(call_id)
        except (BusError, TimeoutError) as error:  # it counts once too often
            log.warning("start_not_withdrawn", call=call_id, error=str(error))

    async def _rescue(self, publisher: Publisher) -> None:
        """The engine is dead: record what had finished before it, for a moment."""
        try:
            async with asyncio.timeout(2):
                await publisher.finish()
        except TimeoutError:
            log.warning("finished_samples_given_up")


def together(takers: tuple[OnDelta, ...]) -> OnDelta:
    """Each portion for all of them."""
    if len(takers) == 1:
        return takers[0]

    def take(delta: Delta) -> None:
        for taker in takers:
            taker(delta)

    return take
