"""Checkpoint versions: what exists (manifest in S3), what should run (KV `rg_policies`)."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class CheckpointKind(StrEnum):
    FULL = "full"
    LORA = "lora"
    DELTA = "delta"


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


class CheckpointManifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`manifest.json` of one version, written last by conditional create: the version's existence.

    `version` is monotonic per policy and immutable; `prefix` is where its files are.
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


MANIFEST_NAME = "manifest.json"
REFUSED_NAME = "refused.json"
"""Beside the manifest of a version that was refused: the `ErrorInfo` that says why, as JSON."""


def version_root(tenant: str, policy: str, version: int) -> str:
    """S3 prefix of one version: its manifest lies right below it, its files below the manifest's `prefix`."""
    return f"checkpoints/{tenant}/{policy}/{version}/"
