"""What a fleet says of itself at one moment, and what two such readings say of its speed.  Pure but for `scrape`."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from rollgrid_contracts.fleet import WorkerState

from rollgrid.answers import Fleet

SCRAPE_TIMEOUT_S = 2.0
LATE_S = 6.0
"""A lease not renewed for so long is late: workers renew every three seconds."""

Labels = Mapping[str, str]


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """A /metrics address; `key` is sent as a bearer token."""

    name: str
    url: str
    key: str | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics` maps the name of each service that answered to its samples: (metric, labels, value)."""

    at: float
    fleet: Fleet
    metrics: dict[str, tuple[tuple[str, dict[str, str], float], ...]] = {}

    def total(self, metric: str, **labels: str) -> float | None:
        """The sum over all services and label values; None when nobody exports metrics of that part.

        A counter with labels has no sample before it first counts: that is 0.
        """
        part = "_".join(metric.split("_", 2)[:2]) + "_"
        known = any(name.startswith(part) for samples in self.metrics.values() for name, _, _ in samples)
        return sum(value for _, value in self._of(metric, labels)) if known else None

    def by(self, metric: str, label: str) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for labels, value in self._of(metric, {}):
            counts[labels.get(label, "")] += value  # type: ignore[assignment]
        return dict(counts)

    def of_each(self, metric: str) -> dict[str, float]:
        """By service."""
        return {
            service: sum(value for name, _, value in samples if name == metric)
            for service, samples in self.metrics.items()
            if any(name == metric for name, _, _ in samples)
        }

    def _of(self, metric: str, wanted: Labels) -> list[tuple[dict[str, str], float]]:
        return [
            (labels, value)
            for samples in self.metrics.values()
            for name, labels, value in samples
            if name == metric and wanted.items() <= labels.items()
        ]


def scrape(doors: Iterable[Door]) -> dict[str, tuple[tuple[str, dict[str, str], float], ...]]:
    """Samples of every service that answers."""
    wanted = list(doors)
    if not wanted:
        return {}
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = pool.map(_scrape, wanted)
    return {door.name: found for door, found in zip(wanted, answers, strict=True) if found is not None}


