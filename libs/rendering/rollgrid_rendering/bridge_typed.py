"""Bridges of the package `renderers`: hand-written for a family of models, used only where one renders as the
template of this very tokenizer does."""

from __future__ import annotations

from collections.abc import Sequence

from .bridge_turns import Bridged, PastTurn, Request
from .renderer import Renderer


class TypedBridges:
    """Finds the typed renderer of a tokenizer on first use; most have none."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def extend(self, turns: Sequence[PastTurn], request: Request) -> Bridged | None:
        """The typed bridge's extension, None where there is none or it refuses."""
        return None
