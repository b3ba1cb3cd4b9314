"""Checkpoint versions: what exists (manifest in S3), what should run (KV `rg_policies`)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .failures import ErrorInfo


class CheckpointKind(StrEnum):
    FULL = "full"
    LORA = "lora"
    DELTA = "delta"

    @property
    def whole(self) -> bool:
        """Whether it stands for all of the weights (of a delta: once it is rebuilt).  A LoRA version lies on such a one."""
        return self is not CheckpointKind.LORA


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the new state: `dtype` in safetensors' names, digest over its raw bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    sha256: str


class AdapterInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Of a LoRA version: what its `adapter_config.json` says.  The delta is `alpha / rank · B A` (or / √rank: `rslora`)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False


class DeltaInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Of a delta: how its files lead from the weights of `base_version` to its own (`docs/reference/delta-format.md`).

    The digests are `weights_digest`s of all tensors, before and after; `target_digest` is the version's own.
    Optional: ingest's commits leave it out, and readers go by `weights_digest` and the digests in the files.
    `blob_digests` are those that the delta files carry, in the order of the files.  `changed` of `elements` differ.
    """

    codec: str
    base_digest: str
    target_digest: str
    blob_digests: tuple[str, ...] = ()
    changed: int = 0
    elements: int = 0


class OnDeadline(StrEnum):
    """What happens to a rollout that is not everywhere by its deadline."""

    ALARM = "alarm"
    ROLL_BACK = "roll_back"


class RolloutRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a publisher wants its version to reach the workers; see `Rollout`.  `deadline_s` 0 = checkpoint-sync's own."""

    canary: int = 0
    canary_s: float = 0.0
    at_once: int = 0
    deadline_s: float = 0.0
    on_deadline: OnDeadline = OnDeadline.ALARM


class CheckpointManifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`manifest.json` of one version, written last by conditional create: the version's existence.

    `version` is monotonic per policy and immutable; `prefix` is where its files are.  `base_version`
    is the full version that a LoRA version builds on, or the full or delta version that a delta was made
    against (0 = the base).  `weights_digest` is the
    digest over all tensors (`rollgrid_weights.manifest.weights_digest`): equal for equal weights.
    `next_within_s` is the publisher's promise of when the next version comes, `rollout` how it asks
    for this one to reach the workers.
    """

    schema: int = 1
    tenant: str
    policy: str
    version: int
    kind: CheckpointKind
    base_version: int | None = None
    step: int | None = None
    dtype: str = ""
    tokenizer_digest: str | None = None
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...] = ()
    created_at: float = 0.0
    prefix: str = ""
    adapter: AdapterInfo | None = None
    weights_digest: str = ""
    next_within_s: float | None = None
    rollout: RolloutRequest | None = None
    delta: DeltaInfo | None = None


class Upload(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`upload.json`: the terms that the ranks of one upload share.  UNIX seconds.

    Nothing of it is visible before the commit; from `expires_at` on everything below `upload_root` may go.
    `version` is the number asked for, None = the next free one at the commit.
    """

    tenant: str
    policy: str
    upload: str
    kind: CheckpointKind
    world: int = 1
    base_version: int = 0
    version: int | None = None
    step: int | None = None
    dtype: str = ""
    next_within_s: float | None = None
    created_at: float = 0.0
    expires_at: float = 0.0


