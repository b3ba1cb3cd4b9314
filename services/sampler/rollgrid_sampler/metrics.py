"""What a sampler counts; exposed on the health server's /metrics."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus

from .jobs import HeldJob

_WAITS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

TOKENS = Counter("rollgrid_sampler_tokens_total", "Tokens sampled")
PROMPT_TOKENS = Counter("rollgrid_sampler_prompt_tokens_total", "Prompt tokens of samples that ended well")
CACHED_TOKENS = Counter("rollgrid_sampler_cached_tokens_total", "Prompt tokens that came from the prefix cache")
SAMPLES = Counter("rollgrid_sampler_samples_total", "Samples that ended here", ["status", "finish_reason"])

SLOTS = Gauge("rollgrid_sampler_slots", "Samples that may be generated at once")
BUSY = Gauge("rollgrid_sampler_slots_busy", "Samples being generated")
QUEUED = Gauge("rollgrid_sampler_jobs_queued", "Jobs here that wait for a slot")
HELD = Gauge("rollgrid_sampler_jobs_held", "Jobs delivered here and not settled")
LANES = Gauge("rollgrid_sampler_lanes", "Lanes (pool, priority, tenant; and private ones) being read")
LANES_OF_OTHERS = Gauge("rollgrid_sampler_lanes_of_others", "Private lanes of workers that are gone, read here")

QUEUE_WAIT = Histogram("rollgrid_sampler_queue_wait_seconds", "From the job's storing to its delivery", buckets=_WAITS)
SLOT_WAIT = Histogram("rollgrid_sampler_slot_wait_seconds", "From the delivery to a sample's start", buckets=_WAITS)
FIRST_TOKEN = Histogram(
    "rollgrid_sampler_first_token_seconds", "From a sample's start to its first token", buckets=_WAITS
)
GENERATION = Histogram("rollgrid_sampler_generation_seconds", "From a sample's start to its end", buckets=_WAITS)
PUBLISH = Histogram("rollgrid_sampler_publish_seconds", "From a sample's end to its durable event", buckets=_WAITS)

REDELIVERIES = Counter("rollgrid_sampler_redeliveries_total", "Jobs that came here after another delivery")
REFUSALS = Counter("rollgrid_sampler_refusals_total", "Jobs given back for later: no weights, no record, no start")
SUSPECTS = Counter("rollgrid_sampler_suspects_total", "Starts of jobs that may have ended their sampler")
POISON = Counter("rollgrid_sampler_poison_total", "Jobs ended as poison")
PARTIALS = Counter("rollgrid_sampler_partials_total", "Checkpoints of long turns on their way to Redis", ["outcome"])
RESUMED_TOKENS = Counter(
    "rollgrid_sampler_resumed_tokens_total", "Tokens of an earlier attempt that a sample went on behind", ["source"]
)
HEALTH_AGE = Gauge("rollgrid_sampler_engine_health_age_seconds", "Since the engine's loop last answered; -1 = never")

VERSION = Gauge("rollgrid_sampler_weight_version", "Checkpoint version that answers now; -1 = none")
BEHIND = Gauge("rollgrid_sampler_weight_versions_behind", "Positions between the desired version and the loaded one")
SWAPS = Counter("rollgrid_sampler_swaps_total", "Attempts to apply another version", ["mode", "outcome"])
SWAP_SECONDS = Histogram(
    "rollgrid_sampler_swap_seconds",
    "Pause of one swap of the full weights: new samples wait so long, running ones as the mode says",
    ["mode"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
SWAP_OVERDUE = Gauge("rollgrid_sampler_swap_overdue", "1 while a swap pauses generation beyond its deadline")
ADAPTERS = Gauge("rollgrid_sampler_loras_loaded", "LoRA versions loaded")
QUARANTINES = Counter("rollgrid_sampler_quarantines_total", "Weights found not to be what their label says")
STAGED_BYTES = Counter("rollgrid_sampler_staged_bytes_total", "Bytes of versions fetched to this node by this worker")
STAGE_SECONDS = Histogram(
    "rollgrid_sampler_stage_seconds",
    "Fetching one version, while generation goes on",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
_LAGS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
APPLY_LAG = Histogram(
    "rollgrid_sampler_apply_lag_seconds", "From a version's commit to its being loaded here", buckets=_LAGS
)
FRESH_LAG = Histogram(
    "rollgrid_sampler_fresh_token_lag_seconds",
    "From a version's commit to this worker's first token of it",
    buckets=_LAGS,
)


def delivered(held: HeldJob) -> None:
    if held.delivery.delivered > 1:
        REDELIVERIES.inc()
    else:
        QUEUE_WAIT.observe(max(0.0, held.dequeued_at - held.delivery.timestamp))


def age(read: Callable[[], float]) -> Callable[[], float]:
    """Seconds since a moment on `time.monotonic`; -1 while it is 0."""
    return lambda: time.monotonic() - at if (at := read()) else -1.0


@functools.cache
def _samples(status: SampleStatus, reason: FinishReason | None) -> Counter:
    """The child of these labels: looking it up costs more than counting."""
    return SAMPLES.labels(status.value, reason.value if reason is not None else "none")


def ended(sample: Sample, prompt_tokens: int) -> None:
    """Count one sample by its own account."""
    _samples(sample.status, sample.finish_reason).inc()
    if sample.error is not None:
        return
    TOKENS.inc(len(sample.token_ids))
    PROMPT_TOKENS.inc(prompt_tokens)
    if sample.cached_tokens:
        CACHED_TOKENS.inc(sample.cached_tokens)
    times = sample.timings
    SLOT_WAIT.observe(max(0.0, times.started_at - times.dequeued_at))
    GENERATION.observe(max(0.0, times.finished_at - times.started_at))
    if times.first_token_at:
        FIRST_TOKEN.observe(max(0.0, times.first_token_at - times.started_at))


def published(samples: tuple[Sample, ...], at: float) -> None:
    for sample in samples:
        PUBLISH.observe(max(0.0, at - sample.timings.finished_at))
