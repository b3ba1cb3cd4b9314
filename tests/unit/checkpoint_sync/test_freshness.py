"""What the fleet's views say about freshness and agreement."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from rollgrid_checkpoint_sync import freshness
from rollgrid_checkpoint_sync.freshness import Freshness, Odd
from rollgrid_contracts.checkpoints import AdoptedVersion, Fingerprint, PolicyState, Rollout, fingerprint_key
from rollgrid_contracts.fleet import LoadedVersion, WorkerState

from tests.unit.checkpoint_sync.test_plan import START

STATE = msgspec.structs.replace(
    START,
    desired=2,
    newest=2,
    history=(0, 1, 2),
    versions=(AdoptedVersion(version=1, committed_at=10.0), AdoptedVersion(version=2, committed_at=100.0)),
)


def worker(name: str, *loaded: LoadedVersion, **changes: Any) -> WorkerState:
    fields: dict[str, Any] = {"pool": START.pool, "engine": "vllm", "device": "cpu", "slots": 1, "loaded": loaded}
    return WorkerState(worker=name, incarnation=name, **fields | changes)


def on(version: int, fingerprint: str | None = None, **changes: Any) -> LoadedVersion:
    return LoadedVersion(policy="m", version=version, fingerprint=fingerprint, **changes)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"rollgrid_checkpoint_sync_{name}", labels) or 0.0


def observe(found: Freshness, state: PolicyState, *pool: WorkerState, now: float = 150.0) -> None:
    found.observe("shared.m", state, pool, {}, now)


def test_the_lag_of_a_version_is_seen_once_and_not_guessed() -> None:
    found, first = Freshness(), metric("live_lag_seconds_count")
    before = metric("live_lag_seconds_sum")
    observe(found, STATE, worker("a", on(2)), worker("b", on(1)))
    observe(found, msgspec.structs.replace(STATE, rollout=Rollout(version=2, previous=1)), worker("a", on(2)))
    assert metric("live_lag_seconds_count") == first
    for _ in range(2):
        observe(found, STATE, worker("a", on(2, loaded_at=110.0)), worker("b", on(2, loaded_at=130.0)))
    assert metric("live_lag_seconds_count") == first + 1
    assert metric("live_lag_seconds_sum") == before + 30.0
    back = msgspec.structs.replace(STATE, desired=1, history=(0, 1, 2, 1))
    observe(found, back, worker("a", on(1)))
    observe(Freshness(), STATE, worker("a", on(2)))
    assert metric("live_lag_seconds_count") == first + 1, "neither a roll-back nor what was so at the start"


def test_workers_by_what_they_run() -> None:
    pool = [
        worker("a", on(2)),
        worker("b", on(1), on(2, current=False)),
        worker("c"),
        worker("d", on(2), pool="other"),
        worker("e", LoadedVersion(policy="another", version=2)),
    ]
    observe(Freshness(), STATE, *pool)
    runs = {runs: metric("workers", policy="shared.m", runs=runs) for runs in freshness.RUNS}
    assert runs == {"desired": 1, "behind": 1, "nothing": 2}


@pytest.mark.parametrize(("due", "overdue"), [(0.0, 0.0), (200.0, 0.0), (149.0, 1.0)])
def test_a60_a_promised_version_that_does_not_come(due: float, overdue: float) -> None:
    observe(Freshness(), msgspec.structs.replace(STATE, refresh_due=due))
    assert metric("refresh_overdue", policy="shared.m") == overdue


def test_who_computes_something_else() -> None:
    """A label that moved before the weights has the fingerprint of the version before."""
    references = {
        fingerprint_key("shared", "m", 1, "x"): Fingerprint(fingerprint="one", cold=True),
        fingerprint_key("shared", "m", 2, "x"): Fingerprint(fingerprint="two", cold=False),
        fingerprint_key("shared", "m", 2, "y"): Fingerprint(fingerprint="two-on-y", cold=True),
        fingerprint_key("shared", "m", 3, "x"): Fingerprint(fingerprint="three", cold=False),
        fingerprint_key("shared", "mm", 2, "x"): Fingerprint(fingerprint="one", cold=False),
    }
    pool = [
        worker("a", on(2, "two")),
        worker("b", on(2, "two-on-y")),
        worker("c", on(2, "one")),
        worker("d", on(2)),
        worker("e", on(7, "seven")),
    ]
    assert freshness.disagreeing(STATE, pool, references) == {Odd("c", 2, "one")}
    assert [version for version, _ in freshness.pending(STATE, pool, references)] == [2]
