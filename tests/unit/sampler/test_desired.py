"""What a worker should have loaded, and which of it serves a job: pure decisions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, Fingerprint, PolicyState, Rollout
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_sampler.desired import Wanted, choose, due, wanted
from rollgrid_sampler.fingerprints import Finding, Proof, judge, unmoved


def state(desired: int, versions: tuple[AdoptedVersion, ...] = (), **changes: Any) -> PolicyState:
    fields: dict[str, Any] = {
        "tenant": "shared",
        "policy": "p",
        "pool": "x",
        "base": "b",
        "base_digest": "base",
        "tokenizer_prefix": "",
        "tokenizer_digest": "",
        "max_model_len": 1,
        "vocab_size": 1,
        "dtype": "float32",
        "desired": desired,
        "versions": versions,
        "history": (0, *(v.version for v in versions)),
    }
    return PolicyState(**{**fields, **changes})


def full(version: int) -> AdoptedVersion:
    return AdoptedVersion(version=version, prefix=f"f{version}/")


def lora(version: int, base: int = 0) -> AdoptedVersion:
    return AdoptedVersion(version=version, kind=CheckpointKind.LORA, prefix=f"l{version}/", base_version=base)


def numbers(want: Wanted) -> tuple[int, int, list[int]]:
    return want.current, want.full.version, [adapter.version for adapter in want.adapters]


LORAS = (full(1), lora(2, 1), lora(3, 1), lora(4, 1), lora(5, 1))


def test_a_full_version_is_loaded_alone() -> None:
    assert numbers(wanted(state(1, (full(1),)), "w", 4)) == (1, 1, [])
    assert numbers(wanted(state(6, (*LORAS, full(6))), "w", 4)) == (6, 6, [])
    assert wanted(state(0), "w", 0).full.weights_digest == "base"


def test_a_version_the_state_does_not_list_is_where_the_state_says() -> None:
    assert wanted(state(7, desired_prefix="there/"), "w", 0).full.prefix == "there/"


def test_lora_versions_lie_side_by_side_newest_first() -> None:
    assert numbers(wanted(state(5, LORAS), "w", 3)) == (5, 1, [5, 4, 3])
    assert numbers(wanted(state(5, LORAS), "w", 8)) == (5, 1, [5, 4, 3, 2])
    assert numbers(wanted(state(5, LORAS), "w", 0)) == (5, 1, [])


def test_pinned_versions_come_before_newer_ones_that_nobody_asked_for() -> None:
    assert numbers(wanted(state(5, LORAS), "w", 3, asked={2})) == (5, 1, [5, 2, 4])
    assert numbers(wanted(state(1, LORAS), "w", 3, asked={2})) == (1, 1, [2]), "back on the base, by name only"


def test_what_was_rolled_back_is_not_kept_unless_pinned() -> None:
    assert numbers(wanted(state(3, LORAS), "w", 4)) == (3, 1, [3, 2])
    assert numbers(wanted(state(3, LORAS), "w", 4, asked={5})) == (3, 1, [3, 5, 2])


def test_what_garbage_collection_takes_is_not_kept_unless_pinned() -> None:
    versions = (full(1), lora(2, 1), msgspec.structs.replace(lora(3, 1), going=True), lora(4, 1))
    assert numbers(wanted(state(4, versions), "w", 4)) == (4, 1, [4, 2])
    assert numbers(wanted(state(4, versions), "w", 4, asked={3})) == (4, 1, [4, 3, 2])


@pytest.mark.parametrize("version", [5, 6])
def test_only_the_workers_of_a_rollout_apply_its_version(version: int) -> None:
    versions = (*LORAS, full(6))
    rolling = state(version, versions, rollout=Rollout(version=version, previous=4, workers=("a",)))
    assert due(rolling, "a") == version
    assert numbers(wanted(rolling, "b", 2)) == (4, 1, [4, 3])
    assert numbers(wanted(rolling, "b", 3, asked={5})) == (4, 1, [4, 3, 2] if version == 5 else [4, 5, 3])


def test_a_rollout_that_failed_is_applied_by_nobody() -> None:
    why = ErrorInfo(code=ErrorCode.VERSION_UNAVAILABLE, message="wrong")
    rolling = state(5, LORAS, rollout=Rollout(version=5, previous=4, workers=("a",), failure=why))
    assert due(rolling, "a") == 4


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=8),
    st.integers(0, 8),
    st.integers(0, 5),
    st.sets(st.integers(0, 8), max_size=3),
)
def test_what_is_wanted_fits_and_lies_on_its_base(
    kinds: list[tuple[bool, int]], desired: int, places: int, asked: set[int]
) -> None:
    versions = tuple(
        lora(number, min(base, number - 1)) if is_lora else full(number)
        for number, (is_lora, base) in enumerate(kinds, start=1)
    )
    desired = min(desired, len(versions))
    want = wanted(state(desired, versions), "w", places, asked)
    assert want.current == desired
    loaded = [adapter.version for adapter in want.adapters]
    assert len(loaded) == len(set(loaded)) <= places
    assert all(a.kind is CheckpointKind.LORA and a.base_version == want.full.version for a in want.adapters)
    if want.current != want.full.version and places:
        assert loaded[0] == want.current


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        (VersionRule.LATEST, 0, 5),
        (VersionRule.EXACT, 3, 3),
        (VersionRule.EXACT, 9, None),
        (VersionRule.MIN, 4, 5),
        (VersionRule.MIN, 6, None),
        (VersionRule.MAX_STALENESS, 0, 5),
    ],
)
def test_the_version_of_a_request(rule: VersionRule, value: int, expected: int | None) -> None:
    constraint = WeightConstraint(rule=rule, value=value)
    assert choose(constraint, 5, [1, 3, 4, 5], state(5, LORAS)) == expected


def test_after_a_rollback_a_newer_version_still_serves_who_names_it() -> None:
    at_least = WeightConstraint(rule=VersionRule.MIN, value=4)
    assert choose(at_least, 3, [1, 3, 5], state(3, LORAS)) == 5
    assert choose(WeightConstraint(), 3, [1, 5], state(3, LORAS)) is None, "the current one is not loaded yet"


def test_fingerprints_against_the_record() -> None:
    mine = Finding(3, "x", cold=False)
    assert judge(mine, Fingerprint(fingerprint="x")) is Proof.PENDING
    assert judge(mine, Fingerprint(fingerprint="x", cold=True)) is Proof.CONFIRMED
    assert judge(mine, Fingerprint(fingerprint="y")) is Proof.WRONG
    assert judge(mine._replace(cold=True), Fingerprint(fingerprint="x")) is Proof.CONFIRMED


def test_a_label_that_moved_alone() -> None:
    old = Finding(3, "x", cold=True, digest="a")
    assert unmoved(old, Finding(4, "x", cold=False, digest="b"))
    assert not unmoved(old, Finding(4, "x", cold=False, digest="a")), "the same weights again"
    assert not unmoved(old, Finding(4, "y", cold=False, digest="b"))
    assert not unmoved(old, Finding(4, "x", cold=False)), "nobody knows its digest"
    assert not unmoved(None, Finding(4, "x", cold=False, digest="b"))
