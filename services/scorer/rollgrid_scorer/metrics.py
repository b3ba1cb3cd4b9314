"""What the scorer counts; exposed on the health server's /metrics.

The label `type` is a registered scorer's name, `unknown` for any other: a job cannot make new series.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

EVENTS = Counter("rollgrid_scorer_events_total", "Events of RG_SAMPLES by what became of them", ["outcome"])
SCORES = Counter("rollgrid_scorer_scores_total", "Verdicts by scorer type and status", ["type", "status"])
SECONDS = Histogram("rollgrid_scorer_verdict_seconds", "Time of one verdict", ["type"])
QUEUE_WAIT = Histogram(
    "rollgrid_scorer_queue_wait_seconds",
    "From an event's storing to its being taken up",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
EVENT_SECONDS = Histogram(
    "rollgrid_scorer_event_seconds",
    "From an event's being taken up to its end",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
HELD = Gauge("rollgrid_scorer_events_held", "Events being scored")
REPLACED = Gauge(
    "rollgrid_scorer_workers_replaced", "Worker processes that had to be killed or had died, since the start"
)
