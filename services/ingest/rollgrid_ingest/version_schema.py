"""The JSON shapes of publication: uploads, versions, rollbacks."""

from __future__ import annotations

import msgspec
from rollgrid_contracts.checkpoints import Rollout
from rollgrid_contracts.failures import ErrorInfo


class BeginRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/policies/{policy}/uploads`: all may be left out.

    `upload` is a name that all ranks agree on and no other publication uses; `world` how many ranks
    there are.  `version` asks for a number, else it is the next free one at the commit.  `base_version`
    is the full version that an adapter sits on, else the newest.  `next_within_s` promises the next push.
    """

    kind: str = "full"
    step: int | None = None
    upload: str | None = None
    world: int = 1
    version: int | None = None
    base_version: int | None = None
    next_within_s: float | None = None


class UploadAnswer(msgspec.Struct, kw_only=True):
    """The terms of an upload; from `expires_at` (UNIX seconds) on it is gone."""

    policy: str
    upload: str
    kind: str
    world: int
    base_version: int
    version: int | None
    step: int | None
    expires_at: float


class FileAnswer(msgspec.Struct, kw_only=True):
    """An uploaded file, not yet part of any version."""

    name: str
    size: int
    sha256: str


class ShardFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    size: int
    sha256: str


class ShardTensor(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`dtype` in safetensors' names; sha256 over the raw bytes."""

    name: str
    dtype: str
    shape: list[int]
    sha256: str


class ShardRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What one rank has uploaded, whole.  With the `tensors` of all ranks their digests are checked too."""

    files: list[ShardFile]
    rank: int = 0
    tensors: list[ShardTensor] | None = None


class ShardAnswer(msgspec.Struct, kw_only=True):
    """`missing` are the ranks that have not finished yet."""

    upload: str
    rank: int
    missing: list[int]


class RolloutTerms(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How the version reaches the workers: `canary` of them first, for `canary_s`; then `at_once` at a time (0 = all).

    By `deadline_s` it is everywhere, or else `on_deadline`: alarm or roll_back.
    """

    canary: int = 0
    canary_s: float = 0.0
    at_once: int = 0
    deadline_s: float = 0.0
    on_deadline: str = "alarm"


class CommitRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rollout: RolloutTerms | None = None


class CommitAnswer(msgspec.Struct, kw_only=True):
    """`created` is false when the upload had been committed before: it is the same version."""

    policy: str
    version: int
    kind: str
    manifest_key: str
    created: bool


class VersionAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`status`: verifying (published, not yet decided), desired, superseded, rolled_back (both were desired once) or refused.

    `error` says why it was refused or went back.  `rewinds` is the version desired before it, where that is of a later step.
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


class VersionList(msgspec.Struct, kw_only=True):
    """The versions whose files are kept, oldest first, from the base (0) on; `rollout` while one is on its way."""

    object: str
    policy: str
    desired: int
    newest: int
    rollout: Rollout | None
    data: list[VersionAnswer]


class RollbackRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: int
