"""One turn of a session that has ended: a node of its tree, or a turn that was lost.  Wire-safe, so that a store can keep them one by one."""

from __future__ import annotations

from typing import Any

import msgspec
from rollgrid_contracts.episodes import MAIN_BRANCH, ForkReason, TurnNode
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A turn whose tokens count.  `seq` is the RG_SAMPLES sequence of the finish that won."""

    turn: int
    seq: int
    sample: Sample

    @property
    def node(self) -> TurnNode:
        return place_of(self.sample)


class Lost(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A turn that ended without tokens to go on from: failed, cancelled or expired.  Nothing hangs on it."""

    turn: int
    seq: int
    status: SampleStatus
    branch: str = MAIN_BRANCH
    parent: int | None = None
    detail: str | None = None


class Branch(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A name for a place to go on from: `head` is its last node, its `parent` while it has none (None: the root)."""

    name: str
    parent: int | None = None
    reason: ForkReason | None = None
    head: int | None = None


def place_of(sample: Sample) -> TurnNode:
    """Where a turn's sample stands in its tree."""
    return TurnNode() if sample.node is None else sample.node


def counts(sample: Sample) -> bool:
    """Whether its tokens make a node: it succeeded, and was not stopped before the first token."""
    stopped = sample.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
    return sample.status is SampleStatus.SUCCEEDED and (len(sample.token_ids) > 0 or not stopped)


def answer_of(sample: Sample) -> dict[str, Any]:
    """The assistant's message as the chat routes return it; parts that it does not have are absent."""
    found: dict[str, Any] = {"role": "assistant", "content": sample.text or ""}
    if (parsed := sample.parsed) is None:
        return found
    calls = [{name: call[name] for name in ("id", "type", "function") if name in call} for call in parsed.tool_calls]
    found["content"] = parsed.content if calls or parsed.content is not None else ""
    if parsed.reasoning is not None:
        found["reasoning"] = parsed.reasoning
    if calls:
        found["tool_calls"] = calls
    return found
