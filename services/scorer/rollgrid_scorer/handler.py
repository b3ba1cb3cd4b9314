"""One `SamplesFinished` in, one `SamplesScored` out, then the ack.

Nothing here invents a number: a sample has a value only if its verifier returned one.  The timers
are the ledger's: past the job's deadline an event is acknowledged and nothing more.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.ids import NO_SESSION
from rollgrid_contracts.samples import Sample, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import (
    SampleScores,
    SamplesScored,
    Score,
    ScorerKind,
    ScorerSpec,
    ScoreStatus,
    next_todo,
)
from rollgrid_contracts.topology import SAMPLES, Header
from rollgrid_runtime import telemetry
from rollgrid_runtime.errors import BusError, PayloadGone, QueueFull, StorageError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.pulling import Delivery

from . import traces
from .calls import Item, Shared
from .isolation import IsolationError, Outcome, Pool
from .metrics import EVENT_SECONDS, EVENTS, QUEUE_WAIT, SCORES, SECONDS
from .registry import Registry

log = get_logger(__name__)
KIND = ScorerKind.VERIFIER
RETRY_S = 1.0
BUG_DELAY_S = 5.0


class Handler:
    """Stateless over messages; `name` is this process's own and travels as `scorer_id`."""

    def __init__(self, commit: GroupCommit, pool: Pool, registry: Registry, name: str, max_timeout_s: float) -> None:
        self._commit, self._pool, self._registry = commit, pool, registry
        self._name, self._max_timeout_s = name, max_timeout_s

    async def handle(self, delivery: Delivery) -> None:
        """Score one event and acknowledge it; on a bug of ours it is redelivered until its deadline."""
        QUEUE_WAIT.observe(max(0.0, time.time() - delivery.timestamp))
        try:
            with EVENT_SECONDS.time(), bound(group=delivery.headers.get(Header.GROUP)):
                outcome = await self._handle(delivery)
        except Exception:
            log.exception("scoring_failed", sequence=delivery.sequence, subject=delivery.subject)
            EVENTS.labels("failed").inc()
            await delivery.nak(BUG_DELAY_S)
            return
        EVENTS.labels(outcome).inc()
        await delivery.ack()

    async def _handle(self, delivery: Delivery) -> str:
        try:
            finished = await self._read(delivery)
        except (msgspec.DecodeError, RecursionError, PayloadGone) as error:
            # no redelivery can help: the ledger closes the group as not_run at its deadline
            log.error("unreadable_event", sequence=delivery.sequence, subject=delivery.subject, error=str(error))
            return "unreadable"
        task = finished.scoring
        if task is None:
            log.error("event_without_task", sequence=delivery.sequence, group=finished.group_id)
            return "without_task"
        ids = {"tenant": finished.tenant, "run": finished.run, "group": finished.group_id}
        with (
            bound(**ids, trace_id=telemetry.trace_id(finished.traceparent)),
            traces.scoring(delivery, finished) as span,
        ):
            outcome = await self._persistently(delivery, finished, task)
            span.set(outcome=outcome)
            log.debug("event_handled", sequence=delivery.sequence, outcome=outcome)
        return outcome

    async def _persistently(self, delivery: Delivery, finished: SamplesFinished, task: ScoringTask) -> str:
        """Score and publish until it is done or the job's deadline has passed."""
        while not _late(task):
            try:
                return await self._score_and_publish(delivery, finished, task)
            except (BusError, QueueFull, IsolationError) as error:
                log.warning("scoring_delayed", group=finished.group_id, code=error.code, error=error.message)
                await asyncio.sleep(error.retry_after_s or RETRY_S)
        return "late"

    async def _read(self, delivery: Delivery) -> SamplesFinished:
        while True:
            try:
                return await delivery.message(SamplesFinished)
            except PayloadGone:
                raise
            except (StorageError, BusError) as error:
                log.warning("event_out_of_reach", sequence=delivery.sequence, error=error.message)
                await asyncio.sleep(RETRY_S)

    async def _score_and_publish(self, delivery: Delivery, finished: SamplesFinished, task: ScoringTask) -> str:
        samples = [sample for sample in finished.samples if sample.status is SampleStatus.SUCCEEDED]
        if not samples:
            return "nothing_to_score"
        scores: list[list[Score]] = [[] for _ in samples]
        for spec in task.scorers:
            if spec.kind is KIND:
                for given, score in zip(scores, await self._run(spec, task, samples), strict=True):
                    given.append(score)
        with telemetry.child("publish scores", kind="producer", stream=SAMPLES.name, group=finished.group_id) as span:
            scored = SamplesScored(
                tenant=finished.tenant,
                run=finished.run,
                group_id=finished.group_id,
                job_seq=finished.job_seq,
                finished_seq=delivery.sequence,
                results=tuple(
                    SampleScores(index=sample.index, turn=sample.turn, attempt=sample.attempt, scores=tuple(given))
                    for sample, given in zip(samples, scores, strict=True)
                ),
                scorer_id=self._name,
                traceparent=span.traceparent,
            )
            return await self._publish(scored, finished, task)

    async def _publish(self, scored: SamplesScored, finished: SamplesFinished, task: ScoringTask) -> str:
        """Publish until stored or the deadline has passed: scoring again would cost more than waiting."""
        session = finished.session.session if finished.session is not None else NO_SESSION
        subject = subjects.samples(next_todo(task.scorers, after=KIND), finished.tenant, session)
        payload, msg_id = codec.encode(scored), f"scored.{KIND.value}.{scored.finished_seq}"
        headers = {Header.GROUP.value: scored.group_id}
        if scored.traceparent is not None:
            headers[Header.TRACEPARENT.value] = scored.traceparent
        while True:
            try:
                await self._commit.publish(subject, payload, msg_id=msg_id, headers=headers)
                return "scored"
            except (BusError, QueueFull, StorageError) as error:
                if _late(task):
                    return "late"
                log.warning("publish_delayed", group=finished.group_id, code=error.code, error=error.message)
                await asyncio.sleep(error.retry_after_s or RETRY_S)

    async def _run(self, spec: ScorerSpec, task: ScoringTask, samples: list[Sample]) -> list[Score]:
        items = [item for position, sample in enumerate(samples) if (item := _item(position, sample)) is not None]
        shared = Shared(task.prompt_text, task.messages, task.task, task.metadata)
        timeout_s = min(spec.timeout_s, self._max_timeout_s)
        label = spec.type if spec.type in self._registry else "unknown"
        with telemetry.child(f"verify {label}", type=label, samples=len(items)):
            outcomes = await self._pool.judge(spec.type, spec.params, shared, items, timeout_s) if items else {}
        scores = [_score(spec, outcomes.get(position, NO_TEXT)) for position in range(len(samples))]
        for score in scores:
            SCORES.labels(label, score.status.value).inc()
            SECONDS.labels(label).observe(score.duration_ms / 1e3)
        return scores


NO_TEXT = Outcome(ScoreStatus.VERIFIER_ERROR, None, "the sample carries no text", "", 0.0, 1)


def _late(task: ScoringTask) -> bool:
    return 0 < task.deadline < time.time()


def _item(position: int, sample: Sample) -> Item | None:
    if sample.text is None:
        return None
    content = sample.parsed.content if sample.parsed is not None else None
    reason = sample.finish_reason.value if sample.finish_reason is not None else None
    return Item(position, sample.text, content, reason, len(sample.token_ids), sample.index)


def _score(spec: ScorerSpec, outcome: Outcome) -> Score:
    return Score(
        scorer=spec.name,
        status=outcome.status,
        value=outcome.value,
        version=outcome.version,
        detail=outcome.detail,
        duration_ms=round(outcome.duration_ms, 3),
        attempt=outcome.attempt,
        turn_values=outcome.turn_values,
    )
