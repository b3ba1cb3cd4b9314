"""Going back: to adopted versions whose files are there, whatever happened in between."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, Rollout
from rollgrid_contracts.failures import ErrorCode
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.rollback import roll_back

from tests.support.policies import policy_state

STATE = policy_state(
    history=(0, 1, 2, 4),
    desired=4,
    desired_prefix="v/4/",
    newest=4,
    versions=(
        AdoptedVersion(version=2, kind=CheckpointKind.LORA, prefix="v/2/", base_version=0),
        AdoptedVersion(version=4, prefix="v/4/"),
    ),
    rollout=Rollout(version=4, previous=2, workers=("w",)),
)


def test_A44_a_rollback_ends_the_rollout_and_keeps_what_is_newest() -> None:
    back = roll_back(STATE, 2)
    assert (back.desired, back.desired_prefix, back.kind, back.rollout) == (2, "v/2/", CheckpointKind.LORA, None)
    assert (back.history, back.newest, back.versions) == ((0, 1, 2, 4, 2), 4, STATE.versions)
    base = roll_back(back, 0)
    assert (base.desired, base.desired_prefix, base.kind, base.history[-1]) == (0, None, CheckpointKind.FULL, 0)
    assert roll_back(base, 0) is base
    everywhere = roll_back(STATE, 4)
    assert (everywhere.desired, everywhere.rollout, everywhere.history) == (4, None, STATE.history)


@pytest.mark.parametrize(("version", "code"), [(3, ErrorCode.VERSION_UNAVAILABLE), (1, ErrorCode.VERSION_GONE)])
def test_versions_that_never_ran_or_are_deleted(version: int, code: ErrorCode) -> None:
    with pytest.raises(WeightsError) as caught:
        roll_back(STATE, version)
    assert (caught.value.code, caught.value.field) == (code, "version")


@given(st.lists(st.integers(0, 6), max_size=8))
def test_any_series_of_rollbacks_leaves_a_state_that_can_be_run(asked: list[int]) -> None:
    state = msgspec.structs.replace(STATE)
    for version in asked:
        try:
            state = roll_back(state, version)
        except WeightsError:
            continue
        assert state.desired == version == state.history[-1]
        kept = {adopted.version: adopted.prefix for adopted in state.versions}
        assert state.desired_prefix == kept.get(version)
        assert state.newest == STATE.newest
