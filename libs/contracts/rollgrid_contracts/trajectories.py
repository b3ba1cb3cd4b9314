"""The terminal record: `GroupClosed`, appended exactly once per group to its run's subject."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .arrays import TokenIds
from .episodes import SessionForked
from .failures import ErrorInfo
from .jobs import Priority, Rights, SamplingParams, WeightConstraint
from .samples import Sample, SampleStatus
from .scoring import Score, ScorerSpec, ScoreStatus


class CloseReason(StrEnum):
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REJECTED = "rejected"


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Terminal entry of one sample: what was generated, and its scores.

    `reward` is null unless every scorer asked for gave a number; null is never 0.  Turns of a
    multi-turn sample are in `turns`, in order, each on its own branch `node`.
    `session`, `posted` (the customer's own reward and its per-turn values at the close) and `branches` are a session's.
    `staleness` is that of the oldest version that made any token, when the group closed (`checkpoints.staleness`).
    """

    sample: Sample
    reward: float | None = None
    score_status: ScoreStatus | None = None
    scores: tuple[Score, ...] = ()
    turns: tuple[Sample, ...] = ()
    engine: str = ""
    staleness: int | None = None
    session: str | None = None
    posted: float | None = None
    turn_rewards: dict[int, float] = {}
    branches: tuple[SessionForked, ...] = ()
    deliverables: tuple[dict[str, Any], ...] = ()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that made its tokens, in order of first use."""
        samples = self.turns or (self.sample,)
        return tuple(dict.fromkeys(span.version for sample in samples for span in sample.version_spans))


class GroupClosed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="group_closed"):
    """Event: the group has ended; `entries` has exactly `n` items, ordered by index.

    ledger → trainers, archiver.  The message's stream sequence is the cursor of every reader.
    """

    tenant: str
    run: str
    batch_id: str
    group_id: str
    position: int = 0
    n: int
    policy: str
    model: str = ""
    pool: str = ""
    reason: CloseReason
    prompt_token_ids: TokenIds = TokenIds()
    prompt_text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    sampling: SamplingParams | None = None
    weights: WeightConstraint = WeightConstraint()
    logprobs_mode: str = "processed_logprobs"
    scorers: tuple[ScorerSpec, ...] = ()
    reward_formula: str | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    rights: Rights = Rights()
    engagement_id: str | None = None
    priority: Priority = Priority.NORMAL
    created_at: float
    closed_at: float
    deadline: float = 0.0
    job_seqs: tuple[int, ...] = ()
    ledger_epoch: int = 0
    error: ErrorInfo | None = None
    entries: tuple[Entry, ...]
    traceparent: str | None = None
    label: str | None = None
    reasoning_history: str | None = None


class PostedReward(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A reward the customer computed for one sample, or for its turns.

    `name` tells rewards of one sample apart, a later one under the same name replaces the earlier.
    `kind` is free: scalar, pass_rate, judge, turns.  Either `value` or `turn_values` (one per turn,
    None = no verdict) is set.
    """

    index: int
    name: str = "reward"
    kind: str = "scalar"
    value: float | None = None
    turn_values: tuple[float | None, ...] = ()
    detail: str | None = None


class RewardsPosted(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="rewards_posted"):
    """Event: rewards posted onto a group after the fact.  ingest → trainers, archiver.

    On `subjects.run_rewards`, beside the closes of the run, under its own sequence; it changes no
    terminal entry.
    """

    tenant: str
    run: str
    group_id: str
    closed_seq: int = 0
    rewards: tuple[PostedReward, ...]
    source: str = "customer"
    metadata: dict[str, Any] = {}
    posted_at: float
    traceparent: str | None = None


class Superseded(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="superseded"):
    """A finish that lost: later in stream order than the winner, or out of place in its session (`why`)."""

    tenant: str
    run: str
    group_id: str
    index: int
    turn: int
    attempt: int
    finished_seq: int
    worker: str
    why: str


def count_statuses(entries: tuple[Entry, ...]) -> dict[SampleStatus, int]:
    counts = dict.fromkeys(SampleStatus, 0)
    for entry in entries:
        counts[entry.sample.status] += 1
    return counts
