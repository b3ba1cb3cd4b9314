"""The JSON shapes of the rollout doors: `/v1/rollouts`, results, groups, policies, fleet."""

from __future__ import annotations

from typing import Any

import msgspec
from rollgrid_contracts.checkpoints import Rollout
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.trajectories import GroupClosed

from .openai_schema import WeightsRequest
from .policy_answers import LiveVersion
from .sampling import SamplingFields


class ScorerRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One scorer by its registered `type`; `name` (default: the type) is unique in the task."""

    type: str
    name: str | None = None
    kind: str | None = None
    params: dict[str, Any] | None = None
    weight: float | None = None
    gate: bool | None = None
    timeout_s: float | None = None


class RightsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    purposes: list[str]
    grant_id: str | None = None


class PaceRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`batch` groups are trained on with each version; sampling runs at most `max_staleness` versions ahead."""

    batch: int
    max_staleness: int


class TaskRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One group: exactly one of `prompt`, `messages` and `prompt_token_ids`.

    `task` is what scorers get (answer, dataset, …), `metadata` is returned untouched; the other
    fields override those of the batch.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    n: int | None = None
    sampling: SamplingFields | None = None
    scorers: list[str | ScorerRequest] | None = None
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    deadline_s: float | None = None


class RolloutRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/rollouts`, and the body of a message to the queue door.

    `model` and `policy` are two names of one field.  `record_format` (msgpack or json) is how closed
    groups are stored for readers of the stream; `idempotency_key` is the header of that name for
    clients that cannot send one.  `pin`: one version makes each group; `on_refresh` (wait, abort or keep)
    is what happens to samples in flight when new weights come.  `user` is accepted and ignored.
    """

    run: str
    tasks: list[TaskRequest]
    model: str | None = None
    policy: str | None = None
    n: int | None = None
    sampling: SamplingFields | None = None
    scorers: list[str | ScorerRequest] | None = None
    metadata: dict[str, Any] | None = None
    deadline_s: float | None = None
    priority: str | None = None
    weights: WeightsRequest | None = None
    pin: bool | None = None
    on_refresh: str | None = None
    pace: PaceRequest | None = None
    rights: RightsRequest | None = None
    engagement_id: str | None = None
    cache_salt: str | None = None
    reward_formula: str | None = None
    record_format: str | None = None
    idempotency_key: str | None = None
    user: Any = None


class AcceptedAnswer(msgspec.Struct, kw_only=True):
    """202: the jobs are stored durably.  Results come behind `cursor`."""

    batch_id: str
    run: str
    policy: str
    cursor: int
    group_ids: list[str]
    n: int
    deadline: float


class ProgressAnswer(msgspec.Struct, kw_only=True):
    """`finished` samples have been generated, `counts` are ended ones by status; `done` when all groups closed."""

    batch_id: str
    run: str
    status: str
    groups: int
    closed: int
    samples: int
    finished: int
    counts: dict[str, int]
    done: bool
    cursor: int


class PageItem(msgspec.Struct, kw_only=True):
    """A closed group under its cursor, the RG_TRAJECTORIES sequence.

    `staleness`: positions between the version desired now and the oldest that made any token; null = no token.
    """

    cursor: int
    group: GroupClosed
    staleness: int | None = None


class RawPageItem(msgspec.Struct, kw_only=True):
    """`PageItem` with the group as stored, not decoded."""

    cursor: int
    group: msgspec.Raw
    staleness: int | None = None


class PageAnswer(msgspec.Struct, kw_only=True):
    """Closed groups in order; read on behind `cursor`; `done` when nothing will follow (batches only)."""

    groups: list[PageItem]
    cursor: int
    done: bool


class RawPageAnswer(msgspec.Struct, kw_only=True):
    groups: list[RawPageItem]
    cursor: int
    done: bool


class OpenGroupAnswer(msgspec.Struct, kw_only=True):
    """202: the group has not closed yet; `done` are the indexes generated so far."""

    group_id: str
    batch_id: str
    run: str
    status: str
    n: int
    done: list[int]


class CancelRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of a cancel, optional: only these groups of the batch."""

    group_ids: list[str] | None = None
    reason: str | None = None


class CancelAnswer(msgspec.Struct, kw_only=True):
    batch_id: str
    status: str


class PolicyAnswer(msgspec.Struct, kw_only=True):
    """`desired` should run, `newest` is the last published, `workers` say what they run.

    `rollout` while a version is on its way; `newest_at` and `refresh_due` are UNIX seconds, 0 = unknown, none promised.
    """

    policy: str
    tenant: str
    pool: str
    base: str
    kind: str
    dtype: str
    desired: int
    newest: int
    history: list[int]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    aliases: list[str]
    tokenizer_digest: str
    revision: int
    workers: list[WorkerState]
    rollout: Rollout | None = None
    newest_at: float = 0.0
    refresh_due: float = 0.0
    versions: list[LiveVersion] = []


class PolicyList(msgspec.Struct, kw_only=True):
    object: str
    data: list[PolicyAnswer]


class QueueAnswer(msgspec.Struct, kw_only=True):
    """One stream and how far each of its durables is behind."""

    messages: int
    bytes: int
    max_bytes: int
    first_seq: int
    last_seq: int
    consumers: dict[str, dict[str, int]]


class FleetAnswer(msgspec.Struct, kw_only=True):
    workers: list[WorkerState]
    policies: list[PolicyAnswer]
    queues: dict[str, QueueAnswer]
    ledger: dict[str, Any]


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    message: str
    type: str
    param: str | None
    code: str
    retryable: bool
    boundary: str
    limit: str | None = None
    request_id: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The OpenAI error envelope; `code` is stable, `param` the field, `limit` the bound it broke."""

    error: ErrorBody
