"""Jobs into RG_JOBS: one durable per lane first, then as few fsyncs as the server allows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import Header
from rollgrid_runtime.bus import ATOMIC_BATCH_MIN, Bus, Outgoing
from rollgrid_runtime.telemetry import MAX_TRACED_GROUPS, unsampled

from .durables import Durables
from .submission import Submission

CONCURRENT_BATCHES = 8
"""The server bounds open atomic batches per stream (50), and concurrency gains little (measured twofold)."""


class PreparedJob(NamedTuple):
    """An encoded job and the id under which the stream drops an accidental second copy."""

    payload: bytes
    headers: dict[str, str]
    msg_id: str


class JobPublisher:
    def __init__(self, bus: Bus, timeout_s: float) -> None:
        self._bus, self._timeout_s = bus, timeout_s
        self._durables = Durables(bus)
        self._batches = asyncio.Semaphore(CONCURRENT_BATCHES)

    async def publish(self, lane: PoolLane, jobs: Sequence[PreparedJob], worker: str | None = None) -> int:
        """Store all jobs durably, on the pool's lane or on a worker's own; the last RG_JOBS sequence, 0 for no jobs.

        Raises QueueFull (of a batch nothing, of several a prefix is stored), BusError (unknown).
        """
        if not jobs:
            return 0
        if worker is None:
            consumer, subject = topology.pool_consumer(lane), subjects.jobs_pool(*lane)
        else:
            consumer, subject = topology.lane_consumer(worker), subjects.jobs_worker(worker)
        await self._durables.ensure(consumer)
        if len(jobs) < ATOMIC_BATCH_MIN:
            last = 0
            for job in jobs:
                ack = await self._bus.publish(
                    subject, job.payload, msg_id=job.msg_id, headers=job.headers, timeout_s=self._timeout_s
                )
                last = max(last, ack.sequence)
            return last
        items = [Outgoing(subject, job.payload, job.headers) for job in jobs]
        async with self._batches:
            return (await self._bus.publish_batch(items, timeout_s=self._timeout_s))[-1]


def jobs_of(
    submission: Submission,
    batch_id: str,
    group_ids: Sequence[str],
    positions: Iterable[int],
    *,
    now: float,
    max_shard: int,
    traceparent: str | None = None,
) -> Iterator[PreparedJob]:
    """The jobs of the groups at `positions`; a group of more than `max_shard` samples becomes several.

    They are below `traceparent`; of a large batch only the first groups are traced.  A pinned group stays
    whole: two workers may never agree on a version.
    """
    for position in positions:
        group, group_id = submission.groups[position], group_ids[position]
        trace = traceparent if position < MAX_TRACED_GROUPS else unsampled(traceparent)
        whole = _job(submission, batch_id, group_id, position, now, trace)
        step = group.n if submission.pinned else max_shard
        shards = [range(start, min(start + step, group.n)) for start in range(0, group.n, step)]
        for shard, indexes in enumerate(shards):
            job = msgspec.structs.replace(whole, indexes=tuple(indexes), shard=shard, shards=len(shards))
            yield _prepared(job, f"{group_id}.{shard}")


def turn_job(submission: Submission, now: float, traceparent: str | None) -> PreparedJob:
    """The job of a session's turn: one sample of its group.  The stream drops a second copy."""
    place = submission.turn
    assert place is not None
    job = _job(submission, place.batch_id, place.group_id, 0, now, traceparent)
    job = msgspec.structs.replace(job, n=place.n, indexes=(place.index,), session=place.session)
    return _prepared(job, place.call_id)


def _prepared(job: SampleGroup, msg_id: str) -> PreparedJob:
    headers = {Header.GROUP.value: job.group_id, Header.BATCH.value: job.batch_id}
    if job.traceparent is not None:
        headers[Header.TRACEPARENT.value] = job.traceparent
    return PreparedJob(codec.encode(job), headers, msg_id)


def _job(
    submission: Submission, batch_id: str, group_id: str, position: int, now: float, traceparent: str | None
) -> SampleGroup:
    """The job of all samples of the group at `position`."""
    group = submission.groups[position]
    return SampleGroup(
        tenant=submission.tenant,
        run=submission.run,
        batch_id=batch_id,
        group_id=group_id,
        position=position,
        n=group.n,
        indexes=tuple(range(group.n)),
        policy=submission.policy.policy,
        model=submission.model,
        pool=submission.policy.pool,
        prompt_token_ids=group.prompt_token_ids,
        prompt_text=group.prompt_text,
        messages=group.messages,
        sampling=group.sampling,
        weights=submission.weights,
        on_refresh=submission.on_refresh,
        pinned=submission.pinned,
        cache_salt=submission.cache_salt,
        scorers=group.scorers,
        task=group.task,
        metadata=group.metadata,
        parsing=group.parsing,
        rights=submission.rights,
        engagement_id=submission.engagement_id,
        priority=submission.priority,
        created_at=now,
        deadline=now + group.deadline_s,
        reply=submission.reply,
        traceparent=traceparent,
        record_format=submission.record_format,
    )


def lane_of(submission: Submission) -> PoolLane:
    return PoolLane(submission.policy.pool, submission.priority, submission.tenant)
