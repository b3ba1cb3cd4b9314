"""OpenAI messages in the form chat templates expect, as vLLM prepares them.

Templates know strings: text parts become one text.  They know arguments of earlier tool calls as objects, where
OpenAI has JSON strings; one that is no JSON (a model wrote it) becomes an empty object, so that its conversation
can go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text → the key it is under."""

MEDIA_PARTS = frozenset(
    {
        "audio_embeds", "audio_url", "file", "image", "image_embeds", "image_pil", "image_url", "input_audio",
        "input_image", "prompt_embeds", "video", "video_embeds", "video_url",
    }
)  # fmt: skip


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of `messages` for a template.  Their shapes must have been checked."""
    return [_normalized(message) for message in messages]


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(message)
    found["content"] = text_of(found.get("content"))
    if found.get("role") != "assistant":
        return found
    reasoning = found.get("reasoning")
    if reasoning is None:
        reasoning = found.get("reasoning_content")
    for name in ("reasoning", "reasoning_content"):  # templates use either name
        found.pop(name, None)
        if reasoning is not None:
            found[name] = reasoning
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return found


def text_of(content: Any) -> str:
    """A message's content as one text; parts stand on lines of their own."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else str(part[TEXT_PARTS[part["type"]]]) for part in content)


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}
