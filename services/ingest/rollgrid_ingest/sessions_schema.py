"""The JSON shapes of `/v1/sessions`, and of what a turn's request may say beside an OpenAI body."""

from __future__ import annotations

from typing import Any

import msgspec

from .chat_schema import ChatRequest
from .openai_schema import CompletionRequest, GenerateRequest, SpanAnswer, WeightsRequest
from .rollout_schema import RightsRequest, ScorerRequest


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/sessions`: sample `index` of a group of `n`, played in turns.

    `group` is the caller's label of the group: sessions that name the same run and label are one group (absent: a
    group of its own).  `model` and `policy` are two names of one field.  `hold`: pin or float; `weights` as of a
    rollout, for every turn.  `reasoning_history`: keep or template; `on_concurrent_turn`: refuse or fork.  `ttl_s` counts from
    the last turn, `deadline_s` from the opening, for the whole group.  `max_turns` and `max_tokens` bound this
    session.  `task`, `scorers`, `rights`, `engagement_id` and `record_format` are the group's.  `user` is ignored.
    """

    run: str | None = None
    group: str | None = None
    index: int = 0
    n: int = 1
    model: str | None = None
    policy: str | None = None
    hold: str | None = None
    weights: WeightsRequest | None = None
    reasoning_history: str | None = None
    on_concurrent_turn: str | None = None
    ttl_s: float | None = None
    deadline_s: float | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    task: dict[str, Any] | None = None
    scorers: list[str | ScorerRequest] | None = None
    rights: RightsRequest | None = None
    engagement_id: str | None = None
    record_format: str | None = None
    user: Any = None


class SessionAnswer(msgspec.Struct, kw_only=True):
    """201: the session is open; 200: it was opened before, `status` says whether it still is, `turns` how many it has.

    `base_path` is the OpenAI base of its main branch.  Times are UNIX seconds.  The group's close lies behind `cursor`
    in the run's trajectories, unless the group had closed before this answer (200).
    """

    session: str
    status: str
    turns: int
    run: str
    group_id: str
    batch_id: str
    index: int
    n: int
    policy: str
    model: str
    base_path: str
    expires_at: float
    deadline: float
    cursor: int


class ForkRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/sessions/{session}/fork`.  `from_turn` (or `from`) is a turn, or null for the root; absent: the last of
    `branch` (absent: main).

    `reason`: requested, best_of_n, explore, retry, sub_agent or compaction.  `name` of the new branch; absent: one is made.
    """

    from_turn: int | msgspec.UnsetType | None = msgspec.UNSET
    from_: int | msgspec.UnsetType | None = msgspec.field(default=msgspec.UNSET, name="from")
    branch: str | None = None
    name: str | None = None
    reason: str | None = None
    detail: str | None = None
    metadata: dict[str, Any] | None = None


class ForkAnswer(msgspec.Struct, kw_only=True):
    """201: `branch` goes on behind turn `parent` (null: the root)."""

    session: str
    branch: str
    parent: int | None
    reason: str
    base_path: str


class CloseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/sessions/{session}/close`, optional body.  `reward` and `turn_rewards` (turn → value) are the caller's own.

    `outcome`: closed or failed.  `leaf` is the turn that ends the path scorers see; absent: the head of the main branch.
    """

    outcome: str | None = None
    detail: str | None = None
    reward: float | None = None
    turn_rewards: dict[str, float] | None = None
    leaf: int | None = None
    deliverables: list[dict[str, Any]] | None = None


class CloseAnswer(msgspec.Struct, kw_only=True):
    """The session has ended; a repeat answers with how it did."""

    session: str
    group_id: str
    index: int
    outcome: str
    ended_at: float
    turns: int
    leaf: int | None = None
    reward: float | None = None


class CallAnswer(msgspec.Struct, kw_only=True):
    """A tool call of a turn as it was parsed."""

    id: str | None
    name: str | None
    arguments: str | None


class TurnTimes(msgspec.Struct, kw_only=True):
    """UNIX seconds, 0 = unknown; `gap_s` between the end of the parent and this turn's request."""

    dequeued_at: float
    started_at: float
    first_token_at: float
    finished_at: float
    gap_s: float


class NodeAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A turn that counts.  `messages` are those the caller added; `observation_tokens` are their ids (mask 0), the first
    `closing_tokens` of which end the parent's turn; `tokens` were sampled (mask 1).  Ids only with `token_ids=true`.
    """

    turn: int
    parent: int | None
    branch: str
    messages: list[dict[str, Any]]
    roles: list[str]
    observation_tokens: int
    closing_tokens: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None
    parse_status: str | None
    tool_calls: list[CallAnswer]
    weight_versions: list[SpanAnswer]
    worker: str
    attempt: int
    times: TurnTimes
    sample_id: str
    fork: str | None = None
    fork_detail: str | None = None
    content: str | None = None
    reasoning: str | None = None
    approvals: list[dict[str, Any]] = []
    deliverables: list[dict[str, Any]] = []
    observation_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class LostTurnAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A turn that ended without tokens to go on from."""

    turn: int
    parent: int | None
    branch: str
    status: str
    detail: str | None = None


class OpenTurnAnswer(msgspec.Struct, kw_only=True):
    """A turn that has begun and not ended."""

    turn: int
    parent: int | None
    branch: str


class BranchAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`head` is its last turn, `parent` the turn it began behind; null: the root."""

    branch: str
    head: int | None
    parent: int | None
    base_path: str
    reason: str | None = None
    detail: str | None = None
    metadata: dict[str, Any] = {}


class SessionState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tree and its state.  `status`: open, closed, failed, expired, or ended with its group; `tokens` counts shared prefixes once."""

    session: str
    run: str
    group_id: str
    index: int
    n: int
    policy: str
    model: str
    status: str
    hold: str
    reasoning_history: str
    on_concurrent_turn: str
    ttl_s: float
    max_turns: int
    max_tokens: int
    metadata: dict[str, Any]
    opened_at: float
    expires_at: float
    worker: str | None
    turns: int
    tokens: int
    depth: int
    leaves: list[int]
    branches: list[BranchAnswer]
    nodes: list[NodeAnswer]
    open_turns: list[OpenTurnAnswer]
    lost_turns: list[LostTurnAnswer]
    outcome: CloseAnswer | None = None


class ChatTurnRequest(ChatRequest, kw_only=True):
    """As `ChatRequest`, `n` 1 only; `approvals` and `deliverables` are kept with the turn.

    `messages` is the whole history.  `return_token_ids` is on unless it is false.
    """

    approvals: list[dict[str, Any]] | None = None
    deliverables: list[dict[str, Any]] | None = None


class CompletionTurnRequest(CompletionRequest, kw_only=True):
    """As `CompletionRequest`, one prompt and `n` 1 only.  `prompt` as token ids is the whole prompt, which begins with the
    branch's tokens or forks; as text it must begin with the branch's own text.  `observation_token_ids`: only the new ids.
    """

    observation_token_ids: list[int] | None = None
    approvals: list[dict[str, Any]] | None = None
    deliverables: list[dict[str, Any]] | None = None
    prompt: str | list[str | int | list[int]] = ""


class GenerateTurnRequest(GenerateRequest, kw_only=True):
    """As `GenerateRequest`, `n` 1 only.  `token_ids` is the whole prompt, which begins with the branch's tokens or forks;
    or, in its stead, `observation_token_ids`: only the new ids.
    """

    observation_token_ids: list[int] | None = None
    approvals: list[dict[str, Any]] | None = None
    deliverables: list[dict[str, Any]] | None = None
    token_ids: list[int] = msgspec.field(default_factory=list)
