"""A03, A25, A32: sessions with a template that strips reasoning, and with calls that the model's parser reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from .asking import FREE, extra_of, ids_of
from .conftest import REQUEST_S
from .endpoints import ROLLGRID, Endpoint
from .model import END_THINK, MODEL
from .test_tools import CALL, TOOLS, forced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
ENDPOINTS = (ROLLGRID,)
TURNS = 20
THINKING: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": True}, **FREE, "allowed_token_ids": [40, 41, 42, END_THINK],
}  # fmt: skip
Opening = Callable[..., tuple[httpx2.Client, dict[str, Any], OpenAI]]


@pytest.fixture
def opening(endpoint: Endpoint) -> Opening:
    def opened(**terms: Any) -> tuple[httpx2.Client, dict[str, Any], OpenAI]:
        http = httpx2.Client(
            base_url=endpoint.url, headers={"authorization": f"Bearer {endpoint.key}"}, timeout=REQUEST_S
        )
        session = http.post("/v1/sessions", json={"model": MODEL, **terms}).json()
        base = endpoint.url + session["base_path"]
        return http, session, OpenAI(base_url=base, api_key=endpoint.key, max_retries=0, timeout=REQUEST_S)

    return opened


def play(
    client: OpenAI, messages: list[Any], extra: dict[str, Any], **options: Any
) -> tuple[Any, list[int], list[int]]:
    """The answer, its prompt's ids and its own."""
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, extra_body=extra, **{"max_tokens": 12, **options}
    )
    return answer, list(extra_of(answer, "prompt_token_ids")), ids_of(answer.choices[0])


def test_twenty_turns_keep_reasoning_that_the_template_strips(opening: Opening) -> None:
    _, _, client = opening(reasoning_history="keep")
    messages: list[Any] = [{"role": "user", "content": "think"}]
    before: list[int] = []
    reasoned = 0
    for number in range(TURNS):
        answer, prompt, sampled = play(client, messages, THINKING, tool_choice="none", seed=number)
        place = extra_of(answer, "session")
        assert place["fork"] is None, place
        assert prompt[: len(before)] == before, "reasoning stays in the prompt as it was sampled"
        before = prompt + sampled
        message = answer.choices[0].message
        reasoning = (message.model_extra or {}).get("reasoning")
        reasoned += bool(reasoning)
        back: dict[str, Any] = {"role": "assistant", "content": message.content}
        if number % 2 and reasoning:  # some clients send it back, most do not
            back["reasoning_content"] = reasoning
        messages += [back, {"role": "user", "content": f"more {number}"}]
    assert reasoned > 3


def test_a_template_that_rewrites_history_forks_where_it_is_followed(opening: Opening) -> None:
    http, session, client = opening(reasoning_history="template")
    messages: list[Any] = [{"role": "user", "content": "think"}]
    answer, prompt, sampled = play(client, messages, THINKING, tool_choice="none", seed=1)
    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "more"},
    ]
    answer, second, _ = play(client, messages, THINKING, tool_choice="none", seed=2)
    place = extra_of(answer, "session")
    assert (place["fork"], place["parent"]) == ("template_rewrites_history", None)
    assert second[: len(prompt + sampled)] != prompt + sampled
    state = http.get(f"/v1/sessions/{session['session']}").json()
    assert state["leaves"] == [0, 1]


def test_C39_calls_that_were_parsed_are_matched_however_they_come_back(opening: Opening) -> None:
    http, session, client = opening()
    messages: list[Any] = [{"role": "user", "content": "the weather?"}]
    before: list[int] = []
    for number in range(4):
        answer, prompt, sampled = play(client, messages, forced(f"Step {number}. {CALL}"), max_tokens=200)
        assert extra_of(answer, "session")["fork"] is None
        assert prompt[: len(before)] == before
        before = prompt + sampled
        message = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city"\n</tool_call>'
    play(client, messages, forced(broken), max_tokens=200)
    nodes = http.get(f"/v1/sessions/{session['session']}").json()["nodes"]
    assert [node["parse_status"] for node in nodes] == ["ok"] * 4 + ["malformed"]
    assert [call["name"] for node in nodes for call in node["tool_calls"]] == ["weather"] * 4
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris", "days": 1}'
    answer, _, _ = play(client, messages, forced("no call"), max_tokens=64)
    place = extra_of(answer, "session")
    assert (place["fork"], place["parent"]) == ("edited_history", None), "other arguments are another history"
