"""A50: a history is matched on what was returned; whatever differs to a reader's eye is never taken for the same."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import MAIN_BRANCH, TurnNode
from rollgrid_contracts.samples import Parsed
from rollgrid_episodes import Tree, answer_of, match, match_ids

from .sessions_played import Played, finished, folded, forked, played, sample, turn, user

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, 3.5], "c": null}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "4"}


def conversation() -> Tree:
    """A turn that thought and called, one that answered."""
    first = sample(
        0,
        TurnNode(messages=({"role": "system", "content": "be"}, user("1+3?")), observation=TokenIds.of([1])),
        [2],
        parsed=Parsed(reasoning="I add", tool_calls=(CALL,)),
    )
    second = sample(1, TurnNode(parent=0, messages=(TOOL,), observation=TokenIds.of([3])), [4], text="It is 4.")
    return folded(finished(first), finished(second))


def sent(tree: Tree, *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [copy.deepcopy(message) for message in tree.messages(tree.branches[MAIN_BRANCH].head)] + list(more)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: None, id="as returned"),
        pytest.param(lambda m: m[2].pop("reasoning"), id="reasoning left out"),
        pytest.param(lambda m: m[2].update(reasoning_content=m[2].pop("reasoning")), id="reasoning by its other name"),
        pytest.param(lambda m: m[2].update(reasoning_content="I add"), id="reasoning by both names"),
        pytest.param(lambda m: m[2].update(reasoning=None), id="reasoning null"),
        pytest.param(lambda m: m[2].update(content=""), id="no content: empty"),
        pytest.param(lambda m: m[2].update(content=[]), id="no content: no parts"),
        pytest.param(lambda m: m[2].pop("content"), id="no content: absent"),
        pytest.param(lambda m: m[4].update(content=[{"type": "text", "text": "It is 4."}]), id="content as a part"),
        pytest.param(lambda m: m[1].update(content=[{"type": "text", "text": "1+3?"}]), id="question as a part"),
        pytest.param(lambda m: m[4].update(refusal=None, audio=None, tool_calls=None, annotations=[]), id="nulls"),
        pytest.param(
            lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"c":null,"b":[2.0,3.5],"a":1}'),
            id="arguments in another order",
        ),
        pytest.param(
            lambda m: m[2]["tool_calls"][0]["function"].update(arguments={"a": 1, "b": [2, 3.5], "c": None}),
            id="arguments as an object",
        ),
        pytest.param(lambda m: m[2]["tool_calls"][0].update(index=0), id="the index of a streamed call"),
    ],
)
def test_what_readers_see_the_same_is_no_edit(change: Any) -> None:
    tree = conversation()
    messages = sent(tree, user("thanks"))
    change(messages)
    assert match(tree, MAIN_BRANCH, messages) == (1, (user("thanks"),), None)


@pytest.mark.parametrize(
    ("change", "turn_found", "where"),
    [
        pytest.param(lambda m: m[4].update(content="It is 4"), 0, "messages[4] differs from the answer of turn 1", id="answer"),
        pytest.param(lambda m: m[4].update(content="It is 4. "), 0, "messages[4] differs", id="a space"),
        pytest.param(lambda m: m[4].update(refusal="no"), 0, "messages[4] differs", id="a refusal"),
        pytest.param(lambda m: m[3].update(content="5"), 0, "messages[3] differs from a message of turn 1", id="tool"),
        pytest.param(lambda m: m[3].update(tool_call_id="c2"), 0, "messages[3] differs", id="whose result"),
        pytest.param(lambda m: m[2].update(reasoning="I guess"), None, "messages[2] differs", id="other reasoning"),
        pytest.param(lambda m: m[2].update(content="hm"), None, "messages[2] differs", id="words beside a call"),
        pytest.param(lambda m: m[2].pop("tool_calls"), None, "messages[2] differs", id="no call"),
        pytest.param(lambda m: m[2]["tool_calls"].append(CALL), None, "messages[2] differs", id="one call more"),
        pytest.param(lambda m: m[2]["tool_calls"][0].update(id="c9"), None, "messages[2] differs", id="id of a call"),
        pytest.param(lambda m: m[2]["tool_calls"][0].pop("id"), None, "messages[2] differs", id="no id"),
        pytest.param(
            lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"a": true, "b": [2, 3.5], "c": null}'),
            None, "messages[2] differs", id="true is not 1",
        ),
        pytest.param(
            lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"a": "1", "b": [2, 3.5], "c": null}'),
            None, "messages[2] differs", id="a string is no number",
        ),
        pytest.param(
            lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"a": 1, "b": [2, 3.5]'),
            None, "messages[2] differs", id="no JSON",
        ),
        pytest.param(lambda m: m[0].update(content="Be"), None, "messages[0] differs from a message of turn 0", id="system"),
        pytest.param(lambda m: m[1].update(name="bob"), None, "messages[1] differs", id="a name"),
        pytest.param(lambda m: m[1].update(role="developer"), None, "messages[1] differs", id="a role"),
        pytest.param(lambda m: m.pop(0), None, "messages[0] differs", id="a message less"),
        pytest.param(lambda m: m.insert(1, user("")), None, "messages[1] differs", id="a message more"),
    ],
)  # fmt: skip
def test_what_readers_see_changed_is_an_edit_and_says_where(change: Any, turn_found: int | None, where: str) -> None:
    tree = conversation()
    messages = sent(tree, user("thanks"))
    change(messages)
    found = match(tree, MAIN_BRANCH, messages)
    assert found.turn == turn_found
    assert found.edited is not None
    assert found.edited.startswith(where)
    kept = 0 if turn_found is None else len(tree.messages(turn_found))
    assert found.new_messages == tuple(messages[kept:])


def test_the_same_question_again_goes_on_from_before_its_answer() -> None:
    tree = conversation()
    found = match(tree, MAIN_BRANCH, sent(tree)[:4])
    assert found == (0, (TOOL,), "messages end before the answer of turn 1")
    assert match(tree, MAIN_BRANCH, sent(tree)) == (1, (), None)


def test_a_history_of_another_branch_goes_on_there_and_says_so() -> None:
    tree = folded(finished(turn(0)), forked("left", 0), finished(turn(1, 0)), finished(turn(2, 0, "left")))
    on_main = (*tree.messages(1), user("more"))
    assert match(tree, MAIN_BRANCH, on_main) == (1, (user("more"),), None)
    found = match(tree, "left", on_main)
    assert (found.turn, found.new_messages) == (1, (user("more"),))
    assert found.edited == "messages[2] differs from a message of turn 2"
    both = folded(finished(turn(0)), finished(turn(1, 0)), forked("left", 0))
    assert match(both, "left", both.messages(1)).edited == "another branch goes on behind turn 0"


def test_of_turns_that_read_alike_the_head_of_the_branch_is_meant() -> None:
    alike = {"text": "same"}
    twins = [sample(i, TurnNode(parent=0, branch=b, messages=(user("q"),)), [i], **alike)
             for i, b in ((1, MAIN_BRANCH), (2, "left"), (3, MAIN_BRANCH))]  # fmt: skip
    tree = folded(finished(turn(0)), forked("left", 0), *map(finished, twins))
    messages = tree.messages(1)
    assert match(tree, MAIN_BRANCH, messages).turn == 3
    assert match(tree, "left", messages).turn == 2
    assert match(tree, "left", messages).edited is None


def test_an_empty_tree_takes_everything_at_its_root() -> None:
    assert match(folded(), MAIN_BRANCH, [user("hi")]) == (None, (user("hi"),), None)
    with pytest.raises(KeyError):
        match(folded(), "nowhere", [user("hi")])


def test_a_turn_given_as_ids_is_never_matched_by_messages() -> None:
    """Its observation says things that no message shows."""
    tree = folded(finished(sample(0, TurnNode(observation=TokenIds.of([1, 2])), [3], text="x")))
    found = match(tree, MAIN_BRANCH, [{"role": "assistant", "content": "x"}, user("hi")])
    assert found.turn is None
    assert found.edited == "turn 0 was given as token ids: no messages are known of it"


def test_ids_go_on_behind_the_deepest_turn_they_begin_with() -> None:
    tree = folded(finished(turn(0)), finished(turn(1, 0)), forked("left", 0))
    ids = tree.token_ids(1).tolist()
    assert match_ids(tree, MAIN_BRANCH, TokenIds.of([*ids, 5])) == (1, TokenIds.of([5]), None)
    assert match_ids(tree, MAIN_BRANCH, TokenIds.of([*ids[:-1], 6])) == (
        0, TokenIds.of([*ids[5:-1], 6]), "ids differ from those of turn 1 from position 9 on",
    )  # fmt: skip
    assert match_ids(tree, MAIN_BRANCH, TokenIds.of([256 + ids[0]])).turn is None
    assert match_ids(tree, "left", TokenIds.of([*ids[:5], 7])) == (0, TokenIds.of([7]), None)


@given(played(), st.data())
def test_ids_of_any_node_lead_to_a_node_with_just_these_ids(world: Played, data: st.DataObject) -> None:
    tree = Tree()
    for seq, event in world.events:
        tree.apply(seq, event)
    branch = data.draw(st.sampled_from(sorted(tree.branches)))
    start = data.draw(st.sampled_from([None, *tree.nodes]))
    more = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
    given_ids = TokenIds.of([*tree.token_ids(start), *more])
    found = match_ids(tree, branch, given_ids)
    assert [*tree.token_ids(found.turn), *found.new_ids] == given_ids.tolist()
    assert len(tree.token_ids(found.turn)) >= len(tree.token_ids(start))
    assert (found.edited is None) == (found.turn == tree.branches[branch].head)


# -- random edits -----------------------------------------------------------------------------


def eye(message: dict[str, Any]) -> object:
    """What a person reads in a message, by other means than the code under test."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    calls = [
        (call.get("id"), call["function"]["name"], readable(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], content, calls, message.get("tool_call_id"), message.get("name")


def readable(arguments: Any) -> str:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return repr(sorted((name, type(item).__name__, item) for name, item in value.items()))


def _retype(message: dict[str, Any], draw: st.DrawFn) -> None:
    message["content"] = draw(
        st.sampled_from([None, "", "a", "a ", "b", "<|im_end|>", "seen", [{"type": "text", "text": "a"}]])
    )


def _reargue(message: dict[str, Any], draw: st.DrawFn) -> None:
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = draw(
            st.sampled_from(['{"x":1}', '{"x": 1 }', '{"x":2}', '{"x":"1"}', '{"x":true}'])
        )
        call["id"] = draw(st.sampled_from(["c1", "c2"]))


def _rethink(message: dict[str, Any], draw: st.DrawFn) -> None:
    if message["role"] == "assistant":
        message["reasoning"] = draw(st.sampled_from([None, "why", "because"]))


def _rename(message: dict[str, Any], draw: st.DrawFn) -> None:
    message["role"] = draw(st.sampled_from(["user", "system", "assistant"]))


@st.composite
def edited(draw: st.DrawFn, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = copy.deepcopy(messages)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["change", "drop", "add", "swap"]))
        at = draw(st.integers(0, max(0, len(found) - 1)))
        if kind == "add":
            found.insert(at, draw(st.sampled_from([user("a"), user(""), {"role": "assistant", "content": "a"}])))
        elif found and kind == "drop":
            found.pop(at)
        elif found and kind == "swap":
            found[0], found[at] = found[at], found[0]
        elif found:
            draw(st.sampled_from([_retype, _reargue, _rethink, _rename]))(found[at], draw)
    return found


