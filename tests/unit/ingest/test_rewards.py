"""What may be posted onto which sample: everything else is refused by field and limit (A07: failure is never a 0)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.trajectories import Entry, PostedReward
from rollgrid_ingest.rewards import checked_rewards
from rollgrid_ingest.rewards_schema import RewardItem
from rollgrid_ingest.settings import Limits
from rollgrid_runtime.errors import RollgridError

LIMITS = Limits(max_rewards=4, max_detail_chars=8)


def sample(index: int, tokens: int = 3, status: SampleStatus = SampleStatus.SUCCEEDED, turn: int = 0) -> Sample:
    ids = TokenIds.of(range(tokens))
    return Sample(index=index, turn=turn, status=status, token_ids=ids, logprobs=Floats.of([-1.0] * tokens))


ENTRIES = (
    Entry(sample=sample(0)),
    Entry(sample=sample(1, 0, SampleStatus.FAILED)),
    Entry(sample=sample(2), turns=(sample(2), sample(2, turn=1), sample(2, turn=2))),
    Entry(sample=sample(3, 2, SampleStatus.EXPIRED)),
)


def checked(*items: RewardItem) -> tuple[PostedReward, ...]:
    return checked_rewards(items, ENTRIES, "rewards", LIMITS)


def test_scalars_and_turns_under_their_names() -> None:
    assert checked(
        RewardItem(index=0, value=1),
        RewardItem(index=0, name="tests", kind="pass_rate", value=0.5, detail="3 of 6"),
        RewardItem(index=2, turn_values=[0.5, None, 1.0]),
        RewardItem(index=3, value=-2.0),
    ) == (
        PostedReward(index=0, value=1),
        PostedReward(index=0, name="tests", kind="pass_rate", value=0.5, detail="3 of 6"),
        PostedReward(index=2, kind="turns", turn_values=(0.5, None, 1.0)),
        PostedReward(index=3, value=-2.0),
    )


@pytest.mark.parametrize(
    ("item", "field", "limit"),
    [
        (RewardItem(index=4, value=1), "rewards[0].index", "0<=index<4"),
        (RewardItem(index=-1, value=1), "rewards[0].index", "0<=index<4"),
        (RewardItem(index=1, value=1), "rewards[0].index", None),
        (RewardItem(index=0), "rewards[0]", None),
        (RewardItem(index=0, value=1, turn_values=[1]), "rewards[0]", None),
        (RewardItem(index=0, value=math.inf), "rewards[0].value", None),
        (RewardItem(index=0, value=math.nan), "rewards[0].value", None),
        (RewardItem(index=2, turn_values=[1, math.nan]), "rewards[0].turn_values", None),
        (RewardItem(index=2, turn_values=[None, None]), "rewards[0].turn_values", None),
        (RewardItem(index=2, turn_values=[]), "rewards[0].turn_values", None),
        (RewardItem(index=2, turn_values=[1] * 4), "rewards[0].turn_values", "turns=3"),
        (RewardItem(index=0, turn_values=[1, 1]), "rewards[0].turn_values", "turns=1"),
        (RewardItem(index=0, value=1, name="a b"), "rewards[0].name", "[A-Za-z0-9][A-Za-z0-9_-]{0,62}"),
        (RewardItem(index=0, value=1, kind=""), "rewards[0].kind", "[A-Za-z0-9][A-Za-z0-9_-]{0,62}"),
        (RewardItem(index=0, value=1, detail="x" * 9), "rewards[0].detail", "1-8 characters"),
    ],
)
def test_refusals_name_field_and_limit(item: RewardItem, field: str, limit: str | None) -> None:
    with pytest.raises(RollgridError) as refused:
        checked(item)
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert refused.value.http_status == 400


def test_a_sample_without_a_token_says_how_it_ended() -> None:
    with pytest.raises(RollgridError, match="sample 1 failed without a token"):
        checked(RewardItem(index=1, value=0))


def test_one_post_says_one_thing_per_sample_and_name() -> None:
    with pytest.raises(RollgridError, match="one index and name"):
        checked(RewardItem(index=0, value=0), RewardItem(index=0, name="reward", value=1))
    with pytest.raises(RollgridError, match="empty"):
        checked()
    with pytest.raises(RollgridError) as refused:
        checked(*(RewardItem(index=0, name=f"n{i}", value=0) for i in range(5)))
    assert (refused.value.code, refused.value.limit) == (ErrorCode.LIMIT_EXCEEDED, "max_rewards=4")


@given(st.integers(-2, 5), st.none() | st.floats(), st.none() | st.lists(st.none() | st.floats(), max_size=5))
def test_what_is_taken_is_finite_and_lies_on_tokens(
    index: int, value: float | None, turn_values: list[float | None] | None
) -> None:
    try:
        (found,) = checked(RewardItem(index=index, value=value, turn_values=turn_values))
    except RollgridError:
        return
    numbers = [number for number in (found.value, *found.turn_values) if number is not None]
    assert numbers
    assert all(map(math.isfinite, numbers))
    assert len(ENTRIES[found.index].sample.token_ids)
    assert len(found.turn_values) <= max(1, len(ENTRIES[found.index].turns))
