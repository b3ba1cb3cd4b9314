"""Opening and ending: terms, groups, rewards, repeats (A13, A48, I1, I2, I5)."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.stack import Stack
from tests.support.waiting import wait_until

from .door import code_of, http, ok, open_session


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_opening_again_is_the_same_session(pipe: Stack) -> None:
    terms: dict[str, Any] = {"run": "again", "group": "g-1", "n": 2, "index": 1, "metadata": {"level": 3}}
    client = http(pipe)
    first = ok(client.post("/v1/sessions", json=terms), 201)
    again = ok(client.post("/v1/sessions", json=terms))
    other = ok(client.post("/v1/sessions", json={**terms, "index": 0}), 201)
    differs = client.post("/v1/sessions", json={**terms, "hold": "pin"})
    assert (again["session"], again["deadline"]) == (first["session"], first["deadline"])
    assert first["status"] == "open"
    assert first["base_path"] == f"/s/{first['session']}/v1"
    assert other["group_id"] == first["group_id"]
    assert other["session"] != first["session"]
    assert code_of(differs)[:2] == (409, "idempotency_conflict")


def test_a_key_names_the_session_of_a_request_without_a_label(pipe: Stack) -> None:
    client = http(pipe)
    key = {"Idempotency-Key": "open-1"}
    first, again = (client.post("/v1/sessions", json={"run": "r"}, headers=key).json() for _ in range(2))
    other = ok(client.post("/v1/sessions", json={"run": "r"}), 201)
    assert first["session"] == again["session"] != other["session"]


def test_a_tenants_label_is_its_own(pipe: Stack) -> None:
    """I7."""
    mine = open_session(pipe, group="shared-label", run="r")
    theirs = open_session(pipe, "bolt", group="shared-label", run="r")
    assert mine.opened["group_id"] != theirs.opened["group_id"]


@pytest.mark.parametrize(
    ("terms", "code", "field"),
    [
        ({"n": 0}, "limit_exceeded", "n"),
        ({"n": 2, "index": 2, "group": "g"}, "limit_exceeded", "index"),
        ({"n": 2}, "invalid_request", "group"),
        ({"run": "a b"}, "invalid_request", "run"),
        ({"hold": "keep"}, "invalid_request", "hold"),
        ({"reasoning_history": "drop"}, "invalid_request", "reasoning_history"),
        ({"on_concurrent_turn": "wait"}, "invalid_request", "on_concurrent_turn"),
        ({"ttl_s": 0}, "limit_exceeded", "ttl_s"),
        ({"deadline_s": 1e9}, "limit_exceeded", "deadline_s"),
        ({"max_turns": 0}, "limit_exceeded", "max_turns"),
        ({"scorers": ["nobody"]}, "invalid_request", "scorers[0].type"),
        ({"weights": {"exact_version": -1}}, "limit_exceeded", "weights"),
        ({"turns": 3}, "unknown_field", "turns"),
        ({"rights": {"purposes": ["train"]}}, "invalid_request", "rights.purposes"),
    ],
)
def test_terms_that_cannot_be_are_refused_by_field(pipe: Stack, terms: dict[str, Any], code: str, field: str) -> None:
    client = http(pipe)
    assert code_of(client.post("/v1/sessions", json=terms)) == (400, code, field)


def test_n_is_the_groups_and_another_n_a_conflict(pipe: Stack) -> None:
    """A session beyond the group's `n` would be played and be in no record."""
    client = http(pipe)
    terms: dict[str, Any] = {"run": "n-of-group", "group": "g", "index": 0, "n": 2}
    ok(client.post("/v1/sessions", json=terms), 201)
    for index, n in ((2, 3), (0, 3), (1, 1 << 5)):
        refused = client.post("/v1/sessions", json={**terms, "index": index, "n": n})
        assert code_of(refused)[:2] == (409, "idempotency_conflict"), (index, n)
    beyond = client.post("/v1/sessions", json={**terms, "index": 2, "n": 3})
    assert code_of(beyond) == (409, "idempotency_conflict", "n")
    ok(client.post("/v1/sessions", json={**terms, "index": 1}), 201)


def test_the_ttl_counts_from_the_end_of_a_turn_that_was_longer(pipe: Stack) -> None:
    session = open_session(pipe, ttl_s=1.0)
    session.chat([user("x")], max_tokens=1000, extra_body={"ignore_eos": True})
    wait_until(lambda: session.state()["status"] == "expired", 15, "the session expired behind its turn")
    (entry,) = session.closed_group()["entries"]
    assert (entry["sample"]["status"], len(entry["turns"])) == ("expired", 1)


def test_a_session_that_ended_with_its_group_is_there_and_has_ended(pipe: Stack) -> None:
    terms: dict[str, Any] = {"run": "over", "group": "g-over", "deadline_s": 1.5}
    session = open_session(pipe, **terms)
    session.chat([user("x")])
    session.closed_group()
    for refused in (
        session.http.post(f"/v1/sessions/{session.id}/close", json={"reward": 1.0}),
        session.http.delete(f"/v1/sessions/{session.id}"),
    ):
        assert code_of(refused)[:2] == (410, "session_ended")
    assert session.state()["status"] == "ended"
    assert "outcome" not in session.state()
    assert open_session(pipe, **terms).opened["status"] == "ended"


def test_a_session_whose_group_was_cancelled_has_ended_before_anybody_plays_on(pipe: Stack) -> None:
    sessions = [open_session(pipe, run="over", group="g-cancelled", n=2, index=index) for index in range(2)]
    ok(sessions[0].http.post(f"/v1/rollouts/{sessions[0].opened['batch_id']}/cancel"), 202)
    sessions[0].closed_group()
    with pytest.raises(openai.APIStatusError) as ended:  # nobody has looked since: the turn finds it out
        sessions[1].chat([user("x")])
    assert (ended.value.status_code, ended.value.code) == (410, "session_ended")
    assert [session.state()["status"] for session in sessions] == ["ended"] * 2
    assert [session.state()["open_turns"] for session in sessions] == [[]] * 2