class UploadShard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one rank has uploaded, whole; written once."""

    rank: int
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...] = ()


class AdoptedVersion(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A verified version whose files are still there: what a worker needs to stage it.  UNIX seconds.

    `going`: garbage collection means to take it off the list unless a pin stops it.  Whoever pins a
    version reads the list after writing the pin, and takes one that is going for gone.
    `rewinds`: the version desired before it, where that is of a later step: the trainer went back (0 = it did not).
    """

    version: int
    kind: CheckpointKind = CheckpointKind.FULL
    prefix: str = ""
    base_version: int = 0
    step: int | None = None
    weights_digest: str = ""
    committed_at: float = 0.0
    adopted_at: float = 0.0
    bytes: int = 0
    going: bool = False
    rewinds: int = 0


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How `version` reaches the workers: only those of `workers` may apply it, until it is desired.

    `canary` workers go first and must prove it for `canary_s`; then `at_once` workers more at a time
    (0 = all).  `previous` is what the others keep and what a roll-back returns to.  UNIX seconds.

    `held_since`: all canaries hold the version since then; `proven_at`: they have proven it (0 = not yet).
    `failure` set: nobody may apply it any more, and desired becomes `previous` once the reason is recorded
    beside the version.
    """

    version: int
    previous: int
    canary: int = 0
    canary_s: float = 0.0
    at_once: int = 0
    workers: tuple[str, ...] = ()
    started_at: float = 0.0
    proven_at: float = 0.0
    deadline: float = 0.0
    on_deadline: OnDeadline = OnDeadline.ALARM
    held_since: float = 0.0
    failure: ErrorInfo | None = None


class CheckpointPublished(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_published"):
    """Wake-up on RG_CHECKPOINTS; carries no authority, the manifest does."""

    tenant: str
    policy: str
    version: int
    manifest_key: str


class PolicyState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_policies` under `<tenant>.<policy>`; its KV revision is the policy's epoch.

    `tenant` "shared" is readable by every tenant.  `pool` serves it; `tokenizer_prefix` and
    `tokenizer_digest` pin the tokenizer in S3; `base_digest` is the sha256 of the base weights.
    `tool_parser` and `reasoning_parser` are vLLM's names of the parsers of its model family.
    `desired` is the version the fleet should run, `history` the desired versions so far, oldest first.
    `versions` are those whose files are still there, oldest first; the base (0) always is and is not listed.
    While a `rollout` is under way, its workers run its version and the others what was desired before it.
    `newest_at` is when the newest version was committed, `refresh_due` when the next was promised for.
    """

    tenant: str
    policy: str
    pool: str
    base: str
    base_digest: str
    tokenizer_prefix: str
    tokenizer_digest: str
    max_model_len: int
    vocab_size: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    kind: CheckpointKind = CheckpointKind.FULL
    desired: int = 0
    desired_prefix: str | None = None
    history: tuple[int, ...] = (0,)
    newest: int = 0
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    versions: tuple[AdoptedVersion, ...] = ()
    rollout: Rollout | None = None
    newest_at: float = 0.0
    refresh_due: float = 0.0


class Fingerprint(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_fingerprints` under `fingerprint_key`: what the version's probes must give.

    `cold` once a process that loaded the version from nothing has said so; before that it is what
    the first worker found (`reference: pending` in the records).
    """

    fingerprint: str
    cold: bool = False
    worker: str = ""
    taken_at: float = 0.0


class Pin(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_pins` under `pin_key`: a batch or an episode that needs a version until then (UNIX seconds)."""

    until: float
    batch_id: str = ""
    tenant: str = ""


def staleness(state: PolicyState, version: int) -> int:
    """Positions in the desired history between what is desired now and `version` (0 = as desired, or newer)."""
    history = state.history if state.history and state.history[-1] == state.desired else (*state.history, state.desired)
    if version == state.desired:
        return 0
    for behind, found in enumerate(reversed(history)):
        if found == version:
            return behind
    return 0 if version > state.newest else len(history)


def fingerprint_key(tenant: str, policy: str, version: int, engine_class: str) -> str:
    """`engine_class` is the digest of all that fingerprints may differ by: build, device class, dtype, parallelism."""
    return f"{tenant}.{policy}.{version}.{engine_class}"


def pin_key(tenant: str, policy: str, version: int, holder: str) -> str:
    """`tenant` and `policy` are the policy's; `holder` is a batch or a session."""
    return f"{tenant}.{policy}.{version}.{holder}"


def adapter_name(policy: str, version: int) -> str:
    """The engine's name of a LoRA version: immutable, never used for other bytes."""
    return f"{policy}@{version}"


MANIFEST_NAME = "manifest.json"
REFUSED_NAME = "refused.json"
"""Beside the manifest of a version that was refused: the `ErrorInfo` that says why, as JSON."""


def policy_root(tenant: str, policy: str) -> str:
    """Below it lies all that is published for a policy."""
    return f"checkpoints/{tenant}/{policy}/"


def version_root(tenant: str, policy: str, version: int) -> str:
    """S3 prefix of one version: its manifest lies right below it, its files below the manifest's `prefix`."""
    return f"{policy_root(tenant, policy)}{version}/"


UPLOAD_NAME = "upload.json"


def upload_root(tenant: str, policy: str, upload: str) -> str:
    """S3 prefix of one upload that is not committed: `upload.json`, `shards/<rank>.json`, `files/…`."""
    return f"{policy_root(tenant, policy)}uploads/{upload}/"
