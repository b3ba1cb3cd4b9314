"""What should run: versions advance, never go back by themselves, and a rollback holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_checkpoint_sync import plan
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.errors import RollgridError

START = PolicyState(
    tenant="shared",
    policy="m",
    pool="p1",
    base="/models/m",
    base_digest="d0",
    tokenizer_prefix="tokenizers/t/",
    tokenizer_digest="t",
    max_model_len=512,
    vocab_size=512,
    dtype="float32",
)


def test_adopting_and_rolling_back() -> None:
    state = plan.adopt(plan.adopt(START, 1, "one/"), 3, "three/")
    assert (state.desired, state.newest, state.history, state.desired_prefix) == (3, 3, (0, 1, 3), "three/")
    back = plan.roll_back(state, 1, "one/")
    assert (back.desired, back.newest, back.history, back.desired_prefix) == (1, 3, (0, 1, 3, 1), "one/")
    assert plan.roll_back(back, 1, "one/") is back
    base = plan.roll_back(back, 0, "ignored/")
    assert (base.desired, base.desired_prefix) == (0, None)
    assert plan.open_versions(back, plan.Stored(frozenset({1, 2, 3}), frozenset({2}))) == []
    assert plan.adopt(back, 4, "four/").desired == 4


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_older_versions_never_become_desired(version: int) -> None:
    state = plan.roll_back(plan.adopt(plan.adopt(START, 1, "one/"), 3, "three/"), 1, "one/")
    with pytest.raises(plan.StaleVersion) as caught:
        plan.adopt(state, version, "x/")
    assert (caught.value.field, caught.value.limit) == ("version", "> 3")


def test_rolling_back_to_what_never_was() -> None:
    with pytest.raises(RollgridError) as caught:
        plan.roll_back(START, 2, "two/")
    assert caught.value.code is ErrorCode.VERSION_UNAVAILABLE


def test_the_listing() -> None:
    found = plan.stored(
        "shared",
        "m",
        [
            "checkpoints/shared/m/1/manifest.json",
            "checkpoints/shared/m/1/model.safetensors",
            "checkpoints/shared/m/10/manifest.json",
            "checkpoints/shared/m/2/manifest.json",
            "checkpoints/shared/m/2/refused.json",
            "checkpoints/shared/m/0/manifest.json",
            "checkpoints/shared/m/03/manifest.json",
            "checkpoints/shared/m/x/manifest.json",
            "checkpoints/shared/m/4/sub/manifest.json",
            "checkpoints/shared/mm/5/manifest.json",
            "checkpoints/acme/m/6/manifest.json",
            f"checkpoints/shared/m/{'9' * 40}/manifest.json",
        ],
    )
    assert found == plan.Stored(frozenset({1, 2, 10}), frozenset({2}))
    assert plan.open_versions(START, found) == [1, 10]


def test_merging() -> None:
    fresh = msgspec.structs.replace(START, max_model_len=256, aliases=("a",), tool_parser="hermes")
    assert plan.merge(None, fresh, versions_exist=False) == fresh
    advanced = plan.adopt(START, 2, "two/")
    merged = plan.merge(advanced, fresh, versions_exist=True)
    assert (merged.desired, merged.history, merged.max_model_len, merged.aliases) == (2, (0, 2), 256, ("a",))
    assert merged.tool_parser == "hermes", "renewed with the settings"
    other = msgspec.structs.replace(fresh, base_digest="d1")
    assert plan.merge(START, other, versions_exist=False) == other
    for existing, versions_exist in ((START, True), (advanced, False)):
        with pytest.raises(plan.BaseChanged, match=r"shared\.m"):
            plan.merge(existing, other, versions_exist=versions_exist)


@given(st.lists(st.tuples(st.sampled_from(["adopt", "back"]), st.integers(0, 12)), max_size=30))
def test_any_sequence_of_decisions(steps: list[tuple[str, int]]) -> None:
    state, refused = START, set()
    for what, version in steps:
        before = state
        try:
            state = (plan.adopt if what == "adopt" else plan.roll_back)(state, version, f"{version}/")
        except RollgridError:
            assert state is before
            refused.add(version)
        assert state.newest >= before.newest
        assert state.newest == max(state.history)
        assert state.desired == state.history[-1]
        assert state.history[: len(before.history)] == before.history
        assert state.desired_prefix == (f"{state.desired}/" if state.desired else None)
        stored = plan.Stored(frozenset(range(1, 13)), frozenset())
        assert all(version not in state.history for version in plan.open_versions(state, stored))
