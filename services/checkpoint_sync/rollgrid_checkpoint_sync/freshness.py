"""How fresh the fleet is, and whether it agrees with itself: gauges from the views, and warnings, each said once.

It decides nothing: workers that disagree take themselves out of rotation, overdue versions are the
publisher's matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollgrid_contracts.checkpoints import Fingerprint, PolicyState
from rollgrid_contracts.fleet import WorkerState
from rollgrid_runtime.logging import get_logger

from . import metrics, plan, rollout

log = get_logger(__name__)
RUNS = ("desired", "behind", "nothing")


class Odd(NamedTuple):
    """A worker whose fingerprint of a version is not the reference of any engine class."""

    worker: str
    version: int
    fingerprint: str


class Freshness:
    """Remembers per policy what was told; a new process tells it again."""

    def __init__(self) -> None:
        self._live: dict[str, int] = {}
        self._overdue: dict[str, float] = {}
        self._odd: dict[str, frozenset[Odd]] = {}

    def observe(
        self,
        key: str,
        state: PolicyState,
        workers: Sequence[WorkerState],
        fingerprints: Mapping[str, Fingerprint],
        now: float,
    ) -> None:
        pool = [worker for worker in workers if worker.pool == state.pool]
        counts = Counter(standing(state, worker) for worker in pool)
        for runs in RUNS:
            metrics.WORKERS.labels(key, runs).set(counts[runs])
        self._observe_live(key, state, pool, now)
        self._observe_due(key, state, now)
        self._compare(key, state, pool, fingerprints)

    def _observe_live(self, key: str, state: PolicyState, pool: Sequence[WorkerState], now: float) -> None:
        """The lag of a version that this process has seen becoming the last worker's, once."""
        first_look = key not in self._live
        live = self._live.setdefault(key, 0)
        if state.desired == live or state.rollout is not None or not is_everywhere(state, pool):
            return
        self._live[key] = state.desired
        version = plan.listed(state, state.desired)
        if first_look or version is None or not version.committed_at or state.history.count(state.desired) > 1:
            return
        loaded_at = [one.loaded_at for worker in pool for one in worker.loaded if one.version == state.desired]
        last = max(loaded_at) if loaded_at and all(loaded_at) else now
        metrics.LIVE_LAG.observe(max(0.0, last - version.committed_at))
        log.info("version_everywhere", policy=key, version=state.desired, lag_s=round(last - version.committed_at, 3))

    def _observe_due(self, key: str, state: PolicyState, now: float) -> None:
        overdue = 0.0 < state.refresh_due < now
        metrics.OVERDUE.labels(key).set(overdue)
        if overdue and self._overdue.get(key) != state.refresh_due:
            self._overdue[key] = state.refresh_due
            log.warning("refresh_overdue", policy=key, newest=state.newest, due=state.refresh_due)

    def _compare(
        self, key: str, state: PolicyState, pool: Sequence[WorkerState], fingerprints: Mapping[str, Fingerprint]
    ) -> None:
        odd = disagreeing(state, pool, fingerprints)
        for one in odd - self._odd.get(key, frozenset()):
            log.error("fingerprint_disagrees", policy=key, **one._asdict())
        self._odd[key] = odd
        metrics.DISAGREEING.labels(key).set(len(odd))
        metrics.PENDING.labels(key).set(len(pending(state, pool, fingerprints)))


def standing(state: PolicyState, worker: WorkerState) -> str:
    runs = rollout.runs(state, worker)
    return "nothing" if runs is None else "desired" if runs == state.desired else "behind"


def is_everywhere(state: PolicyState, pool: Sequence[WorkerState]) -> bool:
    """Some worker runs what is desired, and none that is ready runs anything else."""
    return any(rollout.holds(state, one, state.desired) for one in pool) and not rollout.missing(state, pool)


def disagreeing(
    state: PolicyState, pool: Sequence[WorkerState], fingerprints: Mapping[str, Fingerprint]
) -> frozenset[Odd]:
    """Leases do not say their engine class: a fingerprint is odd when no class has it for that version."""
    known: dict[int, set[str]] = {}
    for version, reference in _references(state, fingerprints):
        known.setdefault(version, set()).add(reference.fingerprint)
    return frozenset(
        Odd(worker.worker, one.version, one.fingerprint)
        for worker in pool
        for one in rollout.loaded(state, worker)
        if one.fingerprint is not None and one.version in known and one.fingerprint not in known[one.version]
    )


def pending(
    state: PolicyState, pool: Sequence[WorkerState], fingerprints: Mapping[str, Fingerprint]
) -> list[tuple[int, Fingerprint]]:
    """References of versions that some worker has, which no cold load has confirmed."""
    running = {one.version for worker in pool for one in rollout.loaded(state, worker)}
    return [found for found in _references(state, fingerprints) if found[0] in running and not found[1].cold]


def _references(state: PolicyState, fingerprints: Mapping[str, Fingerprint]) -> list[tuple[int, Fingerprint]]:
    prefix = f"{state.tenant}.{state.policy}."
    found = []
    for key, reference in fingerprints.items():
        version = key.removeprefix(prefix).partition(".")[0]
        if key.startswith(prefix) and version.isdigit():
            found.append((int(version), reference))
    return found
