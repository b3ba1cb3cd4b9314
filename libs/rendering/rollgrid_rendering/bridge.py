"""The next turn's prompt: the tokens so far, exactly as they are, and what comes behind them.

Ids that were sampled or sent once are never tokenized again: whatever is returned is appended to them.  In order: the
typed bridge of the package `renderers` where one renders as this model's template does, else the template's own
continuation where it is proven to follow these tokens, else `NoBridge` with its reason.  What happens then (a fork) is
not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrid_contracts.episodes import ReasoningHistory

from .bridge_template import TemplateBridge
from .bridge_turns import Bridged, NoBridge, PastTurn, Request, unavailable
from .bridge_typed import TypedBridges
from .renderer import Renderer, RenderingError, TooManyTokens

__all__ = ["Bridge", "Bridged", "NoBridge", "PastTurn"]


class Bridge:
    """Bridges of one tokenizer.  `extend` blocks (a few ms, more the first time) and may be called from any thread."""

    def __init__(self, renderer: Renderer, *, typed: bool = True) -> None:
        """`typed` False leaves the package `renderers` (seconds to import) aside."""
        self._template = TemplateBridge(renderer)
        self._typed = TypedBridges(renderer) if typed else None

    def extend(
        self,
        turns: Sequence[PastTurn],
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, str]] = (),
        options: Mapping[str, Any] | None = None,
        history: ReasoningHistory = ReasoningHistory.KEEP,
        at_most: int | None = None,
    ) -> Bridged | NoBridge:
        """What follows the tokens of `turns` (one at least) when `messages` come next and an answer is wanted.

        Raises TooManyTokens as `Renderer.encode` does; a template that refuses the messages is a `NoBridge`.
        """
        request = Request(messages, tools, documents, options, at_most)
        opaque = next((i for i, turn in enumerate(turns) if turn.is_opaque), None)
        if opaque is not None:
            return unavailable(f"step {opaque} of the path was given as token ids: its messages are not known")
        try:
            if history == ReasoningHistory.TEMPLATE:
                return self._template.rendered(turns, request)
            found = None if self._typed is None else self._typed.extend(turns, request)
            return found if found is not None else self._template.extend(turns, request)
        except TooManyTokens:
            raise
        except RenderingError as error:
            return unavailable(str(error))
