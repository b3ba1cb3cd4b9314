"""One finish in, one `SamplesScored` out, then the ack.

The first kind of scorer reads `SamplesFinished`, or `SessionEnded` of a session; the next ones read what the one
before published, and fetch the event it judged from the stream.  Nothing here invents a number: a sample has a value only if
its judge gave one.  The timers are the ledger's: past the job's deadline an event is acknowledged and
nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.episodes import SessionEnded
from rollgrid_contracts.ids import NO_SESSION
from rollgrid_contracts.samples import SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import (
    SampleScores,
    SamplesScored,
    Score,
    next_todo,
)
from rollgrid_contracts.topology import SAMPLES, Header
from rollgrid_runtime import telemetry
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, PayloadGone, QueueFull, StorageError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.pulling import Delivery

from . import traces
from .isolation import IsolationError
from .judges import Judge, NotNow
from .metrics import EVENT_SECONDS, EVENTS, QUEUE_WAIT, SCORES, SECONDS
from .sessions import finish_of

log = get_logger(__name__)
Judged: Any = SamplesFinished | SessionEnded
Event: Any = SamplesFinished | SessionEnded | SamplesScored
RETRY_S = 1.0
BUG_DELAY_S = 5.0


class Handler:
    """For one kind of scorer.  `name` is this process's own and travels as `scorer_id`.

    `large` events that travelled as claim checks are in hand at once: they may be many times as large as others.
    """

    def __init__(self, bus: Bus, commit: GroupCommit, judge: Judge, name: str, large: int) -> None:
        self._bus, self._commit, self._judge, self._name = bus, commit, judge, name
        self._large = asyncio.Semaphore(large)

    async def handle(self, delivery: Delivery) -> None:
        """Score one event and acknowledge it; on a bug of ours it is redelivered until its deadline."""
        QUEUE_WAIT.observe(max(0.0, time.time() - delivery.timestamp))
        try:
            with EVENT_SECONDS.time(), bound(group=delivery.headers.get(Header.GROUP)):
                async with self._large if Header.CLAIM in delivery.headers else contextlib.nullcontext():
                    outcome = await self._handle(delivery)
        except NotNow as postponed:
            EVENTS.labels("postponed").inc()
            await delivery.nak(postponed.delay_s)
            return
        except Exception:
            log.exception("scoring_failed", sequence=delivery.sequence, subject=delivery.subject)
            EVENTS.labels("failed").inc()
            await delivery.nak(BUG_DELAY_S)
            return
        EVENTS.labels(outcome).inc()
        await delivery.ack()

    async def _handle(self, delivery: Delivery) -> str:
        try:
            read = await self._read(delivery)
        except (msgspec.DecodeError, RecursionError, PayloadGone) as error:
            # no redelivery can help: the ledger closes the group as not_run at its deadline
            log.error("unreadable_event", sequence=delivery.sequence, subject=delivery.subject, error=str(error))
            return "unreadable"
        if read is None:
            return "gone"
        sequence, finished = read
        task = finished.scoring
        if task is None:
            log.error("event_without_task", sequence=delivery.sequence, group=finished.group_id)
            return "without_task"
        if _late(task):
            return "late"
        async with self._judge.turn(finished, task):
            return await self._traced(delivery, sequence, finished, task)

    async def _traced(self, delivery: Delivery, sequence: int, finished: SamplesFinished, task: ScoringTask) -> str:
        ids = {"tenant": finished.tenant, "run": finished.run, "group": finished.group_id}
        with (
            bound(**ids, trace_id=telemetry.trace_id(finished.traceparent)),
            traces.scoring(delivery, finished) as span,
        ):
            outcome = await self._persistently(sequence, finished, task)
            span.set(outcome=outcome)
            log.debug("event_handled", sequence=delivery.sequence, outcome=outcome)
        return outcome

    async def _persistently(self, sequence: int, finished: SamplesFinished, task: ScoringTask) -> str:
        """Score and publish until it is done or the job's deadline has passed."""
        while not _late(task):
            try:
                return await self._score_and_publish(sequence, finished, task)
            except (BusError, QueueFull, IsolationError) as error:
                log.warning("scoring_delayed", group=finished.group_id, code=error.code, error=error.message)
                await asyncio.sleep(error.retry_after_s or RETRY_S)
        return "late"

    async def _read(self, delivery: Delivery) -> tuple[int, SamplesFinished] | None:
        """The finish to judge and its sequence; None when the ledger has no need of it any more."""
        while True:
            try:
                event: SamplesFinished | SessionEnded | SamplesScored = await delivery.message(Event)
                if isinstance(event, SamplesScored):
                    return await self._judged(event)
                return await self._finish(delivery.sequence, event)
            except PayloadGone:
                raise
            except (StorageError, BusError) as error:
                log.warning("event_out_of_reach", sequence=delivery.sequence, error=error.message)
                await asyncio.sleep(RETRY_S)

    async def _judged(self, scored: SamplesScored) -> tuple[int, SamplesFinished] | None:
        """What another scorer has judged before."""
        stored = await self._bus.stored(SAMPLES.name, scored.finished_seq)
        if stored is None:
            return None
        return await self._finish(scored.finished_seq, await self._bus.decoded(stored.data, stored.headers, Judged))

    async def _finish(self, sequence: int, event: SamplesFinished | SessionEnded) -> tuple[int, SamplesFinished] | None:
        if isinstance(event, SamplesFinished):
            return sequence, event
        finished = await finish_of(self._bus, sequence, event)
        return None if finished is None else (sequence, finished)

    async def _score_and_publish(self, sequence: int, finished: SamplesFinished, task: ScoringTask) -> str:
        samples = [sample for sample in finished.samples if sample.status is SampleStatus.SUCCEEDED]
        if not samples:
            return "nothing_to_score"
        scores: list[list[Score]] = [[] for _ in samples]
        for spec in task.scorers:
            if spec.kind is self._judge.kind:
                for given, score in zip(
                    scores, await self._judge.judge(spec, finished, task, samples, sequence), strict=True
                ):
                    given.append(score)
                    SCORES.labels(self._judge.label(spec), score.status.value).inc()
                    SECONDS.labels(self._judge.label(spec)).observe(score.duration_ms / 1e3)
        with telemetry.child("publish scores", kind="producer", stream=SAMPLES.name, group=finished.group_id) as span:
            scored = SamplesScored(
                tenant=finished.tenant,
                run=finished.run,
                group_id=finished.group_id,
                job_seq=finished.job_seq,
                finished_seq=sequence,
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
        subject = subjects.samples(next_todo(task.scorers, after=self._judge.kind), finished.tenant, session)
        payload, msg_id = codec.encode(scored), f"scored.{self._judge.kind.value}.{scored.finished_seq}"
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


def _late(task: ScoringTask) -> bool:
    return 0 < task.deadline < time.time()