@given(played(most=8), st.data())
def test_a50_whatever_is_edited_no_match_hides_a_visible_difference(world: Played, data: st.DataObject) -> None:
    tree = Tree()
    for seq, event in world.events:
        tree.apply(seq, event)
    branch = data.draw(st.sampled_from(sorted(tree.branches)))
    start = data.draw(st.sampled_from([None, *tree.nodes]))
    messages = data.draw(edited([dict(message) for message in tree.messages(start)]))
    found = match(tree, branch, messages)
    kept = tree.messages(found.turn)
    assert [eye(one) for one in messages[: len(kept)]] == [eye(dict(one)) for one in kept]
    assert found.new_messages == tuple(messages[len(kept) :])
    assert (found.edited is None) == (found.turn == tree.branches[branch].head)
    for given_message, returned in zip(messages, kept, strict=False):
        if given_message.get("reasoning"):
            assert given_message["reasoning"] == returned.get("reasoning")


@given(played(most=8), st.data())
def test_a50_an_unedited_history_always_goes_on_where_it_ended(world: Played, data: st.DataObject) -> None:
    tree = Tree()
    for seq, event in world.events:
        tree.apply(seq, event)
    for name, branch in tree.branches.items():
        found = match(tree, name, [*tree.messages(branch.head), user("the next, never asked before")])
        assert found.edited is None
        assert found.turn == branch.head
    assert all(answer_of(node.sample)["role"] == "assistant" for node in tree.nodes.values())
