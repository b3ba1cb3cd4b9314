"""What ingest's session routes answer.  Fields unknown to this version are ignored."""

from __future__ import annotations

from typing import Any

import msgspec
from rollgrid_contracts.episodes import MAIN_BRANCH, ForkReason
from rollgrid_contracts.jobs import VersionSpan


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/sessions`: the session is there, again or for the first time.

    `status` as in `SessionState`, `turns` that have been played.  The close of a group that is open lies behind `cursor`.
    """

    session: str
    run: str
    group_id: str
    index: int
    n: int
    policy: str = ""
    batch_id: str = ""
    model: str = ""
    expires_at: float = 0.0
    deadline: float = 0.0
    status: str = "open"
    turns: int = 0
    cursor: int = 0


class Forked(msgspec.Struct, frozen=True, kw_only=True):
    """`branch` goes on behind turn `parent` (None: the root)."""

    session: str
    branch: str
    parent: int | None = None
    reason: ForkReason = ForkReason.REQUESTED


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a session ended: closed, failed or expired, with the customer's reward if there was one."""

    session: str
    group_id: str
    index: int = 0
    outcome: str = ""
    ended_at: float = 0.0
    turns: int = 0
    leaf: int | None = None
    reward: float | None = None


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


class TurnTimes(msgspec.Struct, frozen=True, kw_only=True):
    """UNIX seconds, 0 = unknown; `gap_s` is how long the environment took before this turn."""

    dequeued_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    gap_s: float = 0.0


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that counts: what the caller added before it (`messages`, mask 0), and how many tokens were sampled (mask 1)."""

    turn: int
    parent: int | None = None
    branch: str = MAIN_BRANCH
    messages: tuple[dict[str, Any], ...] = ()
    roles: tuple[str, ...] = ()
    observation_tokens: int = 0
    closing_tokens: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parse_status: str | None = None
    tool_calls: tuple[ParsedCall, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    worker: str = ""
    attempt: int = 1
    times: TurnTimes = TurnTimes()
    sample_id: str = ""
    fork: ForkReason | None = None
    fork_detail: str | None = None
    content: str | None = None
    reasoning: str | None = None
    approvals: tuple[dict[str, Any], ...] = ()
    deliverables: tuple[dict[str, Any], ...] = ()


class UncountedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn under way (`status` open), or one that ended without tokens to go on from."""

    turn: int
    parent: int | None = None
    branch: str = MAIN_BRANCH
    status: str = "open"
    detail: str | None = None


class BranchState(msgspec.Struct, frozen=True, kw_only=True):
    """`head` is its last turn, `parent` the turn it began behind; None: the root."""

    branch: str
    head: int | None = None
    parent: int | None = None
    reason: ForkReason | None = None
    detail: str | None = None
    metadata: dict[str, Any] = {}


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """The tree of a session.  `status`: open, closed, failed, expired, or ended with its group; `tokens` counts shared prefixes once."""

    session: str
    run: str
    group_id: str
    index: int
    n: int
    status: str
    policy: str = ""
    model: str = ""
    hold: str = ""
    reasoning_history: str = ""
    on_concurrent_turn: str = ""
    ttl_s: float = 0.0
    max_turns: int = 0
    max_tokens: int = 0
    metadata: dict[str, Any] = {}
    opened_at: float = 0.0
    worker: str | None = None
    turns: int = 0
    tokens: int = 0
    depth: int = 0
    leaves: tuple[int, ...] = ()
    branches: tuple[BranchState, ...] = ()
    nodes: tuple[NodeState, ...] = ()
    open_turns: tuple[UncountedTurn, ...] = ()
    lost_turns: tuple[UncountedTurn, ...] = ()
    outcome: Ended | None = None
