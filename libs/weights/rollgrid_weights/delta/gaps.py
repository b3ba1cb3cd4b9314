"""Codec 1: gaps between changes and their new values, in byte planes of zstd.  Decoded without the base."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from rollgrid_weights.errors import invalid

from .blob import unpacked
from .numbers import NumberFormat

LONG = 0xFFFF
"""A gap of this or more: it stands as 32 bits in a stream of its own."""
LEVEL = 1

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def encode_segment(indices: Array, values: Array) -> bytes:
    """Frames: low and high bytes of the gaps, the long gaps, each byte of the values; before them their sizes."""
    if not indices.size:
        return b""
    gaps = np.diff(indices, prepend=-1) - 1
    short = np.minimum(gaps, LONG).astype("<u2")
    streams = [*planes(short), gaps[gaps >= LONG].astype("<u4").tobytes(), *planes(values)]
    packer = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    frames = [packer.compress(stream) for stream in streams]
    return struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)


def decode_segment(
    data: memoryview, elements: int, changed: int, form: NumberFormat, where: str
) -> tuple[Array, Array]:
    """Indices within the segment and new values.  Raises WeightsError for anything but a whole segment."""
    if not changed:
        if len(data):
            raise invalid(f"{where} has bytes and no changes", "segments")
        return np.empty(0, np.int64), np.empty(0, form.kind)
    count = 3 + form.item
    if len(data) < 4 * count:
        raise invalid(f"{where} ends before its sizes", "segments")
    sizes = struct.unpack_from(f"<{count}I", data)
    if 4 * count + sum(sizes) != len(data):
        raise invalid(f"{where} has {len(data)} bytes, its sizes say {4 * count + sum(sizes)}", "segments")
    frames, at = [], 4 * count
    for size in sizes:
        frames.append(data[at : at + size])
        at += size
    gaps = joined([unpacked(frame, changed, "segments") for frame in frames[:2]], np.dtype("<u2")).astype(np.int64)
    long = gaps == LONG
    gaps[long] = np.frombuffer(unpacked(frames[2], 4 * int(long.sum()), "segments"), "<u4")
    indices = np.cumsum(gaps + 1) - 1
    if int(indices[-1]) >= elements:
        raise invalid(f"{where} changes element {int(indices[-1])} of {elements}", "segments")
    return indices, joined([unpacked(frame, changed, "segments") for frame in frames[3:]], form.kind)


def planes(values: Array) -> list[bytes]:
    """The lowest byte of every value, then the next."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize)
    return [np.ascontiguousarray(rows[:, byte]).tobytes() for byte in range(values.dtype.itemsize)]


def joined(found: list[bytes], kind: np.dtype[Any]) -> Array:
    rows = np.stack([np.frombuffer(plane, np.uint8) for plane in found], axis=1)
    return np.ascontiguousarray(rows).view(kind).reshape(-1)
