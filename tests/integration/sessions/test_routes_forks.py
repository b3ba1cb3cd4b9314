"""Where a turn does not go on behind the last one: edits, forks, turns at once (A32)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.stack import Stack
from tests.support.waiting import wait_until

from .door import TOOLS, Session, Turn, code_of, open_session

SLOW: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def play(session: Session, turns: int) -> tuple[list[Any], list[Turn]]:
    """The conversation, the last answer included, and its turns."""
    messages: list[Any] = []
    played: list[Turn] = []
    for number in range(turns):
        messages.append(user(f"question {number}"))
        played.append(session.chat(messages))
        messages.append(played[-1].message)
    return messages, played


def test_an_edited_history_forks_behind_what_was_not_edited(pipe: Stack) -> None:
    session = open_session(pipe)
    messages, played = play(session, 3)
    edited = [*messages[:3], {"role": "assistant", "content": "something else"}, user("and now?")]
    turn = session.chat(edited)
    assert (turn.place["parent"], turn.fork, turn.place["branch"]) == (0, "edited_history", "main")
    assert "messages[3]" in turn.place["fork_detail"]
    so_far = played[0].prompt + played[0].tokens
    assert turn.prompt[: len(so_far)] == so_far, "what was not edited keeps its ids"
    goes_on = session.chat([*edited, turn.message, user("go on")])
    assert (goes_on.place["parent"], goes_on.fork) == (turn.number, None), "the branch goes on with the edit"
    again = session.chat([*messages, user("back")])
    assert (again.place["parent"], again.fork) == (2, "edited_history"), "and back on the first path, by its own ids"


def test_an_answer_asked_for_again_forks_behind_its_parent(pipe: Stack) -> None:
    session = open_session(pipe)
    messages, played = play(session, 2)
    again = session.chat(messages[:-1])
    assert (again.place["parent"], again.fork) == (0, "edited_history")
    assert again.prompt == played[1].prompt


def test_other_tools_begin_anew_and_say_so(pipe: Stack) -> None:
    session = open_session(pipe)
    messages, _ = play(session, 1)
    turn = session.chat([*messages, user("add")], tools=TOOLS, tool_choice="none")
    assert (turn.place["parent"], turn.fork) == (None, "edited_history")
    assert "tools" in turn.place["fork_detail"]


def test_nothing_new_is_refused(pipe: Stack) -> None:
    session = open_session(pipe)
    messages, _ = play(session, 1)
    with pytest.raises(openai.BadRequestError, match="nothing follows it"):
        session.chat(messages)


def test_a_turn_beside_another_of_its_branch_is_refused_where_asked(pipe: Stack) -> None:
    session = open_session(pipe)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(session.chat, [user("slow")], **SLOW)
        wait_until(lambda: bool(session.state()["open_turns"]), 20, "the first turn is under way")
        with pytest.raises(openai.ConflictError) as busy:
            session.chat([user("at once")])
        assert busy.value.code == "session_busy"
        refused = session.http.post(f"/v1/sessions/{session.id}/close", json={})
        assert code_of(refused)[:2] == (409, "session_busy"), "a close would lose the turn under way"
        assert int(refused.headers["retry-after"]) >= 1
        assert first.result().fork is None
    assert session.state()["turns"] == 1


def test_a_turn_beside_another_of_its_branch_forks_where_asked(pipe: Stack) -> None:
    session = open_session(pipe, on_concurrent_turn="fork")
    messages, played = play(session, 1)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(session.chat, [*messages, user("slow")], **SLOW)
        wait_until(lambda: bool(session.state()["open_turns"]), 20, "the first turn is under way")
        second = session.chat([*messages, user("at once")])
        assert first.result().place["branch"] == "main"
    assert second.fork == "concurrent_turn"
    assert second.place["branch"] != "main"
    assert second.place["parent"] == played[0].number
    base = f"/s/{session.id}~{second.place['branch']}/v1"
    third = session.chat([*messages, user("at once"), second.message, user("more")], base)
    assert (third.place["parent"], third.fork) == (second.number, None)


def test_a_fork_behind_any_turn_has_a_base_url_of_its_own(pipe: Stack) -> None:
    session = open_session(pipe)
    messages, played = play(session, 2)
    fork = session.fork(from_turn=0, reason="retry", detail="once more", metadata={"try": 2})
    turn = session.chat([*messages[:2], user("question 1")], fork["base_path"])
    assert (turn.place["branch"], turn.place["parent"], turn.fork) == (fork["branch"], 0, None)
    assert turn.prompt == played[1].prompt, "the same question behind the same turn is the same prompt"
    root = session.fork(**{"from": None, "reason": "explore"})
    assert session.chat([user("anew")], root["base_path"]).place["parent"] is None
    head = session.fork()
    assert head["parent"] == played[1].number, "without a turn: behind the last one"
    branches = {one["branch"]: one for one in session.state()["branches"]}
    assert branches[fork["branch"]]["reason"] == "retry"
    assert branches[fork["branch"]]["metadata"] == {"try": 2}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"from_turn": 9}, "from_turn"),
        ({"reason": "edited_history"}, "reason"),
        ({"reason": "whim"}, "reason"),
        ({"name": "a.b"}, "name"),
        ({"from": 0, "from_turn": 1}, "from"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_by_field(pipe: Stack, body: dict[str, Any], field: str) -> None:
    session = open_session(pipe)
    refused = session.http.post(f"/v1/sessions/{session.id}/fork", json=body)
    assert code_of(refused) == (400, "invalid_request", field)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tree_of_depth_and_width_four_has_256_leaves_and_stores_prefixes_once(pipe: Stack) -> None:
    """A32: by token ids, four branches behind each turn of a level; every leaf is one path of the record."""
    session = open_session(pipe)
    options = {"max_tokens": 3, "ignore_eos": True}

    def sample(base_path: str, new: list[int]) -> int:
        client = session.openai(base_path)
        more = {"observation_token_ids": new, **options}
        answer = client.completions.create(model="tiny", prompt="", extra_body=more).model_dump()
        return int(answer["session"]["turn"])

    def children(parent: int | None, level: int) -> list[int]:
        turns = []
        for width in range(4):
            fork = session.fork(from_turn=parent, reason="best_of_n")
            turns.append(sample(fork["base_path"], [10 + level, 20 + width]))
        return turns

    parents: list[int | None] = [None]
    with ThreadPoolExecutor(8) as pool:
        for level in range(4):
            found = list(pool.map(lambda parent, level=level: children(parent, level), parents))
            parents = [turn for turns in found for turn in turns]
    state = session.state(token_ids=True)
    assert (state["turns"], state["depth"], len(state["leaves"])) == (4 + 16 + 64 + 256, 4, 256)
    assert state["tokens"] == state["turns"] * 5, "two observed and three sampled ids per turn, shared ones once"
    nodes = {node["turn"]: node for node in state["nodes"]}
    assert {node["prompt_tokens"] for node in nodes.values()} == {2, 7, 12, 17}
    rewards = {str(leaf): float(leaf % 7) for leaf in state["leaves"]}
    session.close(turn_rewards=rewards, leaf=state["leaves"][0])
    (entry,) = session.closed_group()["entries"]
    assert len(entry["turns"]) == 340
    assert {int(turn): value for turn, value in entry["turn_rewards"].items()} == {
        int(turn): value for turn, value in rewards.items()
    }
    recorded = {turn.get("turn", 0): turn for turn in entry["turns"]}
    assert {turn: one["token_ids"] for turn, one in recorded.items()} == {
        turn: node["token_ids"] for turn, node in nodes.items()
    }
