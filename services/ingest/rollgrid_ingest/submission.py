"""What a door hands to the handler: one checked, rendered request of one tenant."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.jobs import (
    OnRefresh,
    ParsingSpec,
    Priority,
    Reply,
    Rights,
    SamplingParams,
    Session,
    WeightConstraint,
    turn_call,
)
from rollgrid_contracts.scoring import ScorerSpec

_batch_id = lru_cache(maxsize=1024)(ids.batch_id)
_group_id = lru_cache(maxsize=8192)(ids.group_id)
"""A request asks for its ids several times, and each is a sha256."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One group, checked against its policy; `deadline_s` counts from the submission."""

    prompt_token_ids: TokenIds
    n: int
    sampling: SamplingParams
    deadline_s: float
    prompt_text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    scorers: tuple[ScorerSpec, ...] = ()
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    parsing: ParsingSpec | None = None


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run may sample ahead of its training: `batch` groups are trained on with each version."""

    batch: int
    max_staleness: int


class TurnPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which turn of which sample a submission is; `batch_id` and `n` are those of the sample's group."""

    batch_id: str
    group_id: str
    index: int
    n: int
    session: Session

    @property
    def call_id(self) -> str:
        return turn_call(self.session.session, self.session.turn)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """`key` names the request and so its ids; `idempotent` when it is the client's own idempotency key.
    `digest` is that of the request's body; `stored` when RG_SUBMIT holds it until its jobs are stored.
    `weights_field` is where the request names the versions it wants.
    A session's turn (`turn`) is one group of one sample that goes by its `call_id`.  Calls of one `affinity` go to one
    worker, and are nothing else to each other."""

    tenant: str
    run: str
    policy: PolicyState
    model: str
    groups: tuple[GroupSpec, ...]
    digest: str
    key: str
    idempotent: bool = False
    priority: Priority = Priority.NORMAL
    weights: WeightConstraint = WeightConstraint()
    weights_field: str = "weights"
    pinned: bool = False
    on_refresh: OnRefresh | None = None
    pace: Pace | None = None
    rights: Rights
    engagement_id: str | None = None
    cache_salt: str | None = None
    reply: Reply = Reply.NONE
    traceparent: str | None = None
    record_format: str = "msgpack"
    stored: bool = False
    turn: TurnPlace | None = None
    affinity: str | None = None

    @property
    def batch_id(self) -> str:
        if self.turn is not None:
            return self.turn.call_id
        return _batch_id(self.tenant, self.run, self.key)

    @property
    def group_ids(self) -> list[str]:
        if self.turn is not None:
            return [self.turn.call_id]
        return [_group_id(self.tenant, self.run, self.key, position) for position in range(len(self.groups))]

    @property
    def first_index(self) -> int:
        """The index by which workers know the first sample of each group."""
        return 0 if self.turn is None else self.turn.index

    def sample_id(self, group_id: str, index: int) -> str:
        """The id of a sample of one of the groups, or of the turn."""
        if self.turn is not None:
            return ids.turn_id(self.turn.group_id, self.turn.index, self.turn.session.turn)
        return ids.sample_id(group_id, index)

    @property
    def samples(self) -> int:
        return sum(group.n for group in self.groups)


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs are stored.  `fresh` is False for a repeated idempotency key; `job_seq` the last RG_JOBS sequence."""

    batch_id: str
    run: str
    cursor: int
    group_ids: tuple[str, ...]
    deadline: float
    fresh: bool
    job_seq: int


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """What a door takes from the request beside its body; `record_format` where the body names none.

    `queued`: RG_SUBMIT holds it, and its key says where.
    """

    tenant: str
    run: str = ""
    key: str = ""
    idempotent: bool = False
    queued: bool = False
    digest: str = ""
    traceparent: str | None = None
    record_format: str = "msgpack"
    affinity: str | None = None

    @property
    def named(self) -> bool:
        """Whether the same request, sent again, names the same batch."""
        return self.idempotent or self.queued
