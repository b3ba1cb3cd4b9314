"""The spans of one event: its wait in the queue, the scoring, the durable publish of the verdicts."""

from __future__ import annotations

import time

from rollgrid_contracts.samples import SamplesFinished
from rollgrid_contracts.topology import SAMPLES, Header
from rollgrid_runtime import telemetry
from rollgrid_runtime.pulling import Delivery
from rollgrid_runtime.telemetry import Span


def scoring(delivery: Delivery, finished: SamplesFinished) -> Span:
    """From the decoded event to its end; current inside, so that verdicts and publish are below it."""
    now, group = time.time(), finished.group_id
    parent = delivery.headers.get(Header.TRACEPARENT) or finished.traceparent  # of the scorer before, if there was one
    telemetry.record(
        "queue samples",
        parent,
        delivery.timestamp,
        now,
        kind="consumer",
        stream=SAMPLES.name,
        sequence=delivery.sequence,
        group=group,
    )
    return telemetry.start(
        "score samples",
        parent,
        at=now,
        tenant=finished.tenant,
        run=finished.run,
        batch=finished.batch_id,
        group=group,
        delivery=delivery.delivered,
        samples=len(finished.samples),
    )
