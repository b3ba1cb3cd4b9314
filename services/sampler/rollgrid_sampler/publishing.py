"""Finished samples of one job on their way to the record: durable first, then the reply.

A batch job's samples are coalesced into few events; an interactive job's go out singly under
their sample id, so that of two workers the first wins and both answer with the winner.  A full
stream or a silent server is waited out, never a reason to drop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import codec, ids, subjects
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.jobs import Reply, SampleGroup
from rollgrid_contracts.samples import Sample, SampleReply, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import ScorerKind, next_todo
from rollgrid_contracts.topology import INLINE_LIMIT, SAMPLES, Header
from rollgrid_runtime.bus import Bus, PubAck
from rollgrid_runtime.errors import BusError, QueueFull, StorageError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import get_logger

from . import metrics, traces
from .headroom import Headroom
from .jobs import sample_name

log = get_logger(__name__)
FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0


class Origin(NamedTuple):
    """Who generated: stamped on every event."""

    worker: str
    incarnation: str
    engine: str
    logprobs_mode: str
    model_max_len: int


class Publisher:
    """The finishes of one job.  `add` each sample, then await `finish` before the job is acked."""

    def __init__(
        self,
        bus: Bus,
        commit: GroupCommit,
        headroom: Headroom,
        job: SampleGroup,
        job_seq: int,
        origin: Origin,
        *,
        coalesce_s: float,
        coalesce_samples: int,
        traceparent: str | None = None,
    ) -> None:
        self._bus, self._commit, self._headroom = bus, commit, headroom
        self._job, self._job_seq, self._origin = job, job_seq, origin
        self._coalesce_s, self._coalesce_samples = coalesce_s, coalesce_samples
        self._traceparent = traceparent
        self._pending: list[Sample] = []
        self._wake = asyncio.Event()
        self._ending = False
        self._nonce = secrets.token_hex(4)
        self._events = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._singly = job.reply is not Reply.NONE or job.session is not None  # a turn's next one waits for it
        self._batcher: asyncio.Task[None] | None = None
        # of a session scorers see the end, not its turns
        self._todo = next_todo(job.scorers) if job.session is None else ScorerKind.DONE
        self._session = job.session and msgspec.structs.replace(job.session, node=TurnNode())
        self._subject_session = job.session.session if job.session is not None else ids.NO_SESSION

    def add(self, sample: Sample) -> None:
        if self._singly:
            self._spawn(self._publish_singly(sample))
            return
        self._pending.append(sample)
        if self._batcher is None:
            self._batcher = self._spawn(self._publish_batches())
        if len(self._pending) >= self._coalesce_samples:
            self._wake.set()

    async def finish(self) -> None:
        """Return once everything added is durable and answered."""
        self._ending = True
        self._wake.set()
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        """Give up what is not published yet."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _publish_batches(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._coalesce_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            batch, self._pending = self._pending, []
            if batch:
                self._events += 1
                # unique per event: only a retry of the very same publish is a duplicate
                await self._publish(tuple(batch), f"{self._job.group_id}:{self._nonce}:{self._events}")
            elif self._ending:
                return
            else:
                await self._wake.wait()

    async def _publish_singly(self, sample: Sample) -> None:
        ack = await self._publish((sample,), sample_name(self._job, sample.index))
        if ack.duplicate:
            sample = await self._winner(ack.sequence, sample)
        await reply(self._bus, self._job, (sample,), self._origin.logprobs_mode)

    async def _publish(self, samples: tuple[Sample, ...], msg_id: str) -> PubAck:
        with traces.publishing(self._traceparent, self._job.group_id, len(samples)) as span:
            ack = await self._store(samples, msg_id, span.traceparent)
            span.set(sequence=ack.sequence)
        metrics.published(samples, time.time())
        return ack

    async def _store(self, samples: tuple[Sample, ...], msg_id: str, traceparent: str | None) -> PubAck:
        event = self._event(samples, traceparent)
        todo = self._todo if event.scoring is not None else ScorerKind.DONE
        subject = subjects.samples(todo, self._job.tenant, self._subject_session)
        headers = {Header.GROUP.value: self._job.group_id}
        if traceparent is not None:
            headers[Header.TRACEPARENT.value] = traceparent
        payload = codec.encode(event)

        async def publish() -> PubAck:
            await self._headroom.take(min(len(payload), INLINE_LIMIT))
            store = self._bus.publish if self._singly else self._commit.publish
            return await store(subject, payload, msg_id=msg_id, headers=headers)

        return await persistently(publish, "samples", self._job.group_id)

    def _event(self, samples: tuple[Sample, ...], traceparent: str | None) -> SamplesFinished:
        job = self._job
        scored = self._todo is not ScorerKind.DONE and any(s.status is SampleStatus.SUCCEEDED for s in samples)
        scoring = ScoringTask(
            scorers=job.scorers,
            prompt_text=job.prompt_text,
            messages=job.messages,
            task=job.task,
            metadata=job.metadata,
            deadline=job.deadline,
        )
        return SamplesFinished(
            tenant=job.tenant,
            run=job.run,
            batch_id=job.batch_id,
            group_id=job.group_id,
            n=job.n,
            policy=job.policy,
            job_seq=self._job_seq,
            fence=(job.session.fence if job.session is not None else 0) or self._job_seq,
            incarnation=self._origin.incarnation,
            engine=self._origin.engine,
            logprobs_mode=self._origin.logprobs_mode,
            model_max_len=self._origin.model_max_len,
            sampling=job.sampling,
            session=self._session,  # its node is the sample's
            samples=samples,
            scoring=scoring if scored else None,
            traceparent=traceparent,
        )

    async def _winner(self, sequence: int, mine: Sample) -> Sample:
        """The sample as the record has it: another worker's, published first under the same id."""
        found = await recorded(self._bus, {mine.index: sequence})
        return found.get(mine.index, mine)


async def reply(bus: Bus, job: SampleGroup, samples: tuple[Sample, ...], logprobs_mode: str) -> None:
    """Tell whoever waits for this job; a lost reply is found in the record."""
    if job.reply is Reply.NONE or not samples:
        return
    message = SampleReply(
        group_id=job.call_id,
        prompt_tokens=len(job.prompt_token_ids),
        logprobs_mode=logprobs_mode,
        samples=samples,
    )
    try:
        await bus.publish_core(subjects.reply(job.call_id), message)
    except BusError as error:
        log.warning("reply_failed", group=job.group_id, error=error.message)


async def recorded(bus: Bus, sequences: dict[int, int]) -> dict[int, Sample]:
    """Samples by index as stored in RG_SAMPLES; those whose event is gone are missing."""
    found: dict[int, Sample] = {}
    for sequence in sorted(set(sequences.values())):
        stored = await bus.stored(SAMPLES.name, sequence)
        if stored is None or stored.data is None:
            continue
        event = await bus.decoded(stored.data, stored.headers, SamplesFinished)
        found |= {s.index: s for s in event.samples if sequences.get(s.index) == sequence}
    return found


async def persistently(publish: Callable[[], Awaitable[PubAck]], what: str, group: str) -> PubAck:
    """Publish until it is acknowledged; the caller's deadline ends it by cancelling."""
    delay = FIRST_RETRY_S
    while True:
        try:
            return await publish()
        except (QueueFull, BusError, StorageError) as error:
            log.warning("publish_retried", what=what, group=group, code=error.code, error=error.message)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_S)
