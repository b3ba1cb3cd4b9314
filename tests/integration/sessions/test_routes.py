"""The OpenAI calls below a session's base URL (A49, A50, A25)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from rollgrid_contracts.checkpoints import Pin
from rollgrid_contracts.topology import PINS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table

from tests.support.stack import Stack
from tests.support.waiting import wait_until

from .door import TOOLS, Turn, code_of, http, ok, open_session


def test_a49_the_openai_sdk_plays_twenty_turns_with_tools_token_exact(pipe: Stack) -> None:
    session = open_session(pipe)
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "What is 12 plus 30?"}]
    before: list[int] = []
    workers = set()
    for number in range(20):
        turn = session.chat(messages, tools=TOOLS, tool_choice="none")
        assert turn.place == {
            "session": session.id,
            "turn": number,
            "branch": "main",
            "parent": number - 1 if number else None,
            "fork": None,
            "fork_detail": None,
        }
        assert turn.prompt[: len(before)] == before, "what was sampled and sent before is the beginning, id by id"
        assert len(turn.prompt) > len(before)
        before = turn.prompt + turn.tokens
        messages.append(turn.message)
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": json.dumps({"sum": number})})
    state = session.state(token_ids=True)
    assert state["turns"] == state["depth"] == 20
    assert state["leaves"] == [19]
    assert state["tokens"] == len(before)
    kept = [token for node in state["nodes"] for token in node["observation_ids"] + node["token_ids"]]
    assert kept == before, "the tree holds deltas, which are the last prompt and answer"
    workers = {node["worker"] for node in state["nodes"]}
    assert workers == {state["worker"]}, "every turn lands where the first one did"
    assert {node["roles"][-1] for node in state["nodes"][1:]} == {"tool"}
    assert all(node["times"]["gap_s"] >= 0 and node["times"]["finished_at"] for node in state["nodes"])


def test_a_streamed_turn_is_the_turn_that_is_recorded(pipe: Stack) -> None:
    session = open_session(pipe)
    messages: list[Any] = [{"role": "user", "content": "one two three"}]
    texts: list[str] = []
    before: list[int] = []
    for _ in range(3):
        client = session.openai()
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, stream=True)
        chunks = [chunk.model_dump() for chunk in stream]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
        assert {chunk["session"]["turn"] for chunk in chunks} == {len(texts)}
        prompt = chunks[0]["prompt_token_ids"]
        assert prompt[: len(before)] == before
        before = prompt + tokens
        texts.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    state = session.state(token_ids=True)
    assert [node["content"] for node in state["nodes"]] == texts
    assert state["nodes"][-1]["token_ids"] == before[-len(state["nodes"][-1]["token_ids"]) :]


def test_completions_and_generate_take_ids_whole_or_only_the_new_ones(pipe: Stack) -> None:
    session = open_session(pipe)
    client = session.openai()
    first = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4).model_dump()
    so_far = [5, 6, 7] + first["choices"][0]["token_ids"]
    more: dict[str, Any] = {"observation_token_ids": [8, 9]}
    second = client.completions.create(model="tiny", prompt="", max_tokens=4, extra_body=more).model_dump()
    assert second["choices"][0]["prompt_token_ids"] == [*so_far, 8, 9]
    assert second["session"]["parent"] == 0
    so_far += [8, 9, *second["choices"][0]["token_ids"]]
    base = f"/s/{session.id}"
    body = {"token_ids": [*so_far, 10], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    third = ok(session.http.post(f"{base}/inference/v1/generate", json=body))
    assert (third["session"]["parent"], third["session"]["fork"]) == (1, None)
    assert third["prompt_token_ids"] == [*so_far, 10]
    other = [5, 6, 8]
    body["token_ids"] = other
    edited = ok(session.http.post(f"{base}/v1/inference/v1/generate", json=body))
    assert (edited["session"]["parent"], edited["session"]["fork"]) == (None, "edited_history")
    assert edited["prompt_token_ids"] == other


def test_a_text_prompt_goes_on_behind_the_text_of_its_branch(pipe: Stack) -> None:
    session = open_session(pipe)
    client = session.openai()
    first = client.completions.create(model="tiny", prompt="one two", max_tokens=6).model_dump()
    text = "one two" + first["choices"][0]["text"] + " three"
    second = client.completions.create(model="tiny", prompt=text, max_tokens=6).model_dump()
    other = client.completions.create(model="tiny", prompt="ten", max_tokens=6).model_dump()
    sampled = first["choices"][0]["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["session"]["fork"] is None
    assert second["choices"][0]["prompt_token_ids"][: len(sampled)] == sampled
    assert other["session"]["fork"] == "edited_history"


def test_what_a_turn_is_answered_with_is_told_by_its_key(pipe: Stack) -> None:
    session = open_session(pipe)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    headers = {"Idempotency-Key": "turn-1"}
    first = session.chat(messages, extra_headers=headers)
    again = session.chat(messages, extra_headers=headers)
    assert (again.number, again.tokens, again.prompt) == (first.number, first.tokens, first.prompt)
    assert again.answer.id == first.answer.id
    with pytest.raises(openai.ConflictError, match="Idempotency-Key"):
        session.chat([{"role": "user", "content": "other"}], extra_headers=headers)
    assert session.state()["turns"] == 1
    streamed: dict[str, Any] = {"stream": True, "max_tokens": 8}
    client = session.openai()
    key = {"Idempotency-Key": "turn-2"}
    asked = [*messages, first.message, {"role": "user", "content": "more"}]
    once, twice = (
        [
            token
            for chunk in client.chat.completions.create(model="tiny", messages=asked, extra_headers=key, **streamed)
            for token in chunk.model_dump()["choices"][0].get("token_ids") or []
        ]
        for _ in range(2)
    )
    assert once == twice
    assert session.state()["turns"] == 2


def test_a_key_waits_for_the_turn_that_is_under_way_and_outlives_its_client(pipe: Stack) -> None:
    session = open_session(pipe)
    messages: list[Any] = [{"role": "user", "content": "slow"}]
    asked: dict[str, Any] = {
        "max_tokens": 300,
        "extra_body": {"ignore_eos": True},
        "extra_headers": {"Idempotency-Key": "a"},
    }
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(session.chat, messages, **asked)
        wait_until(lambda: bool(session.state()["open_turns"]), 20, "the first turn is under way")
        # the key may not name its turn yet: then 409 with Retry-After
        patient = session.openai().with_options(max_retries=5)
        second = Turn(patient.chat.completions.create(model="tiny", messages=messages, **asked))
        assert (second.number, second.tokens) == (first.result().number, first.result().tokens)
    asked["extra_headers"] = {"Idempotency-Key": "b"}
    messages += [second.message, {"role": "user", "content": "more"}]

    def stream() -> Any:
        return session.openai().chat.completions.create(model="tiny", messages=messages, stream=True, **asked)

    left = stream()
    next(iter(left))
    left.close()
    tokens = [token for chunk in stream() for token in chunk.model_dump()["choices"][0].get("token_ids") or []]
    state = session.state(token_ids=True)
    assert (state["turns"], state["lost_turns"]) == (2, [])
    assert tokens == state["nodes"][1]["token_ids"]


def test_n_over_one_is_refused_and_names_fork(pipe: Stack) -> None:
    session = open_session(pipe)
    with pytest.raises(openai.BadRequestError, match="fork") as refused:
        session.chat([{"role": "user", "content": "hello"}], n=2)
    assert (refused.value.code, refused.value.param) == ("unsupported", "n")
    assert session.state()["turns"] == 0


def test_approvals_and_deliverables_stand_with_their_turn(pipe: Stack) -> None:
    """C39."""
    session = open_session(pipe)
    extra: dict[str, Any] = {"approvals": [{"by": "ada", "call": "c1"}], "deliverables": [{"name": "report.md"}]}
    session.chat([{"role": "user", "content": "hello"}], extra_body=extra)
    (node,) = session.state()["nodes"]
    assert (node["approvals"], node["deliverables"]) == (extra["approvals"], extra["deliverables"])


def test_models_are_listed_below_the_base_url(pipe: Stack) -> None:
    session = open_session(pipe)
    client = session.openai()
    assert "tiny" in [model.id for model in client.models.list()]
    assert client.models.retrieve("tiny").id == "tiny"


def test_an_x_session_id_on_the_plain_doors_opens_no_session(pipe: Stack) -> None:
    client = http(pipe)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = ok(client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "mine"}))
    assert "session" not in answer
    assert code_of(client.get("/v1/sessions/mine")) == (404, "not_found", "session")


def test_a_client_that_leaves_stops_its_turn_and_not_its_session(pipe: Stack) -> None:
    session = open_session(pipe)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    client = session.openai()
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: bool(session.state()["lost_turns"]), 20, "the turn has ended as cancelled")
    state = session.state()
    assert [lost["status"] for lost in state["lost_turns"]] == ["cancelled"]
    assert (state["status"], state["open_turns"], state["nodes"]) == ("open", [], [])
    turn = session.chat(messages)
    assert (turn.number, turn.place["parent"], turn.fork) == (1, None, None)


@pytest.mark.parametrize(
    ("path", "status"), [("{s}~nobody/v1", 404), ("{s}~/v1", 404), ("snobody/v1", 404), ("a.b/v1", 404)]
)
def test_an_address_of_nothing_is_not_found(pipe: Stack, path: str, status: int) -> None:
    session = open_session(pipe)
    url = f"/s/{path.format(s=session.id)}/chat/completions"
    answer = session.http.post(url, json={"messages": [{"role": "user", "content": "hi"}]})
    assert code_of(answer) == (status, "not_found", "session")


def test_i7_another_tenants_session_is_not_found(pipe: Stack) -> None:
    session = open_session(pipe)
    session.chat([{"role": "user", "content": "hello"}])
    foreign = http(pipe, "bolt")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    calls = [
        foreign.get(f"/v1/sessions/{session.id}"),
        foreign.post(f"/v1/sessions/{session.id}/fork", json={}),
        foreign.post(f"/v1/sessions/{session.id}/close", json={}),
        foreign.delete(f"/v1/sessions/{session.id}"),
        foreign.post(f"/s/{session.id}/v1/chat/completions", json=body),
        foreign.get(f"/s/{session.id}/v1/models"),
    ]
    assert {code_of(answer)[:2] for answer in calls} == {(404, "not_found")}
    assert session.state()["status"] == "open"


async def test_a_pinned_session_stays_on_the_version_of_its_first_turn_and_holds_it(pipe: Stack) -> None:
    pinned, floating = open_session(pipe, hold="pin", deadline_s=600.0), open_session(pipe)
    for session in (pinned, floating):
        first = session.chat([{"role": "user", "content": "hello"}])
        messages = [{"role": "user", "content": "hello"}, first.message, {"role": "user", "content": "more"}]
        second = session.chat(messages)
        spans = [turn.raw["choices"][0]["weight_versions"] for turn in (first, second)]
        assert {span["version"] for part in spans for span in part} == {0}
    exact = open_session(pipe, weights={"exact_version": 0})
    exact.chat([{"role": "user", "content": "hello"}])
    bus = await Bus.connect(pipe.nats.settings(), "test", None)
    try:
        table = Table(bus, PINS, Pin)
        pins = await table.items()
        pinned.close()
        exact.close(outcome="failed")
        left = {key.rpartition(".")[2] for key in await table.keys()}
    finally:
        await bus.close()
    held = {key.rpartition(".")[2]: pin.value for key, pin in pins.items()}
    assert floating.id not in held
    assert held[pinned.id].batch_id == pinned.opened["batch_id"], "let go once its group has closed"
    assert held[pinned.id].until > pinned.opened["deadline"]
    assert exact.id in held
    assert not left & {pinned.id, exact.id}, "no swap waits for what has ended"


def test_another_policy_is_refused(pipe: Stack) -> None:
    session = open_session(pipe)
    answer = session.http.post(f"/s/{session.id}/v1/chat/completions", json=_hello(model="nobody"))
    assert code_of(answer) == (404, "model_not_found", "model")


def _hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more}
