"""What happens to one job: `SampleGroup` in, `SamplesFinished` (and replies) out.

A sample that cannot be generated is a failed sample with a typed error; it never disturbs its
neighbours.  Only a dead engine ends the handler, and with it the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import SampleGroup, VersionRule, VersionSpan, WeightConstraint
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus, Timings
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import bound, get_logger

from . import metrics, traces
from .engines.base import Engine, EngineDead, Generated, GenerationRequest, RequestFailed
from .headroom import Headroom
from .jobs import HeldJob, Outcome
from .publishing import Origin, Publisher, recorded, reply
from .settings import SamplerSettings
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
    met: Callable[[WeightConstraint], bool]
    settings: SamplerSettings
    worker: str
    incarnation: str


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
        try:
            check(held.job, self._context.engine)
        except RequestFailed as refused:
            for index in held.missing:
                publisher.add(self._failed(held, index, refused.info(), None, time.time()))
            return Outcome.ACK
        prompt = held.job.prompt_token_ids.tolist()
        try:
            async with asyncio.TaskGroup() as group:
                for index in held.missing:
                    group.create_task(self._sample(held, index, prompt, publisher))
        except BaseExceptionGroup as failed:
            dead, _ = failed.split(EngineDead)
            if dead is not None:
                await self._rescue(publisher)
                raise dead.exceptions[0] from failed
            if failed.split(ConstraintLost)[1] is None:
                return Outcome.REFUSE
            raise
        return Outcome.ACK

    async def _sample(self, held: HeldJob, index: int, prompt: list[int], publisher: Publisher) -> None:
        await held.seats.acquire()
        try:
            sample = await self._generate(held, index, prompt)
        finally:
            self._free_seat(held)
        self.samples_total += 1
        self.tokens_total += len(sample.token_ids)
        metrics.ended(sample, len(prompt))
        traces.sampled(held, sample)
        publisher.add(sample)

    async def _generate(self, held: HeldJob, index: int, prompt: list[int]) -> Sample:
        job, engine = held.job, self._context.engine
        seed = job.sampling.seed
        own_seed = None if seed is None else ids.sample_seed(seed, index)
        started = time.time()
        name = ids.sample_id(job.group_id, index)
        try:
            result = await engine.generate(
                GenerationRequest(
                    request_id=f"{name}.a{held.attempt}",
                    sample=name,
                    index=index,
                    prompt_token_ids=prompt,
                    sampling=job.sampling,
                    seed=own_seed,
                    cache_salt=f"{job.tenant}/{engine.loaded.version}/{job.cache_salt or ''}",
                )
            )
            judge(result)
        except EngineDead:
            raise
        except RollgridError as error:
            return self._failed(held, index, error.info(), own_seed, started)
        except Exception as error:
            log.exception("sample_failed_unexpectedly", group=job.group_id, index=index)
            unexpected = ErrorInfo(code=ErrorCode.INTERNAL, message=repr(error), boundary=Boundary.ENGINE)
            return self._failed(held, index, unexpected, own_seed, started)
        if not allowed(job.weights, result.version_spans):
            raise ConstraintLost
        return self._succeeded(held, index, result, own_seed, started)

    # -- samples ------------------------------------------------------------------------------

    def _succeeded(self, held: HeldJob, index: int, result: Generated, seed: int | None, started: float) -> Sample:
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
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            version_spans=spans,
            weight_fingerprint=loaded.fingerprint if spans[-1].version == loaded.version else None,
            seed=seed,
            worker=self._context.worker,
            cached_tokens=result.cached_tokens,
            timings=Timings(
                dequeued_at=held.dequeued_at,
                started_at=started,
                first_token_at=result.first_token_at,
                finished_at=time.time(),
            ),
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


def check(job: SampleGroup, engine: Engine) -> None:
    """Refuse what no engine should see.  Raises RequestFailed naming field and limit."""
    facts, prompt = engine.facts, job.prompt_token_ids
    if len(prompt) == 0:
        raise RequestFailed("the prompt is empty", ErrorCode.EMPTY_PROMPT, field="prompt_token_ids", limit="1")
    if len(prompt) >= facts.max_model_len:
        raise RequestFailed(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {facts.max_model_len}",
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            field="prompt_token_ids",
            limit=str(facts.max_model_len - 1),
        )
    largest = max(prompt)
    if largest >= facts.vocab_size:
        raise RequestFailed(
            f"token {largest} is beyond a vocabulary of {facts.vocab_size}",
            ErrorCode.TOKEN_OUT_OF_RANGE,
            field="prompt_token_ids",
            limit=str(facts.vocab_size - 1),
        )


def judge(result: Generated) -> None:
    """An answer that is none is a failure.  Raises RequestFailed."""
    if result.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        raise RequestFailed(f"the engine ended the request with {result.finish_reason.value}")
    if not result.token_ids:
        raise RequestFailed("the engine returned no token", ErrorCode.EMPTY_COMPLETION)
    if len(result.logprobs) != len(result.token_ids):
        raise RequestFailed(f"{len(result.logprobs)} logprobs for {len(result.token_ids)} tokens")


def allowed(constraint: WeightConstraint, spans: tuple[VersionSpan, ...]) -> bool:
    """Whether every token's version keeps a constraint that names versions."""
    match constraint.rule:
        case VersionRule.EXACT:
            return all(span.version == constraint.value for span in spans)
        case VersionRule.MIN:
            return all(span.version >= constraint.value for span in spans)
        case _:
            return True


def turn(job: SampleGroup) -> int:
    return job.session.turn if job.session is not None else 0
