"""The admission point: a checked submission in, jobs in RG_JOBS out.  Accepted means stored."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import IdempotencyRecord
from rollgrid_contracts.samples import GroupsCancelled
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.topology import JOBS, TRAJECTORIES, Header
from rollgrid_runtime import telemetry
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.telemetry import Span

from . import metrics
from .admission import JobsShare, TenantGauge, TenantGauges
from .affinity import Affinity
from .availability import Availability
from .idempotency import Claim, Idempotency
from .ledger_client import LedgerClient
from .pacing import PATIENCE_S, Pacing
from .pins import Pins
from .publishing import JobPublisher, jobs_of, lane_of, turn_job
from .settings import Limits
from .submission import Accepted, Submission

log = get_logger(__name__)
CURSOR_AGE_S = 1.0
CATCH_UP_S = 3.0
ABANDON_S = 600.0
REMEMBERED_BATCHES = 10_000
LOGGED_GROUPS = 16
"""Ids of a batch's groups on the line that says it is stored."""


class KnownBatch(NamedTuple):
    """A batch this process accepted: answers for it need not wait for the ledger."""

    tenant: str
    run: str
    cursor: int
    groups: int
    samples: int
    job_seq: int


class Handler:
    def __init__(
        self,
        bus: Bus,
        ledger: LedgerClient,
        limits: Limits,
        share: JobsShare,
        availability: Availability,
        pacing: Pacing,
        affinity: Affinity,
        *,
        publish_timeout_s: float,
    ) -> None:
        self._bus, self._ledger, self._limits, self._share = bus, ledger, limits, share
        self._availability, self._pacing, self._pins = availability, pacing, Pins(bus)
        self._affinity = affinity
        self._publisher = JobPublisher(bus, publish_timeout_s)
        self._idempotency = Idempotency(bus)
        self._gauges = TenantGauges(bus, limits.max_inflight_samples)
        self._batches: OrderedDict[str, KnownBatch] = OrderedDict()
        self._cursor, self._cursor_at = 0, float("-inf")
        self._abandoned: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._abandoned:
            task.cancel()
        await asyncio.gather(*self._abandoned, return_exceptions=True)
        await self._gauges.close()

    async def submit(
        self, submission: Submission, *, at: float | None = None, again: bool = False, patience_s: float = PATIENCE_S
    ) -> Accepted:
        """Store the submission's jobs; returns once every one is acknowledged.

        A repeated idempotency key names the same ids; only groups nobody has yet are published again,
        as after `again`: this very submission may have been stored before.  Deadlines count from `at`
        (UNIX seconds, now if not given).  `patience_s` is how long to wait for the run's pace.

        Raises QueueFull, BusError, and RollgridError (idempotency_conflict, not_ready, queue_full, paced,
        version_unavailable, version_gone, limit_exceeded).
        """
        now = time.time() if at is None else at
        batch_id, group_ids = submission.batch_id, submission.group_ids
        cursor, fresh = await self.cursor(), not again
        positions: Sequence[int] = range(len(group_ids))
        deadline = now + max(group.deadline_s for group in submission.groups)
        first_deadline = 0.0
        if submission.idempotent:
            claim = await self._claim(submission, cursor, now, deadline)
            fresh, cursor = fresh and claim.fresh, claim.record.cursor
            first_deadline = claim.record.deadline
        if not fresh:
            positions = await self._missing(submission, group_ids)
            if not positions and first_deadline:
                deadline = first_deadline  # nothing is published anew, so the first one's holds
        if positions:
            await self._availability.check(submission)
            weights = await self._pacing.admit(submission, positions, cursor, patience_s, deadline)
            submission = msgspec.structs.replace(submission, weights=weights)
        with (
            bound(tenant=submission.tenant, run=submission.run, batch=batch_id),
            _span(submission, batch_id, group_ids, len(positions)) as span,
            metrics.STORE_SECONDS.time(),
        ):
            job_seq = await self._store(submission, batch_id, group_ids, positions, now, span.traceparent)
            span.set(sequence=job_seq)
            log.debug("jobs_stored", groups=group_ids[:LOGGED_GROUPS], count=len(positions), sequence=job_seq)
        self._remember(batch_id, submission, cursor, job_seq)
        if submission.pace is not None:
            self._pacing.stored(batch_id)
        return Accepted(
            batch_id=batch_id,
            run=submission.run,
            cursor=cursor,
            group_ids=tuple(group_ids),
            deadline=deadline,
            fresh=fresh,
            job_seq=job_seq,
        )

    async def check_turn(self, submission: Submission, until: float) -> None:
        """Before a session's turn begins: its versions can be had, and a pinned one is kept until `until` (UNIX).

        Raises as `submit`.
        """
        await self._availability.check(submission)
        await self._pins.hold_turn(submission, until)

    async def hold_turn(self, submission: Submission, until: float) -> None:
        """Keep the exact version a turn asks for until then, or until its group has closed.  Raises as `submit`."""
        await self._pins.hold_turn(submission, until)

    async def let_go(self, policy: PolicyState, version: int, session: str) -> None:
        """The session has ended, and needs the version it kept no longer.  Never fails."""
        await self._pins.drop_session(policy, version, session)

    async def store_turn(self, submission: Submission, worker: str | None, now: float) -> int:
        """Store the job of a session's turn, on the worker's lane or the pool's; its RG_JOBS sequence.

        Raises QueueFull, BusError, queue_full.
        """
        place = submission.turn
        assert place is not None
        with (
            bound(tenant=submission.tenant, run=submission.run, session=place.session.session),
            _span(submission, place.batch_id, [place.group_id], 1) as span,
            metrics.STORE_SECONDS.time(),
        ):
            job = turn_job(submission, now, span.traceparent)
            await self._share.check(submission.tenant, len(job.payload))
            sequence = await self._publisher.publish(lane_of(submission), [job], worker)
            span.set(sequence=sequence)
        metrics.SAMPLES.labels(submission.priority.value).inc()
        return sequence

    def known(self, tenant: str, batch_id: str) -> KnownBatch | None:
        """The batch, if this process accepted it for `tenant`."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and batch.tenant == tenant else None

    async def cancel(
        self,
        tenant: str,
        run: str,
        batch_id: str,
        group_ids: Sequence[str] = (),
        reason: str = "cancelled by the caller",
    ) -> None:
        """Ask the ledger to end these groups (none = the whole batch); what has ended stays as it is."""
        known = self.known(tenant, batch_id)
        sequence = known.job_seq if known and known.job_seq else (await self._bus.stream_info(JOBS.name)).state.last_seq
        event = GroupsCancelled(
            tenant=tenant,
            run=run,
            batch_id=batch_id,
            group_ids=tuple(group_ids),
            job_seq=sequence,
            reason=reason,
            traceparent=telemetry.current().traceparent,
        )
        subject = subjects.samples(ScorerKind.DONE, tenant)
        await self._bus.publish(subject, event, headers={Header.BATCH.value: batch_id})

    async def cursor(self) -> int:
        """A recent last sequence of RG_TRAJECTORIES: whatever is accepted now closes behind it."""
        now = time.monotonic()
        if now - self._cursor_at > CURSOR_AGE_S:
            self._cursor = (await self._bus.stream_info(TRAJECTORIES.name)).state.last_seq
            self._cursor_at = now
        return self._cursor

    async def probe(self, instance: str) -> None:
        """A real durable write and read.  Raises BusError."""
        await self._idempotency.probe(instance)

    # -- storing --------------------------------------------------------------------------------

    async def _claim(self, submission: Submission, cursor: int, now: float, deadline: float) -> Claim:
        record = IdempotencyRecord(
            body_sha256=submission.digest,
            run=submission.run,
            batch_id=submission.batch_id,
            key=submission.key,
            groups=len(submission.groups),
            cursor=cursor,
            created_at=now,
            deadline=deadline,
        )
        return await self._idempotency.claim(submission.tenant, record)

    async def _missing(self, submission: Submission, group_ids: Sequence[str]) -> list[int]:
        """Positions of groups that the ledger has not got (whole)."""
        known = await self._ledger.caught_up(submission.tenant, list(group_ids), within_s=CATCH_UP_S)
        missing: list[int] = []
        for position, group_id in enumerate(group_ids):
            status = known.get(group_id)
            # of a split group only some shards may be there; a second copy of a shard is folded away
            split = submission.groups[position].n > self._limits.max_shard
            if status is None or (split and status.closed_seq == 0):
                missing.append(position)
        return missing

    async def _store(
        self,
        submission: Submission,
        batch_id: str,
        group_ids: Sequence[str],
        positions: Sequence[int],
        now: float,
        traceparent: str | None,
    ) -> int:
        shard = self._limits.max_shard
        jobs = list(
            jobs_of(submission, batch_id, group_ids, positions, now=now, max_shard=shard, traceparent=traceparent)
        )
        await self._share.check(submission.tenant, sum(len(job.payload) for job in jobs))
        gauge = await self._gauges.of(submission.tenant)
        samples = {group_ids[position]: submission.groups[position].n for position in positions}
        if gauge is not None:
            gauge.reserve(samples)
        stored = False
        try:
            if jobs:
                longest = max(submission.groups[position].deadline_s for position in positions)
                await self._pins.hold(submission, batch_id, now + longest)
            worker = await self._affinity.of_call(submission)
            job_seq = await self._publisher.publish(lane_of(submission), jobs, worker)
            stored = True
        except RollgridError as error:
            told = error.code is not ErrorCode.VERSION_GONE  # then no job was sent
            if told and not submission.idempotent and not submission.stored:
                self._abandon(submission, batch_id)
            raise
        finally:
            _settle(gauge, samples, stored)
        metrics.GROUPS.labels(submission.priority.value).inc(len(samples))
        metrics.SAMPLES.labels(submission.priority.value).inc(sum(samples.values()))
        return job_seq

    def _abandon(self, submission: Submission, batch_id: str) -> None:
        """End what may have been stored of a request that is refused and whose ids nobody will ever know.

        A job sent while the connection was away is stored when it is back: so this goes on until then.
        """
        task = asyncio.create_task(self._cancel_persistently(submission, batch_id))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _cancel_persistently(self, submission: Submission, batch_id: str) -> None:
        give_up = time.monotonic() + ABANDON_S
        while time.monotonic() < give_up:
            try:
                await self.cancel(submission.tenant, submission.run, batch_id, reason="the submission failed")
                await self._pins.drop(submission, batch_id)
                return
            except RollgridError as error:
                log.info("not_abandoned_yet", batch=batch_id, error=error.message)
                await asyncio.sleep(1.0)
        log.warning("not_abandoned", batch=batch_id)

    def _remember(self, batch_id: str, submission: Submission, cursor: int, job_seq: int) -> None:
        known = self._batches.get(batch_id)
        if known is not None and job_seq == 0:
            return
        self._batches[batch_id] = KnownBatch(
            submission.tenant, submission.run, cursor, len(submission.groups), submission.samples, job_seq
        )
        while len(self._batches) > REMEMBERED_BATCHES:
            self._batches.popitem(last=False)


def _settle(gauge: TenantGauge | None, samples: dict[str, int], stored: bool) -> None:
    if gauge is not None:
        gauge.settle(samples, stored)


def _span(submission: Submission, batch_id: str, group_ids: Sequence[str], groups: int) -> Span:
    """Around the durable publish of the jobs; their context is this span."""
    return telemetry.start(
        "publish jobs",
        submission.traceparent,
        kind="producer",
        stream=JOBS.name,
        tenant=submission.tenant,
        run=submission.run,
        batch=batch_id,
        group=group_ids[0] if len(group_ids) == 1 else None,
        policy=submission.policy.policy,
        messages=groups,
        samples=submission.samples,
    )
