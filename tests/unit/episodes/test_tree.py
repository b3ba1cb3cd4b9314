"""A32, I6: a session's tree is the fold of its events, the same for whoever folds them, and how often."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.codec import decode, encode
from rollgrid_contracts.episodes import MAIN_BRANCH, ForkReason, TurnNode
from rollgrid_contracts.samples import FinishReason, Parsed, SampleStatus
from rollgrid_episodes import Branch, Lost, Node, Tree, answer_of
from rollgrid_episodes.node import place_of

from .sessions_played import Played, ended, finished, folded, forked, opened, played, sample, turn, user


def state(tree: Tree) -> object:
    return (
        tree.opened, tree.ended, tree.nodes, tree.lost, tree.forks, tree.branches, tree.children,
        tree.events_to, tree.tokens, tree.depth, tree.next_turn, tree.leaves(),
    )  # fmt: skip


def fold(world: Played) -> Tree:
    tree = Tree()
    for seq, event in world.events:
        tree.apply(seq, event)
    return tree


@given(played())
def test_a32_nodes_are_the_first_finishes_in_stream_order_and_paths_their_concatenation(world: Played) -> None:
    tree = fold(world)
    assert {number: node.sample for number, node in tree.nodes.items()} == world.winners
    assert set(tree.lost) == world.lost
    assert {name: branch.head for name, branch in tree.branches.items()} == world.branches
    assert tree.next_turn == len(world.winners) + len(world.lost)
    for number in tree.nodes:
        ids: list[int] = []
        mask: list[int] = []
        messages: list[object] = []
        walk: int | None = number
        while walk is not None:  # from the leaf up, as the fold does not go
            made = world.winners[walk]
            place = place_of(made)
            ids = [*place.observation, *made.token_ids, *ids]
            mask = [0] * len(place.observation) + [1] * len(made.token_ids) + mask
            messages = [*place.messages, answer_of(made), *messages]
            walk = place.parent
        assert tree.token_ids(number).tolist() == ids
        assert list(tree.mask(number)) == mask
        assert list(tree.messages(number)) == messages
    parents = {place_of(made).parent for made in world.winners.values()}
    assert set(tree.leaves()) == set(world.winners) - parents
    assert tree.depth == max((len(tree.path(leaf)) for leaf in tree.leaves()), default=0)
    assert tree.tokens == sum(len(place_of(s).observation) + len(s.token_ids) for s in world.winners.values())


@given(played(), st.data())
def test_i6_replays_change_nothing_and_answer_the_same(world: Played, data: st.DataObject) -> None:
    tree = Tree()
    answers: dict[int, str | None] = {}
    for at, (seq, event) in enumerate(world.events):
        answers[seq] = tree.apply(seq, event)
        before = state(tree)
        again = data.draw(st.integers(0, at))
        old_seq, old = world.events[again]
        repeated = tree.apply(old_seq, old)
        assert (repeated is None) == (answers[old_seq] is None)
        assert state(tree) == before


@given(played(), st.data())
def test_i6_a_tree_restored_from_its_pieces_in_any_order_goes_on_the_same(world: Played, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(world.events)))
    tree = Tree()
    for seq, event in world.events[:cut]:
        tree.apply(seq, event)
    kept = [decode(encode(node), Node) for node in tree.nodes.values()]
    restored = Tree.restore(
        opened=tree.opened,
        forks=data.draw(st.permutations(list(tree.forks.values()))),
        nodes=data.draw(st.permutations(kept)),
        ended=tree.ended,
        lost=[decode(encode(lost), Lost) for lost in tree.lost.values()],
        events_to=tree.events_to,
    )
    assert state(restored) == state(tree)
    for seq, event in world.events[cut:]:
        assert restored.apply(seq, event) == tree.apply(seq, event)
    assert state(restored) == state(tree)


@given(st.data())
def test_branches_end_in_any_order(data: st.DataObject) -> None:
    """Each branch's turns are in order; whose turn ends first does not matter."""
    forks = [forked("left", 0), forked("right", 0)]
    lines = {name: [turn(3 * i + at, 0 if i == 0 else 3 * (i - 1) + at, name) for i in range(1, 4)]
             for at, name in enumerate([MAIN_BRANCH, "left", "right"])}  # fmt: skip
    lines = {
        name: [
            msgspec.structs.replace(
                one, node=msgspec.structs.replace(place_of(one), parent=line[i - 1].turn if i else 0)
            )
            for i, one in enumerate(line)
        ]
        for name, line in lines.items()
    }
    order = data.draw(st.permutations([name for name, line in lines.items() for _ in line]))
    tree, plain = folded(finished(turn(0)), *forks), folded(finished(turn(0)), *forks)
    left = {name: list(line) for name, line in lines.items()}
    for seq, name in enumerate(order, start=100):
        assert tree.apply(seq, finished(left[name].pop(0))) is None
    for seq, one in enumerate((one for line in lines.values() for one in line), start=100):
        assert plain.apply(seq, finished(one)) is None
    assert {n: node.sample for n, node in tree.nodes.items()} == {n: node.sample for n, node in plain.nodes.items()}
    assert (tree.branches, tree.leaves(), tree.children) == (plain.branches, plain.leaves(), plain.children)


