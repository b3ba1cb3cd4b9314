"""Short ways to ask, and what every answer must hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from openai import OpenAI

from .model import MODEL

USER: list[Any] = [{"role": "user", "content": "What is 12 plus 30?"}]
PROMPT = [1, 40, 41, 42, 43]
FREE: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
"""Extra fields: exactly max_tokens tokens, and their ids."""


def chat(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 8, **fields}
    return client.chat.completions.create(**asked, extra_body=extra or {})


def complete(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, **fields}
    return client.completions.create(**asked, extra_body=extra or {})


def extra_of(part: Any, name: str) -> Any:
    """A field of an answer that the SDK's types do not know; it must be there."""
    found = (part.model_extra or {}).get(name)
    assert found is not None, f"{name} is missing in {part}"
    return found


def ids_of(choice: Any) -> list[int]:
    return list(extra_of(choice, "token_ids"))


def assert_logprobs(values: Iterable[float]) -> None:
    """Finite logs of probabilities; vLLM's stand-in for minus infinity is none."""
    assert all(math.isfinite(value) and -9000 < value <= 1e-6 for value in values)


class Joined:
    """A stream put together again, per index."""

    def __init__(self, chunks: Iterable[Any], *, is_chat: bool) -> None:
        self.chunks = list(chunks)
        self.text: dict[int, str] = {}
        self.reasoning: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.tools: dict[int, dict[int, dict[str, str]]] = {}
        self.order: list[int] = []
        self.usage: Any = None
        for chunk in self.chunks:
            if chunk.usage is not None and not chunk.choices:
                self.usage = chunk.usage
            for choice in chunk.choices:
                self._add(choice, is_chat)

    def _add(self, choice: Any, is_chat: bool) -> None:
        index = choice.index
        assert index not in self.finish, f"something came for {index} after its end"
        self.order.append(index)
        text = choice.delta.content if is_chat else choice.text
        self.text[index] = self.text.get(index, "") + (text or "")
        extra = choice.model_extra or {}
        self.token_ids.setdefault(index, []).extend(extra.get("token_ids") or [])
        if choice.logprobs is not None:
            values = [e.logprob for e in choice.logprobs.content or []] if is_chat else choice.logprobs.token_logprobs
            self.logprobs.setdefault(index, []).extend(values or [])
        if is_chat:
            reasoning = (choice.delta.model_extra or {}).get("reasoning")
            self.reasoning[index] = self.reasoning.get(index, "") + (reasoning or "")
            for delta in choice.delta.tool_calls or []:
                call = self.tools.setdefault(index, {}).setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += delta.id or ""
                if delta.function is not None:
                    call["name"] += delta.function.name or ""
                    call["arguments"] += delta.function.arguments or ""
        if choice.finish_reason is not None:
            self.finish[index] = choice.finish_reason
