"""Whether a published version can be served on its base: a full one in its place (same tensors, same shapes), an adapter upon it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rollgrid_contracts.checkpoints import AdapterInfo, CheckpointKind, CheckpointManifest, TensorInfo
from rollgrid_contracts.failures import ErrorCode

from .adapter import MAX_RANK, check_adapter, parse_config
from .errors import WeightsError, invalid
from .manifest import check_manifest, folder_tensors, verify_files, weight_files, weights_digest
from .names import ADAPTER_CONFIG, is_weights
from .safetensors_header import TensorEntry, read_header

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Serving dtypes under torch's names → safetensors' names."""

TIED_HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight")


def validate_version(
    folder: Path,
    manifest: CheckpointManifest,
    base: Mapping[str, TensorInfo],
    *,
    dtypes: Collection[str] = (),
    tied: bool = False,
    max_rank: int = MAX_RANK,
) -> tuple[TensorInfo, ...]:
    """Check the files of a version in `folder` against its manifest and the base's tensors.

    A full version's tensor has the dtype of its base's or one of `dtypes`.  With `tied`,
    `lm_head.weight` may be absent, or present with exactly the bytes of the embedding.  An adapter is
    plain LoRA up to `max_rank` (`adapter`).  Gives the tensors' digests.

    Raises WeightsError: a missing, altered, malformed or disallowed file, a tensor that is missing,
    unknown, of another shape or dtype, not finite, or not what the manifest's own digests say.
    """
    if manifest.kind not in (CheckpointKind.FULL, CheckpointKind.LORA):
        raise WeightsError(ErrorCode.UNSUPPORTED, f"kind {manifest.kind.value} is not supported yet", field="kind")
    check_manifest(manifest)
    weights = [folder / file.name for file in manifest.files if is_weights(file.name)]
    for path in weights:
        if not path.is_file():
            raise invalid(f"file {path.name} is missing", path.name)
    # cheap, and before a byte is loaded
    if manifest.kind is CheckpointKind.LORA:
        check_adapter(_headers(weights), _adapter_info(folder, manifest, max_rank), base)
    else:
        check_tensors(_headers(weights), base, dtypes=dtypes, tied=tied)
    verify_files(folder, manifest)
    tensors = folder_tensors(weights)
    _check_digests(tensors, manifest)
    if tied and manifest.kind is CheckpointKind.FULL:
        _check_tied_head(tensors)
    return tensors


def validate_rebuilt(
    folder: Path,
    manifest: CheckpointManifest,
    base: Mapping[str, TensorInfo],
    *,
    dtypes: Collection[str] = (),
    tied: bool = False,
) -> tuple[TensorInfo, ...]:
    """As `validate_version`, of the state in `folder` that a delta version leads to."""
    weights = weight_files(folder)
    check_tensors(_headers(weights), base, dtypes=dtypes, tied=tied)
    tensors = folder_tensors(weights)
    _check_digests(tensors, manifest)
    if tied:
        _check_tied_head(tensors)
    return tensors


def _adapter_info(folder: Path, manifest: CheckpointManifest, max_rank: int) -> AdapterInfo:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise invalid(f"file {ADAPTER_CONFIG} is missing", ADAPTER_CONFIG)
    info = parse_config(path.read_bytes(), max_rank=max_rank)
    if manifest.adapter not in (None, info):
        raise invalid(f"the manifest does not say what {ADAPTER_CONFIG} says", "adapter")
    return info


def _headers(weights: Sequence[Path]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for path in weights:
        for name, entry in read_header(path).items():
            if name in found:
                raise invalid(f"tensor {name!r} is in more than one file", name)
            found[name] = entry
    return found


def check_tensors(
    found: Mapping[str, TensorEntry],
    base: Mapping[str, TensorInfo],
    *,
    dtypes: Collection[str] = (),
    tied: bool = False,
) -> None:
    """Names, shapes and dtypes against the base; raises WeightsError naming the first that differs."""
    optional = {TIED_HEAD} if tied else set()
    missing = sorted(base.keys() - found.keys() - optional)
    if missing:
        raise invalid(f"tensor {missing[0]!r} of the base is missing ({len(missing)} in all)", missing[0])
    unknown = sorted(found.keys() - base.keys() - optional)
    if unknown:
        raise invalid(f"tensor {unknown[0]!r} is not one of the base ({len(unknown)} in all)", unknown[0])
    for name, entry in found.items():
        expected = base.get(name)
        if expected is None:
            continue  # an untied copy of the tied head: its bytes are compared later
        if entry.shape != expected.shape:
            raise invalid(f"tensor {name!r} has shape {list(entry.shape)}, the base {list(expected.shape)}", name)
        if entry.dtype != expected.dtype and entry.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys([expected.dtype, *dtypes]))
            raise invalid(f"tensor {name!r} has dtype {entry.dtype}, not {allowed}", name)


def _check_digests(tensors: Sequence[TensorInfo], manifest: CheckpointManifest) -> None:
    if manifest.weights_digest and weights_digest(tensors) != manifest.weights_digest:
        raise invalid("the tensors do not match the weights_digest of their manifest", "weights_digest")
    if not manifest.tensors:
        return
    found = {tensor.name: tensor for tensor in tensors}
    if len(manifest.tensors) != len(found):
        raise invalid(f"the manifest lists {len(manifest.tensors)} tensors, the files {len(found)}", "tensors")
    for expected in manifest.tensors:
        if found.get(expected.name) != expected:
            raise invalid(f"tensor {expected.name[:100]!r} is not what the manifest says", expected.name[:100])


def _check_tied_head(tensors: Sequence[TensorInfo]) -> None:
    found = {tensor.name: tensor for tensor in tensors}
    head = found.get(TIED_HEAD)
    if head is None:
        return
    embedding = next((found[name] for name in EMBEDDINGS if name in found), None)
    if embedding is None or (embedding.sha256, embedding.shape, embedding.dtype) != (
        head.sha256,
        head.shape,
        head.dtype,
    ):
        raise invalid(f"the model ties {TIED_HEAD!r} to its embedding, but the two differ", TIED_HEAD)
