"""Messages as templates get them: as vLLM prepares them."""

from __future__ import annotations

from typing import Any

import pytest
from rollgrid_rendering.messages import normalized
from rollgrid_rendering.renderer import Renderer, RenderingError

from tests.support.tiny_models import TinyModel, tiny_model


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(tiny_model(TinyModel()))


def test_text_parts_become_one_text_and_nothing_becomes_empty() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
        "d",
    ]
    found = normalized([{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "user"}])
    assert [message["content"] for message in found] == ["a\nb\nc\nd", "", ""]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ("{broken", {}), ("[1]", {}), ({"a": 1}, {"a": 1})],
)
def test_arguments_of_earlier_calls_are_objects(arguments: Any, wanted: Any) -> None:
    given = [{"role": "assistant", "content": "x", "tool_calls": [call(arguments)]}]
    (message,) = normalized(given)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": wanted}
    assert given[0]["tool_calls"] == [call(arguments)], "the caller's messages are not changed"


def test_empty_calls_vanish_and_reasoning_has_both_names() -> None:
    (message,) = normalized([{"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "hm"}])
    assert message == {"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": "hm"}
    (other,) = normalized([{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}])
    assert (other["reasoning"], other["reasoning_content"]) == ("a", "a")


def test_a_message_is_continued_or_answered(renderer: Renderer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    answered, ids = renderer.render(messages)
    assert answered.endswith("<|im_end|>\n<|im_start|>assistant\n")
    continued, _ = renderer.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nwell")
    plain, _ = renderer.render(messages, add_generation_prompt=False)
    assert plain.endswith("well<|im_end|>\n")
    assert renderer.render(messages, add_special_tokens=True)[1][-len(ids) :] == ids
    with pytest.raises(RenderingError):
        renderer.render(messages, continue_final_message=True)
