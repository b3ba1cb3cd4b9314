"""Digests and finiteness of tensors, over memory-mapped files: no tensor is ever held twice."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rollgrid_contracts.checkpoints import FileInfo, TensorInfo

from .errors import invalid
from .safetensors_header import ITEM_SIZES, TensorEntry, read_header

CHUNK = 16 * 1024 * 1024
"""Bytes looked at in one step; a multiple of every item size."""

_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("<u1", 0x7C),
}
"""A value is infinite or NaN when all bits of its exponent are set."""

_E4M3_NAN = 0x7F


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The file's bytes, read only; unmapped at the end."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            view = memoryview(whole)
            try:
                yield view
            finally:
                view.release()


def first_not_finite(data: memoryview, dtype: str) -> int | None:
    """Index of the first element that is infinite or NaN; None when all are finite (as integers are)."""
    if dtype != "F8_E4M3" and dtype not in _EXPONENTS:
        return None
    size = ITEM_SIZES[dtype]
    for start in range(0, len(data), CHUNK):
        with data[start : start + CHUNK] as part:
            bad = _not_finite(
                np.frombuffer(part, np.dtype(_EXPONENTS[dtype][0] if dtype in _EXPONENTS else "<u1")), dtype
            )
        if bad is not None:
            return start // size + bad
    return None


def _not_finite(bits: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]], dtype: str) -> int | None:
    if dtype == "F8_E4M3":  # no infinities, and NaN is the one pattern with all bits but the sign set
        found = (bits & _E4M3_NAN) == _E4M3_NAN
    else:
        mask = bits.dtype.type(_EXPONENTS[dtype][1])
        found = (bits & mask) == mask
    return int(found.argmax()) if found.any() else None


def file_info(path: Path) -> FileInfo:
    """Name, size and sha256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileInfo(name=path.name, size=size, sha256=digest.hexdigest())


def tensor_infos(
    path: Path, header: Mapping[str, TensorEntry] | None = None, *, finite: bool = True
) -> list[TensorInfo]:
    """Digest of every tensor of one file.

    Raises WeightsError for a malformed header and, with `finite`, for a tensor that is not finite.
    """
    entries = read_header(path) if header is None else header
    infos = []
    with mapped(path) as data:
        for entry in entries.values():
            with data[entry.start : entry.end] as part:
                bad = first_not_finite(part, entry.dtype) if finite else None
                if bad is not None:
                    raise invalid(f"tensor {entry.name!r} of {path.name} is not finite at element {bad}", entry.name)
                digest = hashlib.sha256(part).hexdigest()
            infos.append(TensorInfo(name=entry.name, dtype=entry.dtype, shape=entry.shape, sha256=digest))
    return infos
