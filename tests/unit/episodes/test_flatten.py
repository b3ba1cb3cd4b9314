"""A32, C36: a closed session as paths: exact concatenations, masks in step, each sampled token trained once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import MAIN_BRANCH, TurnNode
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.trajectories import Entry
from rollgrid_episodes import EpisodePath, Tree, paths
from rollgrid_episodes.node import place_of

from .sessions_played import Played, finished, folded, forked, played, sample, turn


def entry_of(world: Played, **more: object) -> tuple[Tree, Entry]:
    tree = Tree()
    for seq, event in world.events:
        tree.apply(seq, event)
    turns = [node.sample for node in tree.nodes.values()]
    lost = [sample(lost.turn, TurnNode(parent=lost.parent), [9], status=lost.status) for lost in tree.lost.values()]
    return tree, msgspec.convert(
        {
            "sample": sample(0, TurnNode(), []),
            "session": "s1",
            "turns": sorted([*turns, *lost], key=lambda one: one.turn),
            **more,
        },
        Entry,
        from_attributes=True,
    )


def entry(*turns: Sample, **more: object) -> Entry:
    return Entry(sample=turns[-1], turns=turns, **more)  # type: ignore[arg-type]


def train_mask(path: EpisodePath) -> list[int]:
    return list(path.train_mask)


@given(played(), st.data())
def test_a32_every_leaf_is_a_path_that_repeats_the_tree_token_for_token(world: Played, data: st.DataObject) -> None:
    numbers = sorted(world.winners)
    values = data.draw(st.dictionaries(st.sampled_from(numbers), st.floats(-4, 4, width=32))) if numbers else {}
    reward = data.draw(st.none() | st.floats(-4, 4, width=32))
    tree, closed = entry_of(world, reward=reward, turn_rewards=values)
    found = paths(closed)
    assert tuple(path.turns[-1] for path in found) == tree.leaves()
    for path in found:
        leaf = path.turns[-1]
        assert path.turns == tuple(node.turn for node in tree.path(leaf))
        assert path.branch == tree.nodes[leaf].node.branch
        assert [*path.prompt_ids, *path.completion_ids] == tree.token_ids(leaf).tolist()
        assert bytes(len(path.prompt_ids)) + path.mask == tree.mask(leaf)
        check_arrays(path, tree, values, reward)


def check_arrays(path: EpisodePath, tree: Tree, values: dict[int, float], reward: float | None) -> None:
    logprobs, rewards = path.logprobs.tolist(), path.rewards.tolist()
    assert len(path.completion_ids) == len(path.mask) == len(logprobs) == len(path.versions) == len(rewards)
    expected = [0.0] * len(path.mask)
    for span in path.spans:
        made = tree.nodes[span.turn].sample
        assert path.completion_ids.tolist()[span.start : span.end] == made.token_ids.tolist()
        assert logprobs[span.start : span.end] == made.logprobs.tolist()
        versions = [s.version for s in made.version_spans for _ in range(s.end - s.start)]
        assert list(path.versions[span.start : span.end]) == versions
        if span.end > span.start:
            expected[span.end - 1] = values.get(span.turn, 0.0)
    observed = [i for i, bit in enumerate(path.mask) if not bit]
    assert all(logprobs[i] == 0.0 and path.versions[i] == -1 for i in observed)
    sampled = [i for i, bit in enumerate(path.mask) if bit]
    assert len(sampled) == sum(span.end - span.start for span in path.spans)
    if sampled and reward is not None:
        expected[sampled[-1]] += reward
    assert rewards == Floats.of(expected).tolist()
    assert path.reward == reward


@given(played())
def test_a32_each_sampled_token_is_trained_in_exactly_one_path(world: Played) -> None:
    tree, closed = entry_of(world)
    found = paths(closed)
    first = [span.turn for path in found for span in path.spans if span.first]
    assert sorted(first) == sorted(tree.nodes)
    assert sum(sum(path.train_mask) for path in found) == sum(len(n.sample.token_ids) for n in tree.nodes.values())
    for at, path in enumerate(found):
        earlier = {number for before in found[:at] for number in before.turns}
        assert all(span.first == (span.turn not in earlier) for span in path.spans)
        assert all(bit <= kept for bit, kept in zip(path.train_mask, path.mask, strict=True))


def test_rewards_stand_at_the_last_token_of_their_turn_and_the_path() -> None:
    closed = entry(turn(0), turn(1, 0), turn(2, 0, "left"), reward=1.0, turn_rewards={0: 0.25, 2: 0.5, 9: 7.0})
    main, left = paths(closed)
    assert main.rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 0, 1.0]
    assert left.rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 0, 1.5]
    assert (list(main.mask), train_mask(main)) == ([1, 1, 1, 0, 0, 1, 1, 1],) * 2
    assert train_mask(left) == [0, 0, 0, 0, 0, 1, 1, 1]
    assert main.prompt_ids == TokenIds.of([1000, 2000])
    assert (main.branch, left.branch) == (MAIN_BRANCH, "left")


def test_a_missing_reward_stays_none() -> None:
    (path,) = paths(entry(turn(0)))
    assert path.reward is None
    assert path.rewards.tolist() == [0.0] * 3


def test_what_closes_a_cut_off_turn_is_observed() -> None:
    cut_off = turn(0)
    node = TurnNode(parent=0, observation=TokenIds.of([2, 201, 7]), closing=1)
    (path,) = paths(entry(cut_off, sample(1, node, [5, 6])))
    assert path.completion_ids.tolist() == [0, 1, 2, 2, 201, 7, 5, 6]
    assert list(path.mask) == [1, 1, 1, 0, 0, 0, 1, 1]


def test_a_sample_without_turns_is_one_path_behind_its_groups_prompt() -> None:
    alone = sample(0, TurnNode(), [7, 8])
    (path,) = paths(Entry(sample=alone, reward=0.5), TokenIds.of([1, 2]))
    assert (path.prompt_ids.tolist(), path.completion_ids.tolist()) == ([1, 2], [7, 8])
    assert (list(path.mask), path.rewards.tolist()) == ([1, 1], [0.0, 0.5])
    assert paths(Entry(sample=msgspec.structs.replace(alone, status=SampleStatus.FAILED))) == ()


def test_turns_that_were_lost_are_in_no_path() -> None:
    (path,) = paths(entry(turn(0), turn(1, 0, status=SampleStatus.FAILED)))
    assert path.turns == (0,)


@pytest.mark.parametrize("broken", [{"logprobs": Floats.of([0.0])}, {"version_spans": ()}])
def test_arrays_that_do_not_fit_the_ids_are_an_error_that_names_the_turn(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="turn 3"):
        paths(entry(turn(3, **broken)))


def test_a32_two_hundred_and_fifty_six_leaves_carry_their_turns_rewards() -> None:
    turns, level, number = [turn(0)], [0], 1
    for _ in range(4):
        grown = []
        for parent in level:
            for at in range(4):
                turns.append(turn(number, parent, f"b{at}"))
                grown.append(number)
                number += 1
        level = grown
    values = {one.turn: one.turn / 8 for one in turns}
    found = paths(entry(*turns, turn_rewards=values))
    assert len(found) == 256
    assert sum(sum(path.train_mask) for path in found) == 3 * len(turns)
    for path in found:
        rewards = path.rewards.tolist()
        assert [rewards[span.end - 1] for span in path.spans] == [values[number] for number in path.turns]
        assert sum(rewards) == sum(values[number] for number in path.turns)


def test_paths_of_a_folded_tree_follow_its_branches() -> None:
    tree = folded(finished(turn(0)), forked("left", 0), finished(turn(1, 0, "left")), finished(turn(2, 1, "left")))
    (path,) = paths(entry(*(node.sample for node in tree.nodes.values())))
    assert [span.branch for span in path.spans] == [MAIN_BRANCH, "left", "left"]
    assert all(place_of(node.sample) == node.node for node in tree.nodes.values())
