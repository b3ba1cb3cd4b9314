"""A49, C39: tools.  The model is random, so a grammar forces what a trained one would say."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from .asking import Joined, chat
from .model import EOS, whitespace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS: dict[str, Any] = {"weather": PARAMETERS, "stop_here": NOTHING}


def tools_of(**more: Any) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **more}}
        for name, schema in FUNCTIONS.items()
    ]


TOOLS, STRICT = tools_of(), tools_of(strict=True)
"""vLLM binds arguments to their schema only where `strict` says so; then an auto call is bound too."""

NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


FINITE: dict[str, Any] = {
    "logit_bias": {str(EOS): 100, **{str(token): -100 for token in whitespace()}},
    "max_tokens": 300,
}
"""A random model writes white space and calls without end; this one ends where the grammar lets it."""


def forced(text: str) -> dict[str, Any]:
    """Extra fields under which exactly this text comes."""
    return {"structured_outputs": {"choice": [text]}, "return_token_ids": True}


def check_arguments(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), FUNCTIONS[name])


def test_C39_auto_a_call_that_the_model_makes_is_parsed(client: OpenAI) -> None:
    (choice,) = chat(client, forced(CALL), tools=TOOLS, tool_choice="auto", max_tokens=200).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    assert call.id
    assert not choice.message.content
    assert choice.finish_reason == "tool_calls"


def test_C39_auto_is_the_default_and_text_before_a_call_stays(client: OpenAI) -> None:
    (choice,) = chat(client, forced("Let me see. " + CALL), tools=TOOLS, max_tokens=200).choices
    assert choice.message.content.strip() == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def test_C39_two_calls_in_one_answer_have_ids_of_their_own(client: OpenAI) -> None:
    (choice,) = chat(client, forced(f"{CALL}\n{CALL}"), tools=TOOLS, max_tokens=300).choices
    first, second = choice.message.tool_calls
    assert first.function == second.function
    assert first.id != second.id


def test_C39_text_without_a_call_is_content(client: OpenAI) -> None:
    (choice,) = chat(client, forced("no call"), tools=TOOLS, max_tokens=64).choices
    assert (choice.message.content, choice.message.tool_calls) == ("no call", None)
    assert choice.finish_reason == "stop"


def test_C39_a_malformed_call_is_content_not_a_call(client: OpenAI) -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city"\n</tool_call>'
    (choice,) = chat(client, forced(broken), tools=TOOLS, max_tokens=200).choices
    assert not choice.message.tool_calls
    assert '{"name": "weather"' in choice.message.content
    assert choice.finish_reason == "stop"


def test_C39_none_leaves_even_a_call_in_the_text(client: OpenAI) -> None:
    (choice,) = chat(client, forced(CALL), tools=TOOLS, tool_choice="none", max_tokens=200).choices
    assert not choice.message.tool_calls
    assert '{"name": "weather"' in choice.message.content


@pytest.mark.parametrize("n", [1, 3])
def test_C39_required_every_sample_calls_something(client: OpenAI, n: int) -> None:
    body = chat(client, tools=STRICT, tool_choice="required", n=n, seed=3, **FINITE)
    for choice in body.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            check_arguments(call.function.name, call.function.arguments)


def test_C39_named_that_function_is_called(client: OpenAI) -> None:
    (choice,) = chat(client, tools=STRICT, tool_choice=NAMED, seed=4, **FINITE).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    check_arguments("weather", call.function.arguments)


def test_A49_the_end_of_a_named_call_is_reported_as_openai_does(client: OpenAI) -> None:
    (choice,) = chat(client, tools=STRICT, tool_choice=NAMED, seed=4, **FINITE).choices
    assert choice.finish_reason == "stop"


def streamed(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Joined:
    return Joined(chat(client, extra, stream=True, **{**FINITE, "tools": TOOLS, **fields}), is_chat=True)


def test_C39_a_streamed_call_arrives_whole(client: OpenAI) -> None:
    found = streamed(client, forced("Let me see. " + CALL), tool_choice="auto")
    (call,) = found.tools[0].values()
    assert call["name"] == "weather"
    assert call["id"]
    assert json.loads(call["arguments"]) == {"city": "Rome", "days": 2}
    assert found.text[0].strip() == "Let me see."
    assert found.finish == {0: "tool_calls"}


def test_C39_two_streamed_calls_arrive_under_two_indexes(client: OpenAI) -> None:
    found = streamed(client, forced(f"{CALL}\n{CALL}"))
    assert sorted(found.tools[0]) == [0, 1]
    for call in found.tools[0].values():
        assert json.loads(call["arguments"]) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_C39_streamed_forced_calls_follow_their_schema(client: OpenAI, choice: Any) -> None:
    found = streamed(client, tools=STRICT, tool_choice=choice, seed=5)
    assert found.tools[0]
    for call in found.tools[0].values():
        check_arguments(call["name"], call["arguments"])
        assert call["id"]


def test_C39_a_forced_call_equals_its_stream(client: OpenAI) -> None:
    (plain,) = chat(client, tools=STRICT, tool_choice="required", seed=6, **FINITE).choices
    found = streamed(client, tools=STRICT, tool_choice="required", seed=6)
    want = [(call.function.name, json.loads(call.function.arguments)) for call in plain.message.tool_calls]
    assert [(call["name"], json.loads(call["arguments"])) for call in found.tools[0].values()] == want


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tools": TOOLS, "tool_choice": "perhaps"},
        {"tools": [{"type": "function"}]},
    ],
    ids=["no tools", "unknown function", "unknown choice", "no function"],
)
def test_A49_wrong_tools_are_refused(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, **fields)
