"""Closed groups as the ledger would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed


def entry(
    index: int,
    ids: Sequence[int] = (5, 6, 2),
    reward: float | None = 1.0,
    spans: Sequence[tuple[int, int, int]] | None = None,
    **changes: Any,
) -> Entry:
    """A succeeded sample whose k-th logprob is -(k + 1) / 8 (exact in float32)."""
    spans = [(0, 0, len(ids))] if spans is None else spans
    sample = Sample(
        index=index,
        status=SampleStatus.SUCCEEDED,
        token_ids=TokenIds.of(ids),
        logprobs=Floats.of(-(k + 1) / 8 for k in range(len(ids))),
        text="text",
        finish_reason=FinishReason.STOP,
        version_spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans),
    )
    status = ScoreStatus.SCORED if reward is not None else ScoreStatus.VERIFIER_TIMEOUT
    return Entry(sample=sample, reward=reward, score_status=status, **changes)


def failed_entry(index: int) -> Entry:
    error = ErrorInfo(code=ErrorCode.ENGINE_ERROR, message="the engine died")
    return Entry(sample=Sample(index=index, status=SampleStatus.FAILED, error=error))


def closed(entries: Sequence[Entry], *, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> GroupClosed:
    values: dict[str, Any] = {
        "tenant": "local",
        "run": "r",
        "batch_id": "b1",
        "group_id": "g1",
        "n": len(entries),
        "policy": "tiny",
        "reason": CloseReason.COMPLETE,
        "prompt_token_ids": TokenIds.of(prompt),
        "prompt_text": "what?",
        "task": {"answer": "4"},
        "metadata": {"row": 7},
        "created_at": 1000.0,
        "closed_at": 1001.5,
        "entries": tuple(entries),
    }
    return GroupClosed(**{**values, **changes})
