"""Read a delta against its base: which elements become what.  Applying is an overwrite, safe to repeat.

The base must not change while a segment is decoded: `decode_delta` gives a segment's changes only
when all of it was read and proved whole.  So a delta may be applied in place to a private copy of its
base, and a copy that was not finished is thrown away.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rollgrid_weights.errors import invalid

from . import gaps
from .blob import Codec, Delta, SegmentGroup, unpacked
from .numbers import FORMATS
from .states import Piece, State, check_alike, lanes, piece_bits, pieces


class Patch(NamedTuple):
    """Elements of one tensor and their new bits."""

    name: str
    indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    values: np.ndarray[tuple[int, ...], np.dtype[Any]]


class _Segment(NamedTuple):
    number: int
    covered: list[Piece]
    changed: int
    data: memoryview
    dtype: str
    reader: Any
    """The group's tables; None where the codec has none."""


def decode_delta(delta: Delta, base: State, *, threads: int = 1) -> Iterator[list[Patch]]:
    """The changes of one segment after the other, at most `threads` + 1 of them in memory.

    Raises WeightsError: the base lacks a tensor or has another, and whatever contradicts itself.
    """
    tensors = delta.header.tensors
    check_alike({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, base, "base")
    found: Counter[str] = Counter()
    with ThreadPoolExecutor(threads) as pool:
        for patches in _in_turn(pool, threads, delta, base):
            for patch in patches:
                found[patch.name] += patch.indices.size
            yield patches
    for tensor in tensors:
        if found[tensor.name] != tensor.changed:
            raise invalid(
                f"tensor {tensor.name!r} of the delta has {found[tensor.name]} changes, not {tensor.changed}",
                tensor.name,
            )


def apply_delta(delta: Delta, base: State, into: State, *, threads: int = 1) -> None:
    """Overwrite the changed elements of `into`: a copy of the base, or the base itself where nobody else reads it.

    Raises WeightsError as `decode_delta`; what is in `into` then is of no use.
    """
    for patches in decode_delta(delta, base, threads=threads):
        for patch in patches:
            into[patch.name].bits[patch.indices] = patch.values


def _in_turn(pool: Executor, threads: int, delta: Delta, base: State) -> Iterator[list[Patch]]:
    waiting: deque[Future[list[Patch]]] = deque()
    try:
        for segment in _segments(delta):
            waiting.append(pool.submit(_decode, delta.codec, segment, base))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _segments(delta: Delta) -> Iterator[_Segment]:
    """All segments with the pieces they cover and their bytes."""
    at, number = 0, 0
    groups: dict[str, list[SegmentGroup]] = {}
    for group in delta.header.groups:
        groups.setdefault(group.dtype, []).append(group)
    covered = {
        dtype: pieces(lane, [one.elements for group in groups.get(dtype, []) for one in group.segments])
        for dtype, lane in lanes(delta.header.tensors).items()
    }
    for group in delta.header.groups:
        reader = _reader(delta, group, at)
        at += group.tables
        for segment in group.segments:
            data = delta.payload[at : at + segment.bytes]
            yield _Segment(number, next(covered[group.dtype]), segment.changed, data, group.dtype, reader)
            at += segment.bytes
            number += 1


def _reader(delta: Delta, group: SegmentGroup, at: int) -> Any:
    if delta.codec is Codec.GAPS:
        return None
    from . import exponent

    text = unpacked(delta.payload[at : at + group.tables], group.raw, "tables")
    return exponent.reader(text, FORMATS[group.dtype])


def _decode(codec: Codec, segment: _Segment, base: State) -> list[Patch]:
    where, form = f"segment {segment.number} of the delta", FORMATS[segment.dtype]
    if codec is Codec.GAPS:
        sizes = [piece.end - piece.begin for piece in segment.covered]
        indices, values = gaps.decode_segment(segment.data, sum(sizes), segment.changed, form, where)
        ends = np.cumsum(sizes)
        cuts = [0, *np.searchsorted(indices, ends)]
        found = [
            (indices[cuts[i] : cuts[i + 1]] - (ends[i] - sizes[i]), values[cuts[i] : cuts[i + 1]])
            for i in range(len(sizes))
        ]
    else:
        from . import exponent

        old = [piece_bits(base, piece) for piece in segment.covered]
        found = exponent.decode_segment(segment.data, old, segment.changed, segment.reader, where)
    return [
        Patch(piece.name, indices + piece.begin, values)
        for piece, (indices, values) in zip(segment.covered, found, strict=True)
        if indices.size
    ]