def test_a13_a_group_of_sessions_closes_once_with_an_entry_each(pipe: Stack) -> None:
    terms: dict[str, Any] = {"run": "grpo", "group": "task-7", "n": 4, "metadata": {"task": 7}}
    sessions = [open_session(pipe, index=index, **terms) for index in range(4)]
    for index, session in enumerate(sessions[:3]):
        messages: list[Any] = []
        for number in range(index + 1):
            messages.append(user(f"question {number}"))
            messages.append(session.chat(messages).message)
        session.close(reward=float(index), turn_rewards={"0": 0.5})
    client = http(pipe)
    deleted = ok(client.delete(f"/v1/sessions/{sessions[3].id}"))
    assert deleted["outcome"] == "failed"
    record = sessions[0].closed_group()
    page = ok(client.get("/v1/runs/grpo/trajectories", params={"cursor": 0}))
    assert [one["group"]["group_id"] for one in page["groups"]] == [record["group_id"]], "one close"
    assert (record["n"], len(record["entries"]), record["label"]) == (4, 4, "task-7")
    entries = record["entries"]
    assert [entry["session"] for entry in entries] == [session.id for session in sessions]
    assert [len(entry.get("turns", ())) for entry in entries] == [1, 2, 3, 0]
    assert [entry["posted"] for entry in entries[:3]] == [0.0, 1.0, 2.0]
    assert {tuple(entry["turn_rewards"].items()) for entry in entries[:3]} == {(("0", 0.5),)}
    assert entries[3]["sample"]["status"] == "failed"
    assert record["metadata"] == {"task": 7}


def test_scorers_judge_the_path_that_ends_in_the_leaf(pipe: Stack) -> None:
    terms: dict[str, Any] = {"scorers": ["exact_match"], "task": {"answer": "never said"}, "run": "scored"}
    session = open_session(pipe, **terms)
    turn = session.chat([user("hello")])
    session.close(leaf=turn.number)
    (entry,) = session.closed_group()["entries"]
    (score,) = entry["scores"]
    assert (score["scorer"], score["value"]) == ("exact_match", 0.0)
    assert entry["reward"] == 0.0
    gone = open_session(pipe, **terms)
    gone.http.delete(f"/v1/sessions/{gone.id}")
    (entry,) = gone.closed_group()["entries"]
    assert entry.get("reward") is None, "what was given up is not judged"


def test_i2_closing_again_answers_as_the_first_close_did(pipe: Stack) -> None:
    session = open_session(pipe)
    session.chat([user("hello")])
    body: dict[str, Any] = {"reward": 0.25, "turn_rewards": {"0": 1.0}, "deliverables": [{"name": "report.md"}]}
    first = session.close(**body)
    assert first == session.close(**body)
    assert (first["outcome"], first["reward"], first["turns"], first["leaf"]) == ("closed", 0.25, 1, 0)
    other = session.http.post(f"/v1/sessions/{session.id}/close", json={"reward": 0.5})
    assert code_of(other)[:2] == (410, "session_ended")
    (entry,) = session.closed_group()["entries"]
    assert entry["deliverables"] == body["deliverables"]
    assert ok(session.http.delete(f"/v1/sessions/{session.id}"))["outcome"] == "closed", "what has ended stays"


def test_an_ended_session_takes_no_turn_and_can_still_be_looked_at(pipe: Stack) -> None:
    session = open_session(pipe)
    turn = session.chat([user("hello")])
    session.close()
    with pytest.raises(openai.APIStatusError) as ended:
        session.chat([user("hello"), turn.message, user("more")])
    assert (ended.value.status_code, ended.value.code) == (410, "session_ended")
    assert code_of(session.http.post(f"/v1/sessions/{session.id}/fork", json={}))[:2] == (410, "session_ended")
    state = session.state()
    assert (state["status"], state["outcome"]["outcome"], state["turns"]) == ("closed", "closed", 1)
    assert state["worker"] is None


def test_a_delete_stops_the_turn_under_way(pipe: Stack) -> None:
    session = open_session(pipe)
    messages: list[Any] = [user("x")]
    client = session.openai()
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    assert ok(session.http.delete(f"/v1/sessions/{session.id}"))["outcome"] == "failed"
    with pytest.raises(openai.APIError):
        list(chunks)
    assert session.state()["status"] == "failed"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"turn_rewards": {"3": 1.0}}, "turn_rewards.3"),
        ({"turn_rewards": {"x": 1.0}}, "turn_rewards.x"),
        ({"turn_rewards": {"00": 1.0}}, "turn_rewards.00"),
        ({"leaf": 5}, "leaf"),
        ({"outcome": "expired"}, "outcome"),
    ],
)
def test_a_close_that_cannot_be_is_refused_by_field(pipe: Stack, body: dict[str, Any], field: str) -> None:
    session = open_session(pipe)
    refused = session.http.post(f"/v1/sessions/{session.id}/close", json=body)
    assert code_of(refused) == (400, "invalid_request", field)
    assert session.state()["status"] == "open"


def test_caps_refuse_with_their_name_and_the_session_can_still_be_closed(pipe: Stack) -> None:
    session = open_session(pipe, max_turns=1)
    turn = session.chat([user("hello")])
    with pytest.raises(openai.BadRequestError) as full:
        session.chat([user("hello"), turn.message, user("more")])
    assert full.value.code == "limit_exceeded"
    assert "max_turns" in str(full.value.body)
    assert session.close(reward=1.0)["outcome"] == "closed"