def _scrape(door: Door) -> tuple[tuple[str, dict[str, str], float], ...] | None:
    from prometheus_client.parser import text_string_to_metric_families

    headers = {"Authorization": f"Bearer {door.key}"} if door.key else {}
    request = urllib.request.Request(f"{door.url}/metrics", headers=headers)  # noqa: S310 - a service's own door
    try:
        with urllib.request.urlopen(request, timeout=SCRAPE_TIMEOUT_S) as answer:  # noqa: S310
            text = answer.read().decode()
        return tuple(
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    except (OSError, ValueError):
        return None


# -- frames ---------------------------------------------------------------------------------------


def frame(now: Reading, history: Sequence[Reading] = ()) -> dict[str, Any]:
    """Everything `rollgrid top` shows, as one JSON-compatible object.

    `history` are earlier readings, oldest first; without one all speeds are null.
    """
    before = history[-1] if history else None
    workers = [_worker(worker, _earlier(worker, history), now.at) for worker in now.fleet.workers]
    return {
        "at": now.at,
        "workers": workers,
        "queues": [_queue(name, queue) for name, queue in now.fleet.queues.items()],
        "ledger": _ledger(now, before),
        "samples": _samples(now, before, workers),
        "scorer": _scorer(now, before),
        "ingest": _ingest(now, before),
        "services": _services(now),
    }


def _worker(worker: WorkerState, earlier: WorkerState | None, at: float) -> dict[str, Any]:
    state = "quarantined" if worker.quarantined else "draining" if worker.draining else "ready"
    if at - worker.renewed_at > LATE_S:
        state = "late"
    return {
        "worker": worker.worker,
        "state": state,
        "problem": worker.quarantined or worker.weights_problem,
        "engine": worker.engine,
        "loaded": [f"{version.policy}@{version.version}" for version in worker.loaded],
        "slots": worker.slots,
        "busy": worker.busy,
        "tokens_total": worker.tokens_total,
        "samples_total": worker.samples_total,
        "tokens_per_s": _lease_rate(worker, earlier, "tokens_total"),
        "samples_per_s": _lease_rate(worker, earlier, "samples_total"),
    }


def _earlier(worker: WorkerState, history: Sequence[Reading]) -> WorkerState | None:
    """An older lease of the same process, the oldest that is remembered; a restarted process counts from zero."""
    for reading in history:
        for known in reading.fleet.workers:
            if known.incarnation == worker.incarnation and known.renewed_at < worker.renewed_at:
                return known
    return None


def _lease_rate(worker: WorkerState, earlier: WorkerState | None, field: str) -> float | None:
    """Between two leases, by their own times: between two readings there may be none or two."""
    if earlier is None:
        return None
    rate: float = (getattr(worker, field) - getattr(earlier, field)) / (worker.renewed_at - earlier.renewed_at)
    return round(max(0.0, rate), 3)


def _queue(name: str, queue: Mapping[str, Any]) -> dict[str, Any]:
    bound = queue.get("max_bytes") or -1
    return {
        "stream": name,
        "messages": queue.get("messages", 0),
        "bytes": queue.get("bytes", 0),
        "full": round(queue.get("bytes", 0) / bound, 4) if bound > 0 else None,
        "consumers": dict(queue.get("consumers", {})),
    }


def _ledger(now: Reading, before: Reading | None) -> dict[str, Any]:
    """Without the logger's metrics, the jobs that wait for the ledger's ack stand for the open groups."""
    jobs = now.fleet.queues.get("RG_JOBS", {}).get("consumers", {})
    waiting = sum(lag.get("unacked", 0) + lag.get("pending", 0) for name, lag in jobs.items() if _is_ledger(name))
    open_groups = now.total("rollgrid_ledger_open_groups")
    lease = now.fleet.ledger
    return {
        "holder": lease.get("holder"),
        "epoch": lease.get("epoch"),
        "age_s": lease.get("age_s"),
        "open_groups": int(open_groups) if open_groups is not None else None,
        "open_jobs": waiting,
        "closes_per_s": rate(now, before, "rollgrid_ledger_closed_groups_total"),
        "archive_lag": now.total("rollgrid_archive_lag"),
    }


def _is_ledger(consumer: str) -> bool:
    return consumer.startswith("ledger-")


def _samples(now: Reading, before: Reading | None, workers: list[dict[str, Any]]) -> dict[str, Any]:
    """`statuses` are terminal entries; without the logger's metrics the speed is that of the workers."""
    per_s = rate(now, before, "rollgrid_ledger_entries_total")
    if per_s is None:
        known = [worker["samples_per_s"] for worker in workers if worker["samples_per_s"] is not None]
        per_s = sum(known) if known else None
    return {
        "per_s": per_s,
        "useful_per_s": rate(now, before, "rollgrid_ledger_useful_samples_total"),
        "statuses": now.by("rollgrid_ledger_entries_total", "status"),
        "rewards": now.by("rollgrid_ledger_rewards_total", "status"),
    }


def _scorer(now: Reading, before: Reading | None) -> dict[str, Any]:
    return {
        "verdicts_per_s": rate(now, before, "rollgrid_scorer_scores_total"),
        "held": now.total("rollgrid_scorer_events_held"),
        "statuses": now.by("rollgrid_scorer_scores_total", "status"),
    }


def _ingest(now: Reading, before: Reading | None) -> dict[str, Any]:
    return {
        "requests_per_s": rate(now, before, "rollgrid_ingest_requests_total"),
        "refused_per_s": rate(now, before, "rollgrid_ingest_refused_total"),
        "waiting": now.total("rollgrid_ingest_waiting_replies"),
        "streams_open": now.total("rollgrid_ingest_streams_open"),
    }


def _services(now: Reading) -> dict[str, dict[str, float]]:
    """Memory and mean loop lag of every service whose /metrics answered."""
    memory = now.of_each("process_resident_memory_bytes")
    late, probes = (now.of_each(f"rollgrid_process_loop_lag_seconds_{part}") for part in ("sum", "count"))
    return {
        name: {
            "memory_bytes": memory.get(name, 0.0),
            "loop_lag_s": round(late.get(name, 0.0) / probes[name], 6) if probes.get(name) else 0.0,
        }
        for name in now.metrics
    }


def rate(now: Reading, before: Reading | None, metric: str) -> float | None:
    """Per second between two readings; None when it is not known, 0 after a restart."""
    after, earlier = now.total(metric), before.total(metric) if before is not None else None
    if before is None or after is None or earlier is None or now.at <= before.at:
        return None
    return round(max(0.0, after - earlier) / (now.at - before.at), 3)
