"""What ingest's rollout routes answer.  Fields unknown to this version are ignored."""

from __future__ import annotations

from typing import Any

import msgspec
from rollgrid_contracts.checkpoints import Rollout
from rollgrid_contracts.failures import ErrorInfo
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.trajectories import GroupClosed, RewardsPosted


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One served model, as in `GET /v1/models`."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    root: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[Model, ...]


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/rollouts`: durably accepted.  Read results after `cursor`."""

    batch_id: str
    run: str
    policy: str = ""
    cursor: int = 0
    group_ids: tuple[str, ...] = ()
    n: int = 0
    deadline: float = 0.0


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a batch stands.

    `counts` are ended samples by status, `finished` those generated so far; `cursor` is that of its
    latest close.
    """

    batch_id: str
    run: str = ""
    groups: int = 0
    closed: int = 0
    samples: int = 0
    finished: int = 0
    counts: dict[str, int] = {}
    done: bool = False
    cursor: int = 0
    deadline: float = 0.0


class PageItem(msgspec.Struct, frozen=True, kw_only=True):
    cursor: int
    group: GroupClosed
    staleness: int | None = None


class StandingReward(msgspec.Struct, frozen=True, kw_only=True):
    """The latest reward under one `name` posted onto the sample `index`, and the post that said so."""

    index: int
    name: str = "reward"
    kind: str = "scalar"
    value: float | None = None
    turn_values: tuple[float | None, ...] = ()
    detail: str | None = None
    source: str = "customer"
    posted_at: float = 0.0
    cursor: int = 0


class GroupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One group: closed with its `cursor`, or still open (`group` is None) with the indexes `done` so far."""

    cursor: int = 0
    group: GroupClosed | None = None
    n: int = 0
    done: tuple[int, ...] = ()
    posted_rewards: tuple[StandingReward, ...] = ()


class Posted(msgspec.Struct, frozen=True, kw_only=True):
    """A post is stored durably at `cursor`; `duplicate` when it was before."""

    group_id: str
    run: str = ""
    cursor: int = 0
    duplicate: bool = False


class RunPosted(msgspec.Struct, frozen=True, kw_only=True):
    """Posts onto several groups of a run, in the order they were sent."""

    run: str
    posts: tuple[Posted, ...] = ()
    cursor: int = 0


class PostItem(msgspec.Struct, frozen=True, kw_only=True):
    cursor: int
    post: RewardsPosted


class PostPage(msgspec.Struct, frozen=True, kw_only=True):
    """Posts behind the asked cursor, oldest first; `cursor` is where to go on."""

    posts: tuple[PostItem, ...] = ()
    cursor: int = 0
    done: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token_id: int
    logprob: float


class ScoredTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per token in each list; the first token has no predecessor, so None.

    `ranks` count from 1 = the most likely.  `top_logprobs` are the likeliest tokens in each place.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    ranks: tuple[int | None, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    weight_fingerprint: str | None = None


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/score_tokens`: one entry per list of ids."""

    data: tuple[ScoredTokens, ...] = ()
    logprobs_mode: str = ""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that closed after the asked cursor, oldest first.

    `cursor` is where to go on; `done` says that nothing will ever follow (a batch whose groups have
    all been read).
    """

    groups: tuple[PageItem, ...] = ()
    cursor: int = 0
    done: bool = False


class LiveVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is kept, or that some worker still runs.

    `workers` hold it, `current_on` of them give it to new requests; `confirmed`: what they compute with it equals a
    cold load.  `staleness` is its distance from the desired one.  UNIX seconds, 0 = unknown.
    """

    version: int
    kind: str = "full"
    base_version: int = 0
    step: int | None = None
    staleness: int = 0
    desired: bool = False
    kept: bool = True
    workers: int = 0
    current_on: int = 0
    fingerprints: tuple[str, ...] = ()
    confirmed: bool = False
    committed_at: float = 0.0
    adopted_at: float = 0.0
    bytes: int = 0
    weights_digest: str | None = None


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy: which version should run (`desired`), the newest published, and what workers run."""

    policy: str
    tenant: str = "shared"
    desired: int = 0
    newest: int = 0
    history: tuple[int, ...] = (0,)
    pool: str = ""
    base: str = ""
    dtype: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    workers: tuple[WorkerState, ...] = ()
    kind: str = "full"
    rollout: Rollout | None = None
    newest_at: float = 0.0
    refresh_due: float = 0.0
    revision: int = 0
    versions: tuple[LiveVersion, ...] = ()


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[Policy, ...]


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are there now, policies, and each stream with how far its readers are behind."""

    workers: tuple[WorkerState, ...] = ()
    policies: tuple[Policy, ...] = ()
    queues: dict[str, dict[str, Any]] = {}
    ledger: dict[str, Any] = {}


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An upload that was begun; from `expires_at` (UNIX seconds) on it is gone."""

    policy: str
    upload: str
    kind: str = "full"
    world: int = 1
    base_version: int = 0
    version: int | None = None
    expires_at: float = 0.0


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the server took it."""

    name: str
    size: int
    sha256: str


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A version exists; `created` is false when it did before."""

    policy: str
    version: int
    kind: str = "full"
    created: bool = True


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Where a published version stands: verifying, desired, superseded, rolled_back or refused (with its `error`).

    `rewinds` is the version desired before it, where that is of a later step: the trainer went back.
    """

    policy: str
    version: int
    status: str
    error: ErrorInfo | None = None
    kind: str | None = None
    base_version: int | None = None
    step: int | None = None
    bytes: int | None = None
    weights_digest: str | None = None
    committed_at: float | None = None
    adopted_at: float | None = None
    rewinds: int | None = None


class VersionList(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that are kept, oldest first, from the base (0) on; `rollout` while one is on its way."""

    policy: str
    desired: int = 0
    newest: int = 0
    rollout: Rollout | None = None
    data: tuple[Version, ...] = ()
