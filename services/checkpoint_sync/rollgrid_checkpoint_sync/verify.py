"""Whether a published version may run: its files are fetched and checked before anybody is told to load them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from rollgrid_contracts.checkpoints import (
    CheckpointKind,
    CheckpointManifest,
    PolicyState,
    TensorInfo,
    policy_root,
    version_root,
)
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import RollgridError, StorageError
from rollgrid_weights.adapter import MAX_RANK
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import check_manifest, weights_digest
from rollgrid_weights.rebuilding import Known
from rollgrid_weights.validation import DTYPES, validate_rebuilt, validate_version

from .register import LocalModel
from .states import States

SPARE_BYTES = 256 * 1024 * 1024
"""Free space left on the scratch folder's disk."""


class Refused(RollgridError):
    """The version will never run; the reason is recorded for its publisher."""

    def __init__(self, code: ErrorCode, message: str, field: str | None = None, limit: str | None = None) -> None:
        super().__init__(code, message, boundary=Boundary.WEIGHTS, field=field, limit=limit)


class Verified(NamedTuple):
    """A version that may run: its manifest, where its files are, the digest over its tensors."""

    manifest: CheckpointManifest
    prefix: str
    weights_digest: str

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.manifest.files)


async def verify(
    blobs: Blobs,
    state: PolicyState,
    model: LocalModel,
    version: int,
    scratch: Path | None,
    states: States,
    *,
    max_lora_rank: int = MAX_RANK,
) -> Verified:
    """Check a version whole; a delta as the state that it leads to.

    Raises Refused when it can never run, StorageError when S3 or the disk fails (try again).
    """
    try:
        known = await states.find(state, version)
        manifest = known.manifest
        _check_identity(manifest, state, version)
        check_manifest(manifest)
        _check_base(manifest, state)
        prefix = _prefix(manifest, version_root(state.tenant, state.policy, version))
        delta = manifest.kind is CheckpointKind.DELTA
        present = frozenset(await blobs.keys(policy_root(state.tenant, state.policy) if delta else prefix))
        _check_present(present, manifest, prefix)
        if delta:
            await states.check_chain(state, known, present)
            tensors = await _validate_rebuilt(state, model, known, states)
        else:
            tensors = await _fetch_and_validate(blobs, state, model, manifest, prefix, scratch, max_lora_rank)
    except WeightsError as error:
        if error.code is ErrorCode.STORAGE_ERROR:  # of this disk: no fault of the version
            raise StorageError(error.message) from error
        raise Refused(error.code, error.message, error.field, error.limit) from error
    return Verified(manifest, prefix, weights_digest(tensors))


def _check_identity(manifest: CheckpointManifest, state: PolicyState, version: int) -> None:
    claimed = (manifest.tenant, manifest.policy, manifest.version)
    if claimed != (state.tenant, state.policy, version):
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"the manifest is of {manifest.tenant}/{manifest.policy}/{manifest.version}, stored as version {version}",
            "version",
        )
    if manifest.tokenizer_digest not in (None, state.tokenizer_digest):
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"the version was trained with tokenizer {manifest.tokenizer_digest}, the policy has {state.tokenizer_digest}",
            "tokenizer_digest",
        )


def _check_base(manifest: CheckpointManifest, state: PolicyState) -> None:
    """An adapter sits on, and a delta goes on from, a full or delta version whose files are there (0 = the base)."""
    base = manifest.base_version or 0
    whole = {adopted.version for adopted in state.versions if adopted.kind.whole}
    if manifest.kind is not CheckpointKind.FULL and base and base not in whole:
        raise Refused(
            ErrorCode.VERSION_UNAVAILABLE,
            f"version {manifest.version} sits on version {base}, which is no full or delta version that is kept",
            "base_version",
        )


def _prefix(manifest: CheckpointManifest, key: str) -> str:
    """Where the files are: in the version's own folder or below it."""
    prefix = (manifest.prefix or key).rstrip("/") + "/"
    if not prefix.startswith(key) or ".." in prefix:
        raise Refused(ErrorCode.FORBIDDEN, f"the files of a version are below {key}, not {prefix[:200]}", "prefix")
    return prefix


def _check_present(present: Collection[str], manifest: CheckpointManifest, prefix: str) -> None:
    for file in manifest.files:
        if prefix + file.name not in present:
            raise Refused(ErrorCode.NOT_FOUND, f"file {file.name} was never uploaded", file.name)


async def _validate_rebuilt(
    state: PolicyState, model: LocalModel, known: Known, states: States
) -> tuple[TensorInfo, ...]:
    folder = await states.rebuilt(state, known, model.folder)
    return await asyncio.to_thread(
        validate_rebuilt, folder, known.manifest, model.tensors, dtypes=_dtypes(state), tied=model.tied
    )


def _dtypes(state: PolicyState) -> tuple[str, ...]:
    return (DTYPES[state.dtype],) if state.dtype in DTYPES else ()


async def _fetch_and_validate(
    blobs: Blobs,
    state: PolicyState,
    model: LocalModel,
    manifest: CheckpointManifest,
    prefix: str,
    scratch: Path | None,
    max_lora_rank: int,
) -> tuple[TensorInfo, ...]:
    folder = await asyncio.to_thread(_scratch_folder, scratch)
    try:
        needed = sum(file.size for file in manifest.files) + SPARE_BYTES
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise StorageError(f"{folder.parent} has {free} bytes free, verifying needs {needed}")
        for file in manifest.files:
            await blobs.download(prefix + file.name, folder / file.name)
        return await asyncio.to_thread(
            validate_version,
            folder,
            manifest,
            model.tensors,
            dtypes=_dtypes(state),
            tied=model.tied,
            max_rank=max_lora_rank,
        )
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _scratch_folder(scratch: Path | None) -> Path:
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="rollgrid-verify-", dir=scratch))
