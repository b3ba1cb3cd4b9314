"""One delta file: a fixed front, a header that names tensors and segments, the segments' bytes.

Front, little-endian: `magic` 8 bytes, u16 format version, u16 codec, u32 header bytes as stored, u32
header bytes as JSON, u64 payload bytes, 32 bytes sha256 of the file without this digest.  The header
is zstd-compressed JSON.  Whatever is read here is checked before anything is allocated by it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from rollgrid_contracts.failures import ErrorCode

from rollgrid_weights.errors import WeightsError, invalid
from rollgrid_weights.safetensors_header import MAX_NAME, MAX_RANK, MAX_TENSORS

from .numbers import number_format

MAGIC = b"rgdelta\n"
VERSION = 1
FRONT = struct.Struct("<8sHHIIQ")
DIGEST_BYTES = 32
MAX_HEADER = 64 * 1024 * 1024
MAX_TABLES = 1 << 20
"""Bytes of one group's frequency tables: more than 256 full ones take."""
MAX_SEGMENT = 1 << 24
"""Elements of one segment, all of which may change: what a reader and an encoder must hold at once, for each thread."""
MAX_SEGMENTS = 1 << 16
"""Of all groups: each is a task of its own, whatever it holds."""
GROUP_ELEMENTS = 1 << 22
"""A dtype has at most one group for each so many elements begun: tables cost a reader far more than their bytes."""
MAX_ELEMENTS = 1 << 48


class Codec(IntEnum):
    """How the segments are coded."""

    GAPS = 1
    """Gaps and absolute values: decoded without the base."""
    EXPONENT = 2
    """Gaps within each exponent class and steps from the base's value: decoded against the base."""


class DeltaTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor; `changed` of its elements differ between base and target."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    changed: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """So many elements, of them `changed`, coded in so many bytes."""

    elements: int
    changed: int
    bytes: int


class SegmentGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive segments of one dtype that share frequency tables (`tables` bytes as stored, `raw` unpacked)."""

    dtype: str
    tables: int
    raw: int
    segments: tuple[Segment, ...]


class DeltaHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but the segments' bytes.  Digests are `weights_digest`s of the whole state, as hex."""

    base_digest: str
    target_digest: str
    tensors: tuple[DeltaTensor, ...]
    groups: tuple[SegmentGroup, ...]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A delta file that was read and whose digest is right; `payload` still lies in the file's bytes."""

    codec: Codec
    header: DeltaHeader
    payload: memoryview
    blob_digest: str

    @property
    def changed(self) -> int:
        return sum(tensor.changed for tensor in self.header.tensors)

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.header.tensors)


def write_blob(codec: Codec, header: DeltaHeader, payload: Iterable[bytes]) -> bytes:
    """The whole file."""
    parts = list(payload)
    text = msgspec.json.encode(header)
    stored = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(text)
    front = FRONT.pack(MAGIC, VERSION, codec, len(stored), len(text), sum(map(len, parts)))
    digest = hashlib.sha256(front)
    for part in (stored, *parts):
        digest.update(part)
    return b"".join([front, digest.digest(), stored, *parts])


def read_blob(data: bytes | memoryview) -> Delta:
    """Read a delta file.

    Raises WeightsError: `unsupported` for another format version, codec or dtype, `limit_exceeded`, and
    `invalid_request` for what is damaged or contradicts itself.
    """
    view = memoryview(data)
    if len(view) < FRONT.size + DIGEST_BYTES:
        raise invalid(f"the delta has {len(view)} bytes: too short", "delta")
    magic, version, codec, stored, raw, payload = FRONT.unpack_from(view)
    if magic != MAGIC:
        raise invalid("the file is no delta", "delta")
    if version != VERSION or codec not in Codec.__members__.values():
        raise WeightsError(
            ErrorCode.UNSUPPORTED, f"the delta has format version {version} and codec {codec}", field="codec"
        )
    begin = FRONT.size + DIGEST_BYTES
    if max(stored, raw) > MAX_HEADER:
        raise _over(f"the delta announces a header of {max(stored, raw)} bytes", "header", f"{MAX_HEADER} bytes")
    if begin + stored + payload != len(view):
        raise invalid(f"the delta has {len(view)} bytes, its front says {begin + stored + payload}", "delta")
    digest = hashlib.sha256(view[: FRONT.size])
    digest.update(view[begin:])
    if digest.digest() != bytes(view[FRONT.size : begin]):
        raise invalid("the delta does not match its digest", "blob_digest")
    header = _header(unpacked(view[begin : begin + stored], raw, "header"))
    _check(header, payload)
    return Delta(codec=Codec(codec), header=header, payload=view[begin + stored :], blob_digest=digest.hexdigest())


