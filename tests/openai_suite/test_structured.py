"""A49: output that must match a schema, by the engine's grammar."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from openai import OpenAI

from .asking import Joined, chat, complete
from .model import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "enum": [40, 41, 42]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}


class Verdict(pydantic.BaseModel):
    answer: Literal[40, 41, 42]
    sure: bool


def test_A49_a_json_schema_binds_every_sample(client: OpenAI) -> None:
    for choice in chat(client, response_format=FORMAT, max_tokens=100, n=4).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_A49_a_streamed_json_schema(client: OpenAI) -> None:
    found = Joined(chat(client, response_format=FORMAT, max_tokens=100, stream=True), is_chat=True)
    jsonschema.validate(json.loads(found.text[0]), SCHEMA)


def test_A49_the_sdk_parses_into_a_pydantic_model(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "?"}]
    body = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Verdict, max_tokens=100)
    verdict = body.choices[0].message.parsed
    assert verdict is not None
    assert verdict.answer in (40, 41, 42)


def test_A49_any_json_object(client: OpenAI) -> None:
    """A random model may write for ever: what has come is the beginning of an object, or a whole one."""
    (choice,) = chat(client, response_format={"type": "json_object"}, max_tokens=60, temperature=0).choices
    text = choice.message.content
    assert text.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_A49_plain_text_is_a_format_too(client: OpenAI) -> None:
    assert chat(client, response_format={"type": "text"}).usage.completion_tokens > 0


def test_structured_outputs_of_vllm_on_both_routes(client: OpenAI) -> None:
    one_of = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert chat(client, one_of, max_tokens=20).choices[0].message.content in ("yes", "no")
    assert complete(client, one_of, max_tokens=20).choices[0].text in ("yes", "no")
    (choice,) = complete(client, {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, max_tokens=30).choices
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", choice.text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        {"type": "json_schema"},
        {"type": "yaml"},
    ],
    ids=["bad schema", "no schema", "unknown type"],
)
def test_A49_formats_that_cannot_be_are_refused(client: OpenAI, wrong: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, response_format=wrong)
    assert chat(client).usage.completion_tokens > 0
