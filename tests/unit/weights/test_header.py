"""Headers of safetensors files: what is accepted is what the real library accepts, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.safetensors_header import MAX_HEADER, read_header

from tests.support.safetensors_files import entry, raw, write

A = entry("F32", [2], 0, 8)
B = entry("F32", [1, 1], 8, 12)


def test_what_the_library_writes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.safetensors",
        {"w": np.ones((2, 3), np.float32), "scalar": np.float16(1), "empty": np.zeros((0, 4), np.int64)},
    )
    found = read_header(path)
    assert {name: (e.dtype, e.shape, e.end - e.start) for name, e in found.items()} == {
        "w": ("F32", (2, 3), 24),
        "scalar": ("F16", (), 2),
        "empty": ("I64", (0, 4), 0),
    }
    w = found["w"]
    assert np.frombuffer(path.read_bytes()[w.start : w.end], "<f4").tolist() == [1.0] * 6


def test_no_tensors_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw({"__metadata__": {"format": "pt"}}))
    assert read_header(path) == {}
    path.write_bytes(raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   ', b"\0"))
    assert read_header(path)["a"].shape == (1,)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too short"),
        (b"\1\2\3", "too short"),
        ((100).to_bytes(8, "little") + b"{}", "the file has"),
        (raw(b""), "no JSON object"),
        (raw(b"[]"), "no JSON object"),
        (raw(b" {}"), "no JSON object"),
        (raw(b"{"), "not valid"),
        (raw(b"{\xff}"), "not valid"),
        (raw(b'{"a":' + b"[" * 100_000), "not valid"),
        (raw(b'{"a":' + b"9" * 10_000 + b"}"), "not valid"),
        (raw(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'), "twice"),
        (raw({"__metadata__": {"a": 1}}), "object of texts"),
        (raw({"__metadata__": []}), "object of texts"),
        (raw({"a": []}), "has not exactly"),
        (raw({"a": {**A, "more": 1}}, bytes(8)), "has not exactly"),
        (raw({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "shape"),
        (raw({"a": entry("F32", [2.0], 0, 8)}, bytes(8)), "shape"),  # type: ignore[list-item]
        (raw({"a": entry("F32", [True, 2], 0, 8)}, bytes(8)), "shape"),
        (raw({"a": entry("F32", [1 << 63], 0, 8)}, bytes(8)), "shape"),
        (raw({"a": entry("F32", [1] * 99, 0, 4)}, bytes(4)), "shape"),
        (raw({"a": entry("F32", [1 << 40, 1 << 40], 0, 8)}, bytes(8)), "need"),
        (raw({"a": {**A, "data_offsets": [0]}}, bytes(8)), "data_offsets"),
        (raw({"a": {**A, "data_offsets": [8, 0]}}, bytes(8)), "data_offsets"),
        (raw({"a": {**A, "data_offsets": [-8, 0]}}, bytes(8)), "data_offsets"),
        (raw({"a": entry("F32", [3], 0, 8)}, bytes(8)), "need"),
        (raw({"a": A, "b": A}, bytes(8)), "begins at"),
        (raw({"a": A, "b": entry("F32", [1], 12, 16)}, bytes(16)), "begins at"),
        (raw({"a": entry("F32", [2], 4, 12)}, bytes(12)), "begins at"),
        (raw({"a": A}, bytes(7)), "end at"),
        (raw({"a": A}, bytes(9)), "end at"),
        (raw({"": A}, bytes(8)), "name"),
        (raw({"a\n": A}, bytes(8)), "name"),
        (raw({"a" * 1000: A}, bytes(8)), "name"),
    ],
)
def test_malformed(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=says) as caught:
        read_header(path)
    info = caught.value.info()
    assert (info.code, info.boundary, info.retryable) == (ErrorCode.INVALID_REQUEST, Boundary.WEIGHTS, False)
    assert info.field


def test_unknown_dtype_names_the_known(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw({"a": entry("F4", [4], 0, 2)}, bytes(2)))
    with pytest.raises(WeightsError, match="BF16") as caught:
        read_header(path)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((MAX_HEADER + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    assert caught.value.limit == f"{MAX_HEADER} bytes"


def test_order_on_file_not_in_the_header_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw({"b": B, "a": A}, bytes(12)))
    assert list(read_header(path)) == ["a", "b"]
