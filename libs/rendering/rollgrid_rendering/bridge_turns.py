"""What a bridge is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import ForkReason
from rollgrid_contracts.samples import FinishReason


class PastTurn(NamedTuple):
    """A turn of the path so far, root first: its node's ids and messages, and the answer as it was returned."""

    observation: TokenIds
    sampled: TokenIds
    messages: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any]
    closing: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def is_opaque(self) -> bool:
        """It was given ids that no message explains."""
        return not self.messages and len(self.observation) > self.closing


class Request(NamedTuple):
    """What the next turn is asked with: the messages behind the path's, and what else the template gets."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, str]] = ()
    options: Mapping[str, Any] | None = None
    at_most: int | None = None


class Bridged(NamedTuple):
    """`observation` is appended to the tokens so far; its first `closing` ids end the last turn, which had not ended.

    `how`: `typed:<renderer>`, `template` (its continuation), or `rendered` (the whole, as the template has it).
    """

    observation: TokenIds
    closing: int
    how: str


class NoBridge(NamedTuple):
    """Why nothing can be appended; the next turn must begin from its messages."""

    reason: ForkReason
    detail: str


def unavailable(detail: str) -> NoBridge:
    return NoBridge(ForkReason.BRIDGE_UNAVAILABLE, detail)


def rewritten(detail: str) -> NoBridge:
    return NoBridge(ForkReason.TEMPLATE_REWRITES_HISTORY, detail)


def ids_of(turns: Sequence[PastTurn]) -> list[int]:
    """The tokens so far."""
    return TokenIds(b"".join(turn.observation.packed + turn.sampled.packed for turn in turns)).tolist()
