"""The spans of one attempt at a job: its wait in the queue, the attempt, each sample, each publish.

A worker that is killed exports nothing, so the id of an attempt's span follows from the job and the
attempt's number: the next attempt links to it without having been told.
"""

from __future__ import annotations

from rollgrid_contracts.samples import Sample
from rollgrid_contracts.topology import JOBS, SAMPLES, Header
from rollgrid_runtime import telemetry
from rollgrid_runtime.telemetry import MAX_SAMPLE_SPANS, OFF, Span

from .jobs import HeldJob

MAX_ATTEMPTS = 32
"""A job that is refused every two seconds for an hour is not a thousand spans."""


def begin(held: HeldJob, worker: str) -> None:
    """Start the span of this attempt, and record the wait before it."""
    job, delivery = held.job, held.delivery
    parent = delivery.headers.get(Header.TRACEPARENT) or job.traceparent
    if not telemetry.sampled(parent) or delivery.delivered > MAX_ATTEMPTS:
        held.span = Span(parent) if parent is not None else OFF
        return
    assert parent is not None
    which, attempt = (job.call_id, job.shard), held.attempt
    telemetry.record(
        "queue jobs",
        parent,
        delivery.timestamp,
        held.dequeued_at,
        kind="consumer",
        stream=JOBS.name,
        sequence=held.sequence,
        group=job.group_id,
        attempt=attempt,
    )
    held.span = telemetry.start(
        "sample group",
        parent,
        at=held.dequeued_at,
        span_id=telemetry.step_id(parent, *which, attempt),
        links=[telemetry.step_context(parent, *which, attempt - 1)] if delivery.delivered > 1 else (),
        tenant=job.tenant,
        run=job.run,
        batch=job.batch_id,
        group=job.group_id,
        policy=job.policy,
        pool=job.pool,
        priority=job.priority.value,
        attempt=attempt,
        worker=worker,
        samples=len(job.indexes),
        prompt_tokens=len(job.prompt_token_ids),
    )


def sampled(held: HeldJob, sample: Sample) -> None:
    """Record one sample by its own account."""
    if not held.span.recorded or sample.index - held.job.indexes[0] >= MAX_SAMPLE_SPANS:
        return
    times, spans = sample.timings, sample.version_spans
    span = telemetry.start(
        "generate sample",
        held.span.traceparent,
        at=times.started_at,
        group=held.job.group_id,
        index=sample.index,
        attempt=sample.attempt,
        version=spans[-1].version if spans else None,
        tokens=len(sample.token_ids),
        cached_tokens=sample.cached_tokens,
        resumed_from=sample.resumed_from or None,
        finish_reason=sample.finish_reason.value if sample.finish_reason else None,
        status=sample.status.value,
    )
    if times.first_token_at:
        span.event("first_token", times.first_token_at)
    if sample.error is not None:
        span.fail(sample.error.code.value)
    span.end(max(times.started_at, times.finished_at))


def publishing(parent: str | None, group: str, samples: int) -> Span:
    """Around the durable publish of an event; its context is the event's."""
    return telemetry.start(
        "publish samples", parent, kind="producer", stream=SAMPLES.name, group=group, messages=1, samples=samples
    )
