"""Bridges of the package `renderers`: hand-written for a family of models.

One is used only where it renders probe conversations as the template of this very tokenizer does, whatever the model
is called.  What it returns is checked: it must begin with the tokens so far.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrid_contracts.arrays import TokenIds

from .bridge_turns import Bridged, PastTurn, Request, ids_of
from .messages import normalized
from .renderer import Renderer, RenderingError
from .without_torch import torch_hidden

HINTS = frozenset(
    {
        "<tool_call>", "<|start_header_id|>", "[gMASK]", "<|channel|>", "<|channel>", "<|tool_calls_section_begin|>",
        "]~b]", "<|message_user|>", "<\uff5cAssistant\uff5c>", "<\uff5chy_Assistant\uff5c>",
    }
)  # fmt: skip
"""Each typed renderer's tokenizer has one of these tokens: without any the package, seconds to import, is left alone."""

_OF_ANY_TEMPLATE = frozenset({"auto", "custom", "default"})
"""Its names that stand for no family."""

_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What code written for one family raises about the tokenizers and messages of others."""

_MOST_REMEMBERED = 64
"""Variables of a template that are remembered at once."""

_CALL = {"id": "call_a1b2c3", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x y"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "What is 1 + 2?"}
_ANSWER = {"role": "assistant", "content": "It is 3."}
_RESULT = {"role": "tool", "tool_call_id": "call_a1b2c3", "name": "add", "content": "3"}
_FIRST: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (([_SYSTEM, _USER], []), ([_USER], [_TOOL]))
_LATER: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([_SYSTEM, _USER, _ANSWER, _USER], []),
    ([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT], [_TOOL]),
    ([_USER, {**_ANSWER, "reasoning_content": "One and two."}, _USER], []),
)
"""Conversations on which template and typed renderer must agree, each with its tools."""


class TypedBridges:
    """Finds the typed renderer of a tokenizer on first use; most have none."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._lock = threading.Lock()
        self._family: type[Any] | None = None
        self._searched = not HINTS.intersection(renderer.added_tokens)
        self._found: dict[str, Any] = {}

    def extend(self, turns: Sequence[PastTurn], request: Request) -> Bridged | None:
        """The typed bridge's extension, None where there is none or it refuses."""
        typed = self._typed(request.options or {})
        if typed is None or not self._begins_alike(turns[0], request):
            return None
        so_far, last = ids_of(turns), turns[-1].sampled.tolist()
        try:
            found = typed.bridge_to_next_turn(
                so_far[: len(so_far) - len(last)],
                last,
                normalized(request.messages),
                tools=[dict(tool) for tool in request.tools] or None,
            )
        except _REFUSALS:  # hand-written for other conversations than this one: the template is asked instead
            return None
        if found is None or found.token_ids[: len(so_far)] != so_far:
            return None
        ids = found.token_ids[len(so_far) :]
        return Bridged(
            TokenIds.of(ids), _closing(last, ids, set(typed.get_stop_token_ids())), f"typed:{typed.config.name}"
        )

    def _begins_alike(self, root: PastTurn, request: Request) -> bool:
        """Whether the template still says what the session began with: typed bridges do not look back."""
        try:
            return self._ids(root.messages, request.tools, request) == root.observation.tolist()
        except RenderingError:
            return False

    def _typed(self, options: Mapping[str, Any]) -> Any:
        key = json.dumps(dict(options), sort_keys=True, default=repr)
        with self._lock:  # seconds, once
            if not self._searched:
                self._searched = True
                self._family = self._search()
            if self._family is None:
                return None
            if key not in self._found:
                if len(self._found) >= _MOST_REMEMBERED:
                    self._found.clear()
                self._found[key] = self._made(self._family, options, _FIRST)
            return self._found[key]

    def _search(self) -> type[Any] | None:
        with torch_hidden():
            from renderers import configs
        families = (cls for cls in vars(configs).values() if _is_family(cls, configs.BaseRendererConfig))
        return next((cls for cls in families if self._made(cls, {}, (*_FIRST, *_LATER)) is not None), None)

    def _made(self, family: type[Any], options: Mapping[str, Any], probes: Sequence[tuple[Any, Any]]) -> Any:
        """The typed renderer under these variables, None where it does not speak as the template does."""
        from renderers import create_renderer

        request = Request((), options=options)
        try:
            config = family(thinking_retention="all")
            typed = create_renderer(self._renderer.tokenizer, config, chat_template_kwargs=dict(options))
            alike = all(
                typed.render_ids(normalized(messages), tools=tools or None, add_generation_prompt=True)
                == self._ids(messages, tools, request)
                for messages, tools in probes
            )
        except _REFUSALS:  # it asserts what its family's tokenizer has, or does not know these variables
            return None
        return typed if alike else None

    def _ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], request: Request
    ) -> list[int]:
        return self._renderer.render(messages, tools=tools, documents=request.documents, options=request.options)[1]


def _is_family(cls: Any, base: type[Any]) -> bool:
    fields: Mapping[str, Any] = getattr(cls, "model_fields", {})
    name = fields.get("name") if isinstance(cls, type) and issubclass(cls, base) else None
    return name is not None and name.default not in _OF_ANY_TEMPLATE


def _closing(last: Sequence[int], ids: Sequence[int], stops: set[int]) -> int:
    """How many of `ids` end the turn whose sampled ids are `last`."""
    if last and last[-1] in stops:
        return 0
    return next((i + 1 for i, token in enumerate(ids) if token in stops), 0)
