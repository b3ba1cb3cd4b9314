"""Episodes played in turns, as arrays: paths, masks, what is trained once, and rewards on their tokens (A32)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rollgrid import Group, group_advantages, to_arrays
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import ForkReason, TurnNode
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, SampleStatus
from rollgrid_contracts.samples import Sample as Record
from rollgrid_contracts.trajectories import Entry

from tests.unit.sdk.build import closed, entry, failed_entry


def turn(
    number: int, parent: int | None, observed: list[int], sampled: list[int], version: int = 3, **place: Any
) -> Record:
    """The k-th logprob of turn t is -(t + 1) - k / 8 (exact in float32)."""
    return Record(
        index=0,
        turn=number,
        status=SampleStatus.SUCCEEDED,
        token_ids=TokenIds.of(sampled),
        logprobs=Floats.of(-(number + 1) - k / 8 for k in range(len(sampled))),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=version, start=0, end=len(sampled)),) if sampled else (),
        node=TurnNode(parent=parent, observation=TokenIds.of(observed), **place),
    )


def episode(*turns: Record, index: int = 0, reward: float | None = 1.0, **more: Any) -> Entry:
    summary = Record(index=index, status=SampleStatus.SUCCEEDED)
    return Entry(sample=summary, reward=reward, turns=turns, session=f"s{index}", **more)


def forked() -> Entry:
    """Turn 0, then two branches: 1 goes on as 2, and 3 stands beside 1."""
    return episode(
        turn(0, None, [1, 2, 3], [10, 11]),
        turn(1, 0, [4], [12], version=4),
        turn(2, 1, [5, 6], [13, 14], version=4),
        turn(3, 0, [7], [15], version=5, branch="b1", fork=ForkReason.EXPLORE),
        turn_rewards={0: 0.5, 3: 0.25},
    )


def test_each_leaf_is_a_row_and_shared_turns_are_trained_once() -> None:
    arrays = to_arrays([Group(closed([forked()], prompt=()))], pad_id=99)

    assert arrays["prompt_ids"].tolist() == [[1, 2, 3], [1, 2, 3]]
    assert arrays["completion_ids"].tolist() == [[10, 11, 4, 12, 5, 6, 13, 14], [10, 11, 7, 15, 99, 99, 99, 99]]
    assert arrays["mask"].astype(int).tolist() == [[1, 1, 0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 0, 0, 0, 0]]
    assert arrays["first"].astype(int).tolist() == [[1, 1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0]]
    assert arrays["valid"].astype(int).tolist() == [[1] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]
    assert arrays["turns"].tolist() == [[0, 0, -1, 1, -1, -1, 2, 2], [0, 0, -1, 3, -1, -1, -1, -1]]
    assert arrays["versions"].tolist() == [[3, 3, -1, 4, -1, -1, 4, 4], [3, 3, -1, 5, -1, -1, -1, -1]]
    assert arrays["logprobs"][0].tolist() == [-1, -1.125, 0, -2, 0, 0, -3, -3.125]
    assert arrays["token_rewards"].tolist() == [[0, 0.5, 0, 0, 0, 0, 0, 1.0], [0, 0.5, 0, 1.25, 0, 0, 0, 0]]
    assert arrays["rewards"].tolist() == [1.0, 1.0]
    assert arrays["sample_index"].tolist() == [0, 0]
    assert arrays["path_index"].tolist() == [0, 1]


def test_turns_and_paths_of_a_sample() -> None:
    sample = Group(closed([forked()], prompt=()), cursor=4).samples[0]
    assert [t.number for t in sample.turns] == [0, 1, 2, 3]
    assert [t.reward for t in sample.turns] == [0.5, None, None, 0.25]
    assert sample.turns[3].node.fork is ForkReason.EXPLORE
    assert sample.turns[2].observation_ids.tolist() == [5, 6]
    assert (sample.turns[3].group_id, sample.turns[3].cursor) == ("g1", 4)
    first, second = sample.paths()
    assert (first.turns, first.branch, second.turns, second.branch) == ((0, 1, 2), "main", (0, 3), "b1")
    assert sample.session == "s0"
    assert not first.completion_ids.flags.writeable


def test_a_single_generation_is_one_path_behind_its_groups_prompt() -> None:
    sample = Group(closed([entry(0, ids=(5, 6, 2))])).samples[0]
    (path,) = sample.paths()
    assert sample.turns == ()
    assert path.prompt_ids.tolist() == [1, 2, 3]
    assert path.completion_ids.tolist() == [5, 6, 2]
    assert path.mask.all()


def test_plain_groups_have_the_plain_keys() -> None:
    assert "first" not in to_arrays([Group(closed([entry(0)]))])


def test_episodes_that_all_failed_before_their_first_turn_have_the_keys_of_episodes() -> None:
    groups = [Group(closed([replace(failed_entry(index), session=f"s{index}") for index in range(2)], prompt=()))]
    arrays = to_arrays(groups)
    assert {"valid", "first", "token_rewards", "turns", "path_index"} <= arrays.keys()
    assert arrays["first"].shape == (2, 0)
    assert to_arrays(groups, keep=lambda _, sample: sample.ok)["first"].shape == (0, 0)


def test_episodes_generations_and_failures_stand_in_one_batch() -> None:
    lost = episode(index=1, reward=None)
    failed = failed_entry(2)
    arrays = to_arrays([Group(closed([forked(), lost, failed], prompt=())), Group(closed([entry(0, ids=(5, 2))]))])
    assert arrays["group_index"].tolist() == [0, 0, 0, 0, 1]
    assert arrays["sample_index"].tolist() == [0, 0, 1, 2, 0]
    assert arrays["mask"].sum(axis=1).tolist() == [5, 3, 0, 0, 2]
    assert [math.isnan(reward) for reward in arrays["rewards"]] == [False, False, True, True, False]
    assert arrays["prompt_ids"][4].tolist() == [1, 2, 3]
    assert arrays["first"][4].tolist()[:3] == [True, True, False]
    assert arrays["token_rewards"][4].tolist()[:3] == [0, 1, 0]


def test_a_sample_counts_once_in_its_groups_baseline_however_many_paths_it_has() -> None:
    rewards, groups, samples = [1.0, 1.0, 1.0, 0.0, 5.0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0]
    advantages = group_advantages(rewards, groups, sample_index=samples, scale=False)
    assert advantages.tolist() == [0.5, 0.5, 0.5, -0.5, 0.0]
    assert group_advantages(rewards, groups, scale=False).tolist() == [0.25, 0.25, 0.25, -0.75, 0.0]


@st.composite
def trees(draw: st.DrawFn) -> Entry:
    turns = []
    for number in range(draw(st.integers(1, 7))):
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        observed = draw(st.lists(st.integers(1, 50), max_size=3))
        sampled = draw(st.lists(st.integers(51, 99), min_size=1, max_size=3))
        turns.append(turn(number, parent, observed, sampled))
    return episode(*turns)


@given(st.lists(trees(), min_size=1, max_size=3))
def test_every_sampled_token_is_trained_exactly_once(entries: list[Entry]) -> None:
    group = Group(closed(entries, prompt=()))
    arrays = to_arrays([group])
    sampled = [(number, t.turn, token) for number, e in enumerate(entries) for t in e.turns for token in t.token_ids]
    rows, places = np.nonzero(arrays["first"])
    owners = np.cumsum(arrays["path_index"] == 0) - 1
    trained = [
        (int(owners[row]), int(arrays["turns"][row, place]), int(arrays["completion_ids"][row, place]))
        for row, place in zip(rows, places, strict=True)
    ]
    assert sorted(trained) == sorted(sampled)
    assert not (arrays["first"] & ~arrays["mask"]).any()
    assert not (arrays["mask"] & ~arrays["valid"]).any()
    assert ((arrays["turns"] >= 0) == arrays["mask"]).all()


def test_logprobs_that_do_not_fit_are_an_error() -> None:
    broken = turn(0, None, [1], [10, 11])
    broken = Record(**{**{f: getattr(broken, f) for f in broken.__struct_fields__}, "logprobs": Floats.of([-1.0])})
    with pytest.raises(ValueError, match="2 ids, 1 logprobs"):
        to_arrays([Group(closed([episode(broken)]))])
