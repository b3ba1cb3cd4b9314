"""What should run: versions advance, never go back by themselves, and a rollback holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_checkpoint_sync import plan
from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, PolicyState, Rollout, RolloutRequest
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.rollback import roll_back

from tests.support.policies import policy_state

START = policy_state(policy="m")


def adopt(state: PolicyState, version: int, **changes: object) -> PolicyState:
    adopted = msgspec.structs.replace(AdoptedVersion(version=version, prefix=f"{version}/"), **changes)
    return plan.adopt(state, adopted, RolloutRequest(), 100.0, deadline_s=60)


def test_adopting_and_rolling_back() -> None:
    state = adopt(adopt(START, 1), 3)
    assert (state.desired, state.newest, state.history, state.desired_prefix) == (3, 3, (0, 1, 3), "3/")
    assert [one.version for one in state.versions] == [1, 3]
    back = roll_back(state, 1)
    assert (back.desired, back.newest, back.history, back.desired_prefix) == (1, 3, (0, 1, 3, 1), "1/")
    assert plan.open_versions(back, plan.Stored(frozenset({1, 2, 3}), frozenset({2}))) == []
    assert adopt(back, 4).desired == 4


@pytest.mark.parametrize("version", [0, 2])
def test_older_versions_never_become_desired(version: int) -> None:
    state = roll_back(adopt(adopt(START, 1), 3), 1)
    with pytest.raises(plan.StaleVersion) as caught:
        adopt(msgspec.structs.replace(state, history=(1, 3, 1)), version)
    assert (caught.value.field, caught.value.limit) == ("version", "> 3")


def test_two_that_adopt_the_same_version_adopt_it_once() -> None:
    """The second finds it done: no change, and above all no refusal."""
    state = adopt(START, 1)
    assert adopt(state, 1) is state
    back = roll_back(adopt(state, 2), 1)
    assert adopt(back, 2) is back, "nor does it come back by that"


@pytest.mark.parametrize(("before", "step", "rewinds"), [(3, 2, 1), (3, 3, 0), (3, 4, 0), (None, 2, 0), (3, None, 0)])
def test_A60_a_version_of_an_earlier_step_names_the_one_before(
    before: int | None, step: int | None, rewinds: int
) -> None:
    first = adopt(START, 1, step=before)
    assert adopt(first, 2, step=step).versions[-1].rewinds == rewinds
    went_back = roll_back(adopt(first, 2, step=9), 1)
    assert adopt(went_back, 3, step=5).versions[-1].rewinds == 0, "the fleet went back, not the trainer"


def test_an_adapter_whose_base_was_collected_meanwhile() -> None:
    state = msgspec.structs.replace(adopt(adopt(START, 1), 2), versions=())
    with pytest.raises(plan.BaseGone) as caught:
        adopt(state, 3, kind=CheckpointKind.LORA, base_version=1)
    assert (caught.value.code, caught.value.field) == (ErrorCode.VERSION_GONE, "base_version")
    assert adopt(state, 3, kind=CheckpointKind.LORA, base_version=0).kind is CheckpointKind.LORA


@pytest.mark.parametrize(("committed", "due"), [(50.0, 80.0), (0.0, 130.0)])
def test_when_the_next_version_is_due(committed: float, due: float) -> None:
    version = AdoptedVersion(version=1, prefix="1/", committed_at=committed)
    state = plan.adopt(START, version, RolloutRequest(), 100.0, deadline_s=60, next_within_s=30.0)
    assert (state.newest_at, state.refresh_due) == (committed or 100.0, due)
    assert adopt(state, 2).refresh_due == 0.0, "the newest version promises nothing"


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
    advanced = msgspec.structs.replace(
        adopt(START, 2), rollout=Rollout(version=2, previous=0), newest_at=5.0, refresh_due=9.0
    )
    merged = plan.merge(advanced, fresh, versions_exist=True)
    assert (merged.desired, merged.history, merged.max_model_len, merged.aliases) == (2, (0, 2), 256, ("a",))
    assert merged.tool_parser == "hermes", "renewed with the settings"
    for field in ("versions", "rollout", "newest_at", "refresh_due"):
        assert getattr(merged, field) == getattr(advanced, field)
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
            state = (adopt if what == "adopt" else roll_back)(state, version)
        except (RollgridError, WeightsError):
            assert state is before
            refused.add(version)
        assert state.newest >= before.newest
        assert state.newest == max(state.history)
        assert state.desired == state.history[-1]
        assert state.history[: len(before.history)] == before.history
        assert state.desired_prefix == (f"{state.desired}/" if state.desired else None)
        stored = plan.Stored(frozenset(range(1, 13)), frozenset())
        assert all(version not in state.history for version in plan.open_versions(state, stored))
