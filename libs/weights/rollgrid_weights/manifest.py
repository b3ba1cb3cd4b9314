"""Manifests: what one checkpoint version consists of, built from a folder and verified against one."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollgrid_contracts import codec
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, TensorInfo

from .errors import invalid
from .names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DELTA,
    SAFETENSORS,
    SIDE_FILES,
    check_file_name,
    is_delta,
    is_weights,
)
from .tensors import file_info, tensor_infos

MAX_STEP = 2**63 - 1


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder by name; raises WeightsError when there is none."""
    found = sorted(path for path in folder.iterdir() if is_weights(path.name) and path.is_file())
    if not found:
        raise invalid(f"{folder.name} contains no *.safetensors file", folder.name)
    return found


def build_manifest(
    folder: Path,
    *,
    tenant: str,
    policy: str,
    version: int,
    kind: CheckpointKind = CheckpointKind.FULL,
    step: int | None = None,
    dtype: str = "",
    base_version: int | None = None,
) -> CheckpointManifest:
    """The manifest of a folder: its safetensors and the side files beside them; other files are left out.

    Raises WeightsError for malformed or non-finite tensors and for a tensor that two files carry.
    """
    weights = weight_files(folder)
    wanted = SIDE_FILES if kind is CheckpointKind.LORA else SIDE_FILES - {ADAPTER_CONFIG}
    side = [folder / name for name in sorted(wanted) if (folder / name).is_file()]
    return CheckpointManifest(
        tenant=tenant,
        policy=policy,
        version=version,
        kind=kind,
        base_version=base_version,
        step=step,
        dtype=dtype,
        files=tuple(file_info(path) for path in [*weights, *side]),
        tensors=folder_tensors(weights),
        created_at=time.time(),
    )


def folder_tensors(weights: Sequence[Path], *, finite: bool = True) -> tuple[TensorInfo, ...]:
    """The tensors of several files, sorted by name.  Raises WeightsError as `build_manifest`."""
    found: dict[str, TensorInfo] = {}
    for path in weights:
        for info in tensor_infos(path, finite=finite):
            if info.name in found:
                raise invalid(f"tensor {info.name!r} is in more than one file", info.name)
            found[info.name] = info
    return tuple(found[name] for name in sorted(found))


def weights_digest(tensors: Iterable[TensorInfo]) -> str:
    """sha256 over names, dtypes, shapes and digests: equal for equal weights, however they are sharded."""
    lines = sorted(f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.sha256}\n" for tensor in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Raises WeightsError unless every file of the manifest is there with its size and digest."""
    check_manifest(manifest)
    for expected in manifest.files:
        path = folder / expected.name
        if not path.is_file():
            raise invalid(f"file {expected.name} is missing", expected.name)
        size = path.stat().st_size
        if size != expected.size:
            raise invalid(f"file {expected.name} has {size} bytes, its manifest says {expected.size}", expected.name)
        if file_info(path).sha256 != expected.sha256:
            raise invalid(f"file {expected.name} does not match the digest of its manifest", expected.name)


def check_manifest(manifest: CheckpointManifest) -> None:
    """What can be checked without the files: their names, each once, and that weights are among them."""
    names = [file.name for file in manifest.files]
    for name in names:
        check_file_name(name)
    if len(set(names)) != len(names):
        raise invalid("the manifest names a file twice", "files")
    _check_kind(manifest, names)
    if (ADAPTER_CONFIG in names) != (manifest.kind is CheckpointKind.LORA):
        there = "holds" if ADAPTER_CONFIG in names else "lacks"
        raise invalid(f"a {manifest.kind.value} version {there} {ADAPTER_CONFIG}", ADAPTER_CONFIG)
    weights = [name for name in names if is_weights(name)]
    if manifest.kind is CheckpointKind.LORA and weights != [ADAPTER_WEIGHTS]:
        raise invalid(f"the tensors of an adapter are in {ADAPTER_WEIGHTS} alone", "files")
    if any(file.size < 0 for file in manifest.files):
        raise invalid("the manifest names a file of negative size", "files")
    if manifest.step is not None and not 0 <= manifest.step <= MAX_STEP:  # what KV can hold
        raise invalid(f"step is not in 0..{MAX_STEP}", "step")
    if manifest.next_within_s is not None and not 0 < manifest.next_within_s < math.inf:
        raise invalid("next_within_s is not a positive number of seconds", "next_within_s")


def _check_kind(manifest: CheckpointManifest, names: Sequence[str]) -> None:
    """A delta consists of delta files and says what they lead to; everything else of tensors."""
    is_made_of, suffix = (is_delta, DELTA) if manifest.kind is CheckpointKind.DELTA else (is_weights, SAFETENSORS)
    other = is_weights if manifest.kind is CheckpointKind.DELTA else is_delta
    if not any(map(is_made_of, names)):
        raise invalid(f"the manifest names no *{suffix} file", "files")
    if any(map(other, names)):
        raise invalid(f"a {manifest.kind.value} version consists of *{suffix} files alone", "files")
    if manifest.kind is CheckpointKind.DELTA and (manifest.base_version is None or not manifest.weights_digest):
        field = "base_version" if manifest.base_version is None else "tensors"
        raise invalid(f"a delta version needs {field}: what it goes on from, and leads to", field)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """As stored under `manifest.json`."""
    return codec.encode(manifest, codec.JSON)


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Raises WeightsError for anything that is no manifest of a known schema."""
    try:
        manifest = codec.decode(data, CheckpointManifest, codec.JSON)
    except (ValueError, RecursionError) as error:
        raise invalid(f"manifest.json is not valid: {error}", "manifest.json") from None
    if manifest.schema != 1:
        raise invalid(f"manifest.json has schema {manifest.schema}, known is 1", "manifest.json")
    return manifest
