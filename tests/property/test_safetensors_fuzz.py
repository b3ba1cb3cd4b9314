"""Random, truncated and mutated files never do anything but load or be refused (security: design, section 8)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollgrid_contracts import codec
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import decode_manifest
from rollgrid_weights.safetensors_header import parse_header, read_header
from rollgrid_weights.tensors import tensor_infos
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tests.support.safetensors_files import raw

GOOD = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.ones(3, np.int8)})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 1 << 65), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 64), max_size=3) | JSON,
    }
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def outcome(path: Path, content: bytes) -> dict[str, Any] | None:
    """The tensors' digests, or None when refused; anything else escapes and fails the test."""
    path.write_bytes(content)
    try:
        return {info.name: info for info in tensor_infos(path)}
    except WeightsError as error:
        codec.encode(error.info(), codec.JSON)
        return None


@quick
@given(content=st.binary(max_size=300))
def test_random_bytes(tmp_path: Path, content: bytes) -> None:
    outcome(tmp_path / "m.safetensors", content)


@quick
@given(cut=st.integers(0, len(GOOD) - 1))
def test_truncated(tmp_path: Path, cut: int) -> None:
    assert outcome(tmp_path / "m.safetensors", GOOD[:cut]) is None


@quick
@given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_what_we_accept_the_library_reads_alike(tmp_path: Path, position: int, value: int) -> None:
    content = bytearray(GOOD)
    content[position] = value
    found = outcome(tmp_path / "m.safetensors", bytes(content))
    if found is not None:
        theirs = load(bytes(content))
        assert {name: tuple(array.shape) for name, array in theirs.items()} == {n: i.shape for n, i in found.items()}


@quick
@given(header=JSON | st.dictionaries(st.text(max_size=8), ENTRIES, max_size=4), data=st.binary(max_size=64))
def test_random_headers(tmp_path: Path, header: Any, data: bytes) -> None:
    content = raw(json.dumps(header).encode("utf-8", "surrogatepass"), data)
    if outcome(tmp_path / "m.safetensors", content) is not None:
        try:
            load(content)
        except SafetensorError as error:  # pragma: no cover - would be a hole in ours
            raise AssertionError(f"accepted what the library refuses: {error}") from error


@given(text=st.binary(max_size=200), size=st.integers(0, 1 << 62))
def test_parse_header_of_anything(text: bytes, size: int) -> None:
    try:
        parse_header(text, size, "f")
    except WeightsError:
        pass


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")))
def test_manifests_of_anything(data: bytes) -> None:
    try:
        decode_manifest(data)
    except WeightsError:
        pass


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    assert set(read_header(path)) == {"a", "b.c"}
