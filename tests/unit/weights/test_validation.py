"""Manifests and the validation of versions against their base."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo, TensorInfo
from rollgrid_contracts.failures import ErrorCode
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import (
    build_manifest,
    check_manifest,
    decode_manifest,
    encode_manifest,
    folder_tensors,
    verify_files,
    weight_files,
    weights_digest,
)
from rollgrid_weights.names import check_file_name
from rollgrid_weights.tensors import first_not_finite
from rollgrid_weights.validation import validate_version

from tests.support.safetensors_files import entry, raw, write

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights(seed: int = 0, **more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {EMBED: draw.normal(size=(8, 4)).astype(np.float32), "norm": np.ones(4, np.float32), **more}


def folder(path: Path, tensors: dict[str, Any]) -> Path:
    path.mkdir()
    write(path / "model.safetensors", tensors)
    return path


def manifest(path: Path) -> CheckpointManifest:
    return build_manifest(path, tenant="shared", policy="m", version=1)


def base(path: Path) -> dict[str, TensorInfo]:
    return {tensor.name: tensor for tensor in folder_tensors(weight_files(path))}


def refused(
    path: Path, against: dict[str, TensorInfo], made: CheckpointManifest | None = None, **options: Any
) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        validate_version(path, made or manifest(path), against, **options)
    return caught.value


@pytest.fixture
def old(tmp_path: Path) -> dict[str, TensorInfo]:
    return base(folder(tmp_path / "base", weights()))


def test_a_good_version(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    new = folder(tmp_path / "new", weights(1))
    (new / "config.json").write_text("{}")
    (new / "notes.txt").write_text("left out")
    made = manifest(new)
    assert [file.name for file in made.files] == ["model.safetensors", "config.json"]
    tensors = validate_version(new, made, old)
    assert tensors == made.tensors
    assert (
        next(t for t in tensors if t.name == "norm").sha256 == hashlib.sha256(np.ones(4, "<f4").tobytes()).hexdigest()
    )
    assert validate_version(new, msgspec.structs.replace(made, tensors=()), old) == tensors


def test_sharding_does_not_change_the_digest(tmp_path: Path) -> None:
    whole = folder(tmp_path / "whole", weights())
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, (name, value) in enumerate(weights().items()):
        write(parts / f"model-{number}.safetensors", {name: value})
    assert weights_digest(base(whole).values()) == weights_digest(base(parts).values())
    assert weights_digest(base(whole).values()) != weights_digest(base(folder(tmp_path / "o", weights(1))).values())
    validate_version(parts, manifest(parts), base(whole))


def test_manifest_travels_as_json(tmp_path: Path) -> None:
    made = manifest(folder(tmp_path / "new", weights()))
    assert decode_manifest(encode_manifest(made)) == made
    for data in (b"", b"{}", b"[" * 100_000, encode_manifest(msgspec.structs.replace(made, schema=2)), b"\xff"):
        with pytest.raises(WeightsError, match=r"manifest\.json"):
            decode_manifest(data)


def test_tensors_that_differ_from_the_base(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    without = {"norm": np.ones(4, np.float32)}
    cases: dict[str, tuple[dict[str, Any], str, str]] = {
        "missing": (without, EMBED, "is missing"),
        "unknown": (weights(1, extra=np.ones(1, np.float32)), "extra", "not one of the base"),
        "shape": (weights(1, norm=np.ones((2, 2), np.float32)), "norm", "shape"),
        "dtype": (weights(1, norm=np.ones(4, np.float16)), "norm", "dtype F16"),
        "head": (weights(1, **{HEAD: np.ones(1, np.float32)}), HEAD, "not one of the base"),
    }
    for name, (tensors, field, says) in cases.items():
        error = refused(folder(tmp_path / name, tensors), old)
        assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, field), name
        assert says in error.message


def test_the_serving_dtype_is_allowed(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    new = folder(tmp_path / "new", {name: value.astype(np.float16) for name, value in weights(1).items()})
    validate_version(new, manifest(new), old, dtypes=("F16",))
    assert "F32 or BF16" in refused(new, old, dtypes=("BF16",)).message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused_by_name_and_place(tmp_path: Path, old: dict[str, TensorInfo], bad: float) -> None:
    tensors = weights(1)
    good = manifest(folder(tmp_path / "good", tensors))
    tensors["norm"][2] = bad
    new = folder(tmp_path / "new", tensors)
    with pytest.raises(WeightsError, match="element 2"):
        manifest(new)
    whole = write(tmp_path / "x.safetensors", tensors)
    files = (msgspec.structs.replace(good.files[0], sha256=hashlib.sha256(whole.read_bytes()).hexdigest()),)
    error = refused(new, old, msgspec.structs.replace(good, files=files, tensors=()))
    assert error.field == "norm"
    assert "element 2" in error.message


@pytest.mark.parametrize(
    ("dtype", "bad", "fine"),
    [
        ("BF16", [0x7F80, 0xFF80, 0x7FC1], [0x7F7F, 0x0000, 0x8001]),
        ("F16", [0x7C00, 0xFC00, 0x7E00], [0x7BFF, 0x83FF]),
        ("F8_E5M2", [0x7C, 0xFD], [0x7B, 0x80]),
        ("F8_E4M3", [0x7F, 0xFF], [0x7E, 0x78, 0xFE]),
    ],
)
def test_finiteness_of_small_floats(dtype: str, bad: list[int], fine: list[int]) -> None:
    kind = np.uint8 if dtype.startswith("F8") else np.dtype("<u2")
    assert first_not_finite(memoryview(np.array(fine, kind).tobytes()), dtype) is None
    for pattern in bad:
        data = memoryview(np.array([*fine, pattern], kind).tobytes())
        assert first_not_finite(data, dtype) == len(fine)
    assert first_not_finite(memoryview(np.array(bad, kind).tobytes()), "I16") is None


def test_a_not_finite_element_behind_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgrid_weights.tensors.CHUNK", 64)
    values = np.zeros(100, np.float32)
    values[77] = np.nan
    assert first_not_finite(memoryview(values.tobytes()), "F32") == 77


def test_tied_head(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    tensors = weights(1)
    same = folder(tmp_path / "same", {**tensors, HEAD: tensors[EMBED]})
    validate_version(same, manifest(same), old, tied=True)
    other = folder(tmp_path / "other", {**tensors, HEAD: tensors[EMBED] + 1})
    assert refused(other, old, tied=True).field == HEAD
    with_head = base(same)
    without = folder(tmp_path / "without", tensors)
    validate_version(without, manifest(without), with_head, tied=True)
    assert refused(without, with_head).field == HEAD


def test_altered_missing_and_listed_wrongly(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    new = folder(tmp_path / "new", weights(1))
    made = manifest(new)
    path = new / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "digest" in refused(new, old, made).message
    path.write_bytes(good + b"\0")
    assert refused(new, old, made).field == "model.safetensors"
    path.write_bytes(good)
    wrong = (msgspec.structs.replace(made.tensors[0], sha256="0" * 64), *made.tensors[1:])
    assert "manifest says" in refused(new, old, msgspec.structs.replace(made, tensors=wrong)).message
    assert "lists 1 tensors" in refused(new, old, msgspec.structs.replace(made, tensors=made.tensors[:1])).message
    path.unlink()
    assert "missing" in refused(new, old, made).message
    with pytest.raises(WeightsError, match="missing"):
        verify_files(new, made)


def test_one_tensor_in_two_files(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    new = folder(tmp_path / "new", weights(1))
    made = manifest(new)
    (new / "again.safetensors").write_bytes((new / "model.safetensors").read_bytes())
    twice = msgspec.structs.replace(
        made, files=(*made.files, msgspec.structs.replace(made.files[0], name="again.safetensors"))
    )
    assert "more than one file" in refused(new, old, twice).message
    with pytest.raises(WeightsError, match="more than one file"):
        manifest(new)


def test_a_malformed_file_is_refused_before_it_is_hashed(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    new = folder(tmp_path / "new", weights(1))
    made = manifest(new)
    (new / "model.safetensors").write_bytes(raw({"a": entry("F32", [2], 0, 8)}, bytes(7)))
    assert "end at" in refused(new, old, made).message


def test_other_kinds_are_not_supported_yet(tmp_path: Path, old: dict[str, TensorInfo]) -> None:
    new = folder(tmp_path / "new", weights(1))
    error = refused(new, old, msgspec.structs.replace(manifest(new), kind=CheckpointKind.DELTA))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "kind")


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "config.json", "vocab.json"])
def test_allowed_names(name: str) -> None:
    check_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "pytorch_model.bin",
        "optimizer.pt",
        "weights.pkl",
        "modeling.py",
        "../model.safetensors",
        "a/model.safetensors",
        "a..safetensors",
        ".safetensors",
        "-m.safetensors",
        "model.safetensors\n",
        "m\0.safetensors",
        "é.safetensors",
        "x" * 200 + ".safetensors",
        "manifest.json",
        "refused.json",
    ],
)
def test_everything_else_is_refused(name: str) -> None:
    with pytest.raises(WeightsError) as caught:
        check_file_name(name)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_manifests_that_name_no_weights_or_a_file_twice(tmp_path: Path) -> None:
    new = folder(tmp_path / "new", weights(1))
    made = manifest(new)
    for files in ((), (made.files[0], made.files[0]), (msgspec.structs.replace(made.files[0], name="config.json"),)):
        with pytest.raises(WeightsError):
            verify_files(new, msgspec.structs.replace(made, files=files))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        weight_files(empty)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": 2**63}, "step"),
        ({"step": -1}, "step"),
        ({"next_within_s": 0.0}, "next_within_s"),
        ({"next_within_s": float("nan")}, "next_within_s"),
        ({"next_within_s": float("inf")}, "next_within_s"),
    ],
)
def test_numbers_that_nobody_could_store_are_refused(tmp_path: Path, changes: dict[str, float], field: str) -> None:
    stored = CheckpointManifest(
        tenant="acme",
        policy="p",
        version=1,
        kind=CheckpointKind.FULL,
        files=(FileInfo(name="a.safetensors", size=1, sha256="00"),),
    )
    check_manifest(stored)
    with pytest.raises(WeightsError) as refused_by:
        check_manifest(msgspec.structs.replace(stored, **changes))
    assert refused_by.value.field == field
