"""Multi-turn sessions: their terms, their place in the episode tree, and their events on RG_SAMPLES.

A session is one sample of a group, played in turns.  Every generation is a turn with a number of its own
and one node of the tree: what the caller added (`observation`, mask 0) and what was sampled (mask 1).  The tree
is the fold of `SessionOpened`, `SamplesFinished`, `SessionForked` and `SessionEnded` (`rollgrid_episodes`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .arrays import TokenIds
from .scoring import ScorerSpec

MAIN_BRANCH = "main"
"""The branch every session begins with."""


class ForkReason(StrEnum):
    """Why a node does not simply go on behind the last one of its branch."""

    # found by rollgrid: the new prompt does not begin with the tokens that were sampled
    EDITED_HISTORY = "edited_history"
    BRIDGE_UNAVAILABLE = "bridge_unavailable"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    # asked for by the caller
    REQUESTED = "requested"
    BEST_OF_N = "best_of_n"
    EXPLORE = "explore"
    RETRY = "retry"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    CONCURRENT_TURN = "concurrent_turn"


class SessionOutcome(StrEnum):
    CLOSED = "closed"
    FAILED = "failed"
    EXPIRED = "expired"


class VersionHold(StrEnum):
    """Which weights a session's later turns run on: `pin` keeps the first turn's version, `float` takes the newest."""

    PIN = "pin"
    FLOAT = "float"


class ReasoningHistory(StrEnum):
    """`keep`: earlier turns stay as they were sampled, reasoning included.  `template`: as the chat template has it."""

    KEEP = "keep"
    TEMPLATE = "template"


class SessionTerms(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a session was opened with.  `ttl_s` counts from the last turn; 0 caps leave the deployment's.

    `weights_rule` and `weights_value` are a `WeightConstraint` for every turn; `deadline` is the group's (UNIX seconds).
    `scorers` and `task` are the group's too: they travel on with `SessionEnded`.
    """

    policy: str
    model: str = ""
    hold: VersionHold = VersionHold.FLOAT
    reasoning_history: ReasoningHistory = ReasoningHistory.KEEP
    on_concurrent_turn: str = "refuse"
    ttl_s: float = 600.0
    max_turns: int = 0
    max_tokens: int = 0
    metadata: dict[str, Any] = {}
    weights_rule: str = "latest"
    weights_value: int = 0
    deadline: float = 0.0
    scorers: tuple[ScorerSpec, ...] = ()
    task: dict[str, Any] = {}


class TurnNode(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where a turn stands in its session's tree, known before it is sampled.

    `parent` is the turn behind whose tokens it goes on (None: the root), `observation` the ids between the
    parent's last token and its own first one (u4, mask 0), the first `closing` of which end the parent's turn where
    the sampler did not (`finish_reason` length).  `messages` are those the caller added.  The prompt of a turn is
    the observations and sampled ids from the root down to it.  `gap_s`: seconds since the parent ended.
    `rendered_with` is a digest of what the chat template was given beside messages (tools, documents, variables): a
    turn that is given other ones begins anew.
    """

    parent: int | None = None
    branch: str = MAIN_BRANCH
    observation: TokenIds = TokenIds()
    closing: int = 0
    messages: tuple[dict[str, Any], ...] = ()
    fork: ForkReason | None = None
    fork_detail: str | None = None
    gap_s: float = 0.0
    approvals: tuple[dict[str, Any], ...] = ()
    deliverables: tuple[dict[str, Any], ...] = ()
    rendered_with: str = ""


class SessionOpened(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="session_opened"):
    """Event: sample `index` of the group is played in this session.  `job_seq` is its `OpenEpisode`'s."""

    tenant: str
    run: str
    group_id: str
    index: int
    n: int
    session: str
    terms: SessionTerms
    opened_at: float
    job_seq: int = 0
    traceparent: str | None = None


class SessionForked(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="session_forked"):
    """Event: `branch` begins behind turn `parent` (None: at the root) and may go on beside the others."""

    tenant: str
    run: str
    group_id: str
    index: int
    session: str
    branch: str
    parent: int | None = None
    reason: ForkReason = ForkReason.REQUESTED
    detail: str | None = None
    metadata: dict[str, Any] = {}
    forked_at: float = 0.0
    job_seq: int = 0


class SessionEnded(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="session_ended"):
    """Event: no further turn of this session will come.

    `reward` and `turn_rewards` (turn → value) are the customer's own.  `leaf` is the turn that ends the path scorers
    see; `messages` is that path's conversation and `text` its last answer, both only where a scorer must still act, as
    are `scorers` and their `task`.
    """

    tenant: str
    run: str
    group_id: str
    index: int
    session: str
    outcome: SessionOutcome
    detail: str | None = None
    reward: float | None = None
    turn_rewards: dict[int, float] = {}
    leaf: int | None = None
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    deliverables: tuple[dict[str, Any], ...] = ()
    ended_at: float = 0.0
    job_seq: int = 0
    traceparent: str | None = None
    scorers: tuple[ScorerSpec, ...] = ()
    task: dict[str, Any] = {}