def open_blob(path: Path) -> Delta:
    """As `read_blob`, memory-mapped for as long as the delta is referred to."""
    if not path.stat().st_size:
        return read_blob(b"")  # which refuses it; an empty file cannot be mapped
    return read_blob(np.memmap(path, np.uint8, "r").data)


def unpacked(data: bytes | memoryview, size: int, what: str) -> bytes:
    """One zstd frame that says and holds exactly `size` bytes.  Raises WeightsError."""
    try:
        announced = zstandard.frame_content_size(data)
        if announced != size:
            raise invalid(f"{what} of the delta unpacks to {announced} bytes, not {size}", what)
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise invalid(f"{what} of the delta does not unpack: {error}", what) from None
    if len(found) != size:
        raise invalid(f"{what} of the delta unpacks to {len(found)} bytes, not {size}", what)
    return found


def _header(text: bytes) -> DeltaHeader:
    try:
        return msgspec.json.decode(text, type=DeltaHeader)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(f"the header of the delta is not valid: {str(error)[:200]}", "header") from None


def _check(header: DeltaHeader, payload: int) -> None:
    """The header against itself and the number of bytes behind it."""
    if len(header.tensors) > MAX_TENSORS:
        raise _over(f"the delta has {len(header.tensors)} tensors", "tensors", f"{MAX_TENSORS} tensors")
    lanes: dict[str, list[int]] = {}
    for before, tensor in zip((None, *header.tensors), header.tensors, strict=False):
        _check_tensor(tensor)
        if before is not None and before.name >= tensor.name:
            raise invalid(f"tensor {tensor.name!r} of the delta is not in the order of names", tensor.name)
        lane = lanes.setdefault(tensor.dtype, [0, 0])
        lane[0] += tensor.elements
        lane[1] += tensor.changed
    if sum(lane[0] for lane in lanes.values()) > MAX_ELEMENTS:
        raise _over("the tensors of the delta are too large", "tensors", f"{MAX_ELEMENTS} elements")
    _check_counts(header, {dtype: lane[0] for dtype, lane in lanes.items()})
    for group in header.groups:
        lane = lanes[group.dtype]
        if not 0 <= group.raw <= MAX_TABLES or group.tables < 0:
            raise invalid("a group of the delta has tables of impossible size", "groups")
        payload -= group.tables
        for segment in group.segments:
            if segment.elements > MAX_SEGMENT:
                raise _over(
                    f"a segment of the delta has {segment.elements} elements", "groups", f"{MAX_SEGMENT} elements"
                )
            if segment.elements < 1 or not 0 <= segment.changed <= segment.elements:
                raise invalid(f"a segment of the delta has {segment.changed} of {segment.elements} elements", "groups")
            if segment.bytes < 0:
                raise invalid("a segment of the delta has a negative size", "groups")
            lane[0] -= segment.elements
            lane[1] -= segment.changed
            payload -= segment.bytes
    if payload or any(lane != [0, 0] for lane in lanes.values()):
        raise invalid("the segments of the delta are not those of its tensors", "groups")


def _check_counts(header: DeltaHeader, elements: Mapping[str, int]) -> None:
    """How many segments and groups there are: what a few bytes announce must not keep a reader busy for hours."""
    segments = sum(len(group.segments) for group in header.groups)
    if segments > MAX_SEGMENTS:
        raise _over(f"the delta has {segments} segments", "groups", f"{MAX_SEGMENTS} segments")
    for dtype, count in Counter(group.dtype for group in header.groups).items():
        if dtype not in elements:
            raise invalid("a group of the delta is of a dtype that no tensor has", "groups")
        most = max(1, -(-elements[dtype] // GROUP_ELEMENTS))
        if count > most:
            raise _over(f"the delta has {count} groups of {dtype}", "groups", f"{most} groups of this dtype")


def _check_tensor(tensor: DeltaTensor) -> None:
    if not tensor.name or len(tensor.name) > MAX_NAME or not tensor.name.isprintable():
        raise invalid("a tensor name of the delta is empty, too long or not printable", "tensors")
    number_format(tensor.dtype, tensor.name)
    if len(tensor.shape) > MAX_RANK or any(not 0 <= size <= MAX_ELEMENTS for size in tensor.shape):
        raise invalid(f"tensor {tensor.name!r} of the delta has shape {str(tensor.shape)[:60]}", tensor.name)
    if tensor.elements > MAX_ELEMENTS:
        raise _over(f"tensor {tensor.name!r} of the delta is too large", tensor.name, f"{MAX_ELEMENTS} elements")
    if not 0 <= tensor.changed <= tensor.elements:
        raise invalid(f"tensor {tensor.name!r} of the delta has {tensor.changed} changes", tensor.name)


def _over(message: str, field: str, limit: str) -> WeightsError:
    return WeightsError(ErrorCode.LIMIT_EXCEEDED, f"{message}, the limit is {limit}", field=field, limit=limit)
