"""What happens to one job: `SampleGroup` in, `SamplesFinished` (and replies) out.

A sample that cannot be generated is a failed sample with a typed error; it never disturbs its
neighbours.  Only a dead engine ends the handler, and with it the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import Priority, Reply, SampleGroup, VersionSpan, WeightConstraint
from rollgrid_contracts.samples import FinishReason, Parsed, Sample, SampleStatus, Timings
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import bound, get_logger

from . import metrics, traces
from .admission import check, judge
from .engines.base import Engine, EngineDead, Generated, GenerationRequest, RequestFailed, Sent
from .headroom import Headroom
from .jobs import HeldJob, Outcome
from .parsing import ParserDesk, Reading
from .publishing import Origin, Publisher, recorded, reply
from .resume import allowed, sent_before
from .settings import SamplerSettings
from .streaming import Pace, SampleStream
from .suspects import Suspects

log = get_logger(__name__)


class ConstraintLost(Exception):
    """Other weights than the job allows came while it ran."""


class Context(NamedTuple):
    """What the handler works with.  `met` says whether the loaded version may serve a constraint."""

    bus: Bus
    commit: GroupCommit
    headroom: Headroom
    engine: Engine
    suspects: Suspects
    parsers: ParserDesk
    met: Callable[[WeightConstraint], bool]
    settings: SamplerSettings
    worker: str
    incarnation: str


class Work(NamedTuple):
    """One job as its samples need it; `sent` maps indexes to what they continue behind."""

    held: HeldJob
    prompt: list[int]
    reading: Reading | None
    sent: dict[int, Sent]


class Handler:
    """`free_seat` is called once for each sample that has left the engine."""

    def __init__(self, context: Context, free_seat: Callable[[HeldJob], None]) -> None:
        self._context = context
        self._free_seat = free_seat
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
            return Outcome.ACK  # past its deadline: the ledger writes what is missing as expired
        except asyncio.CancelledError:
            if not held.cancelled:
                raise
            return Outcome.ACK
        finally:
            publisher.stop()

    async def _handle(self, held: HeldJob, publisher: Publisher) -> Outcome:
        job, context = held.job, self._context
        if held.done:
            await self._answer_recorded(held)
        if held.missing and not context.met(job.weights):
            return Outcome.REFUSE
        if held.suspect and not held.missing:
            await self._clear_suspicion(job.group_id)
            return Outcome.ACK
        starts = 0
        if held.suspect:
            try:
                if await context.suspects.starts(job.group_id) >= context.settings.max_starts:
                    self._quarantine(held, publisher)
                    await publisher.finish()
                    return Outcome.ACK
                starts = await context.suspects.record(job.group_id, context.worker)
                metrics.SUSPECTS.inc()
            except RollgridError as error:  # unrecorded, a crash would not be counted: do not begin
                log.warning("start_not_recorded", group=job.group_id, error=error.message)
                return Outcome.REFUSE
        outcome = await self._samples(held, publisher)
        await publisher.finish()
        if starts:
            await self._clear_suspicion(job.group_id)
        return outcome

    async def _samples(self, held: HeldJob, publisher: Publisher) -> Outcome:
        """All missing samples at once.  Raises EngineDead."""
        job = held.job
        try:
            check(job, self._context.engine)
            reading = await self._context.parsers.open(job)
        except RequestFailed as refused:
            for index in held.missing:
                publisher.add(self._failed(held, index, refused.info(), None, time.time()))
            return Outcome.ACK
        sent = await sent_before(self._context.bus, job, taken_over=held.taken_over)
        work = Work(held, job.prompt_token_ids.tolist(), reading, sent)
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
            result, parsed = await self._result(work, request)
        except (EngineDead, ConstraintLost):
            raise
        except RollgridError as error:
            return self._failed(held, index, error.info(), request.seed, started)
        except Exception as error:
            log.exception("sample_failed_unexpectedly", group=held.job.group_id, index=index)
            unexpected = ErrorInfo(code=ErrorCode.INTERNAL, message=repr(error), boundary=Boundary.ENGINE)
            return self._failed(held, index, unexpected, request.seed, started)
        return self._succeeded(held, index, result, parsed, request.seed, started)

    async def _result(self, work: Work, request: GenerationRequest) -> tuple[Generated, Parsed | None]:
        """The sample and its parse, streamed if that is asked for."""
        job, context, settings = work.held.job, self._context, self._context.settings
        if job.reply is not Reply.STREAM:
            return await self._whole(work, request, None)
        reader = work.reading.reader() if work.reading is not None else None
        pace = Pace(settings.stream_interval_s, settings.stream_tokens)
        attempt = work.held.attempt
        async with SampleStream(context.bus, job, request.index, attempt, request.sent, reader, pace) as stream:
            result, parsed = await self._whole(work, request, stream)
            return result, await stream.finish(result, parsed)

    async def _whole(
        self, work: Work, request: GenerationRequest, stream: SampleStream | None
    ) -> tuple[Generated, Parsed | None]:
        """Raises RollgridError, ConstraintLost."""
        result = await self._context.engine.generate(request, stream.take if stream is not None else None)
        judge(result, request.sampling)
        if not allowed(work.held.job.weights, result.version_spans):
            raise ConstraintLost
        return result, await work.reading.parsed(request.index, result) if work.reading is not None else None

    def _request(self, work: Work, index: int) -> GenerationRequest:
        job, name = work.held.job, ids.sample_id(work.held.job.group_id, index)
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
            cache_salt=f"{job.tenant}/{self._context.engine.loaded.version}/{job.cache_salt or ''}",
            sent=work.sent.get(index, Sent()),
            hurried=job.priority is Priority.INTERACTIVE,
        )

    # -- samples ------------------------------------------------------------------------------

    def _succeeded(
        self, held: HeldJob, index: int, result: Generated, parsed: Parsed | None, seed: int | None, started: float
    ) -> Sample:
        loaded = self._context.engine.loaded
        tokens = len(result.token_ids)
        spans = result.version_spans or (VersionSpan(version=loaded.version, start=0, end=tokens),)
        return Sample(
            index=index,
            turn=turn(held.job),
            attempt=held.attempt,
            status=SampleStatus.SUCCEEDED,
            token_ids=TokenIds.of(result.token_ids),
            logprobs=Floats(result.logprobs.tobytes()),
            top_logprobs=result.top_logprobs,
            text=result.text,
            parsed=parsed,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            version_spans=spans,
            weight_fingerprint=loaded.fingerprint if spans[-1].version == loaded.version else None,
            seed=seed,
            resumed_from=result.resumed_from,
            worker=self._context.worker,
            cached_tokens=result.cached_tokens,
            timings=Timings(
                dequeued_at=held.dequeued_at,
                started_at=started,
                first_token_at=result.first_token_at,
                finished_at=time.time(),
            ),
            prompt_logprobs=result.prompt_logprobs,
        )

    def _failed(self, held: HeldJob, index: int, error: ErrorInfo, seed: int | None, started: float) -> Sample:
        return Sample(
            index=index,
            turn=turn(held.job),
            attempt=held.attempt,
            status=SampleStatus.FAILED,
            finish_reason=FinishReason.ERROR,
            seed=seed,
            worker=self._context.worker,
            timings=Timings(dequeued_at=held.dequeued_at, started_at=started, finished_at=time.time()),
            error=error,
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
        wanted = {index: seq for index, seq in held.done.items() if index in held.job.indexes}
        try:
            found = await recorded(self._context.bus, wanted)
        except RollgridError as error:
            log.warning("record_unreadable", group=held.job.group_id, error=error.message)
            return
        mode = self._context.engine.facts.logprobs_mode
        for sample in found.values():
            await reply(self._context.bus, held.job, (sample,), mode)

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
            publisher.add(self._failed(held, index, error, None, time.time()))

    async def _clear_suspicion(self, group_id: str) -> None:
        try:
            await self._context.suspects.clear(group_id)
        except BusError as error:  # it expires by itself
            log.warning("suspect_not_cleared", group=group_id, error=error.message)

    async def _rescue(self, publisher: Publisher) -> None:
        """The engine is dead: record what had finished before it, for a moment."""
        try:
            async with asyncio.timeout(2):
                await publisher.finish()
        except TimeoutError:
            log.warning("finished_samples_given_up")


def turn(job: SampleGroup) -> int:
    return job.session.turn if job.session is not None else 0