def test_i6_the_first_finish_of_a_turn_in_the_stream_counts_whichever_job_it_is_of() -> None:
    tree = folded(forked("left", None), forked("right", None))
    assert tree.apply(11, finished(turn(1, branch="right"), job_seq=60)) is None
    assert tree.next_turn == 2
    assert tree.apply(12, finished(turn(0, branch="left"), job_seq=50)) is None
    assert tree.apply(13, finished(turn(0, branch="left"), job_seq=70)) == "duplicate"
    assert tree.apply(14, finished(turn(1, branch="right"), job_seq=40)) == "duplicate"
    assert {number: node.seq for number, node in tree.nodes.items()} == {0: 12, 1: 11}


def test_events_of_others_and_events_out_of_place_are_superseded_each_with_its_reason() -> None:
    tree = Tree()
    assert tree.apply(1, finished(turn(0))) == "session is not open"
    assert tree.apply(2, opened()) is None
    assert tree.apply(3, opened()) is None, "a copy of the opening changes nothing"
    assert tree.apply(4, opened(ttl_s=1.0)) == "duplicate"
    assert tree.apply(5, finished(turn(0), session="other")) == "not of this session"
    assert tree.apply(6, finished(turn(0), group="other")) == "not of this session"
    assert tree.apply(7, finished(msgspec.structs.replace(turn(0), index=1))) == "not of this session"
    assert tree.apply(8, finished(turn(0, parent=7))) == "parent is no node"
    assert tree.apply(9, finished(turn(0, branch="nowhere"))) == "branch is unknown"
    assert tree.apply(10, forked("left", 5)) == "parent is no node"
    assert tree.apply(11, forked(MAIN_BRANCH, None)) == "duplicate"
    assert tree.apply(12, finished(turn(0))) is None
    assert tree.apply(13, forked("left", 0)) is None
    assert tree.apply(14, forked("left", 0, detail="again")) == "duplicate"
    assert tree.apply(15, ended(reward=1.0)) is None
    assert tree.apply(16, ended(reward=2.0)) == "session has ended"
    assert tree.apply(17, finished(turn(1, parent=0))) == "session has ended"
    assert tree.apply(18, forked("right", 0)) == "session has ended"
    assert tree.ended is not None
    assert tree.ended.reward == 1.0
    assert (set(tree.nodes), tree.events_to) == ({0}, 18)


def test_only_turns_with_tokens_to_go_on_from_are_nodes() -> None:
    cut_off = turn(0, finish_reason=FinishReason.LENGTH)
    stopped = turn(1, 0, finish_reason=FinishReason.ABORT)
    nothing = sample(2, TurnNode(parent=1), [], finish_reason=FinishReason.ABORT)
    failed = turn(3, 1, status=SampleStatus.FAILED)
    cancelled = turn(4, 1, status=SampleStatus.CANCELLED)
    tree = folded(*map(finished, (cut_off, stopped, nothing, failed, cancelled)))
    assert set(tree.nodes) == {0, 1}
    assert {number: lost.status.value for number, lost in tree.lost.items()} == {
        2: "succeeded", 3: "failed", 4: "cancelled",
    }  # fmt: skip
    assert tree.branches[MAIN_BRANCH].head == 1
    assert tree.next_turn == 5
    assert tree.leaves() == (1,)


def test_a_fork_begins_behind_its_parent_and_moves_with_its_own_turns_only() -> None:
    tree = folded(finished(turn(0)), finished(turn(1, 0)), forked("left", 0), finished(turn(2, 1)))
    assert tree.branches["left"] == Branch(name="left", parent=0, reason=ForkReason.EXPLORE, head=0)
    tree.apply(50, finished(turn(3, 0, "left")))
    assert (tree.branches["left"].head, tree.branches[MAIN_BRANCH].head) == (3, 2)
    assert tree.leaves() == (2, 3)


def test_an_answer_is_the_message_that_the_chat_routes_return() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    spoken = sample(0, TurnNode(), [1], text="plain")
    called = sample(0, TurnNode(), [1], parsed=Parsed(reasoning="hm", tool_calls=(call,)))
    assert answer_of(spoken) == {"role": "assistant", "content": "plain"}
    assert answer_of(called) == {
        "role": "assistant", "content": None, "reasoning": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip


def test_a_finish_without_a_place_of_its_own_takes_that_of_its_job() -> None:
    node = TurnNode(messages=(user("hi"),), observation=TokenIds.of([1]))
    event = finished(turn(4))
    assert event.session is not None
    event = msgspec.structs.replace(
        event,
        session=msgspec.structs.replace(event.session, turn=4, node=node),
        samples=(msgspec.structs.replace(event.samples[0], node=None, turn=0),),
    )
    tree = folded(event)
    assert tree.nodes[4].node == node


def test_a_path_to_what_is_no_node_is_an_error() -> None:
    with pytest.raises(KeyError):
        folded(finished(turn(0))).path(1)
    assert folded().path(None) == ()
    assert folded().token_ids(None) == TokenIds()


def test_a32_depth_four_and_width_four_store_shared_prefixes_once() -> None:
    tree, level, number = folded(finished(turn(0))), [0], 1
    for depth in range(1, 5):
        grown = []
        for parent in level:
            for at in range(4):
                name = f"d{depth}p{parent}c{at}"
                assert tree.apply(2 * number + 100, forked(name, parent)) is None
                assert tree.apply(2 * number + 101, finished(turn(number, parent, name))) is None
                grown.append(number)
                number += 1
        level = grown
    assert len(tree.leaves()) == 256
    assert tree.tokens == 5 * (1 + 4 + 16 + 64 + 256)
    assert tree.depth == 5
    paths = [tree.token_ids(leaf).tolist() for leaf in tree.leaves()]
    assert len({tuple(path) for path in paths}) == 256
    assert all(path[:5] == paths[0][:5] and len(path) == 25 for path in paths)
