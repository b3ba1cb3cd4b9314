"""The header of a safetensors file, read with every bound checked before anything is loaded.

Format: 8 bytes little-endian length, that many bytes of JSON (name → dtype, shape, data_offsets;
`__metadata__` of texts), then the tensors without holes.  Stricter than the reference reader where
two readers could disagree: duplicate keys and unknown fields are refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from rollgrid_contracts.failures import ErrorCode

from .errors import WeightsError, invalid

MAX_HEADER = 64 * 1024 * 1024
MAX_TENSORS = 1_000_000
MAX_RANK = 16
MAX_NAME = 512

ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one element of every dtype that is accepted."""


class TensorEntry(NamedTuple):
    """One tensor: its bytes are [start, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors by name, in file order.  Raises WeightsError (field = the file's name) and OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise invalid(f"{path.name} has {size} bytes: too short for a safetensors file", path.name)
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER:
            raise WeightsError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{path.name} announces a header of {length} bytes",
                field=path.name,
                limit=f"{MAX_HEADER} bytes",
            )
        if length > size - 8:
            raise invalid(f"{path.name} announces a header of {length} bytes, the file has {size}", path.name)
        text = file.read(length)
    return parse_header(text, size - 8 - length, path.name)


def parse_header(text: bytes, data_size: int, file: str) -> dict[str, TensorEntry]:
    """As `read_header`, from the header's JSON and the number of bytes behind it."""
    if not text.startswith(b"{"):
        raise invalid(f"the header of {file} is no JSON object", file)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the header of {file} is not valid: {str(error)[:200]}", file) from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise invalid(f"the __metadata__ of {file} is not an object of texts", file)
    if len(header) > MAX_TENSORS:
        raise WeightsError(
            ErrorCode.LIMIT_EXCEEDED, f"{file} has {len(header)} tensors", field=file, limit=f"{MAX_TENSORS} tensors"
        )
    offset = 8 + len(text)
    entries = sorted(
        (_entry(name, value, offset, file) for name, value in header.items()), key=lambda e: (e.start, e.end)
    )
    expected = offset
    for entry in entries:
        if entry.start != expected:
            raise invalid(f"tensor {entry.name!r} of {file} begins at byte {entry.start}, not {expected}", entry.name)
        expected = entry.end
    if expected != offset + data_size:
        raise invalid(f"the tensors of {file} end at byte {expected}, the file at {offset + data_size}", file)
    return {entry.name: entry for entry in entries}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _entry(name: str, value: Any, offset: int, file: str) -> TensorEntry:
    label = name[:100]
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise invalid(f"tensor name {label!r} of {file} is empty, too long or not printable", file)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise invalid(f"tensor {label!r} of {file} has not exactly dtype, shape and data_offsets", label)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise WeightsError(
            ErrorCode.UNSUPPORTED,
            f"tensor {label!r} of {file} has dtype {str(dtype)[:30]!r}; known: {', '.join(ITEM_SIZES)}",
            field=label,
        )
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise invalid(f"tensor {label!r} of {file} has shape {str(shape)[:60]}", label)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid(f"tensor {label!r} of {file} has data_offsets {str(offsets)[:60]}", label)
    size = math.prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != size:
        raise invalid(
            f"tensor {label!r} of {file} has {offsets[1] - offsets[0]} bytes, its shape and dtype need {size}", label
        )
    return TensorEntry(name, dtype, tuple(shape), offset + offsets[0], offset + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
