"""Make a delta of two states: segment by segment, several at once, holding little more than the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import zstandard
from rollgrid_contracts.failures import ErrorCode

from rollgrid_weights.errors import WeightsError

from . import gaps
from .blob import Codec, DeltaHeader, DeltaTensor, Segment, SegmentGroup, write_blob
from .numbers import FORMATS, NumberFormat
from .states import Bits, Piece, State, check_alike, lanes, piece_bits, pieces, state_digest

SEGMENT = 1 << 23
"""Elements of a segment."""
GROUP_CHANGES = 1 << 23
"""A group of segments ends at so many changes: what the encoder holds of them at most, but for one round."""


class _Group(NamedTuple):
    tables: bytes
    raw: int
    segments: list[tuple[int, int, bytes]]
    """Elements, changes, bytes."""


class _Work(NamedTuple):
    """What the encoding of one delta shares."""

    base: State
    target: State
    pool: Executor
    threads: int
    tally: Callable[[Sequence[Piece], Sequence[int], int], None]

    def sides(self, segment: Sequence[Piece]) -> tuple[list[Bits], list[Bits]]:
        return [piece_bits(self.base, piece) for piece in segment], [
            piece_bits(self.target, piece) for piece in segment
        ]


def encode_delta(
    base: State,
    target: State,
    *,
    base_digest: str | None = None,
    target_digest: str | None = None,
    codec: Codec = Codec.EXPONENT,
    threads: int = 1,
    segment: int = SEGMENT,
    max_bytes: int | None = None,
) -> bytes:
    """The delta file that leads from `base` to `target`.

    The digests are `weights_digest`s of the two; None = computed here.

    Raises WeightsError: tensors that differ in name, dtype or shape, a dtype that deltas do not know, and
    `limit_exceeded` (field `delta`) as soon as the file would exceed `max_bytes`.
    """
    check_alike({name: (found.dtype, found.shape) for name, found in target.items()}, base, "base")
    check_alike({name: (found.dtype, found.shape) for name, found in base.items()}, target, "target")
    changed, size = dict.fromkeys(sorted(target), 0), 0

    def tally(covered: Sequence[Piece], counts: Sequence[int], written: int) -> None:
        nonlocal size
        for piece, count in zip(covered, counts, strict=True):
            changed[piece.name] += count
        size += written
        if max_bytes is not None and size > max_bytes:
            raise WeightsError(
                ErrorCode.LIMIT_EXCEEDED, "the delta is too large", field="delta", limit=f"{max_bytes} bytes"
            )

    tensors = [DeltaTensor(name, target[name].dtype, target[name].shape, 0) for name in changed]
    groups, payload = list[SegmentGroup](), list[bytes]()
    with ThreadPoolExecutor(threads) as pool:
        base_digest = base_digest or state_digest(base, pool)
        target_digest = target_digest or state_digest(target, pool)
        work = _Work(base, target, pool, threads, tally)
        for dtype, lane in lanes(tensors).items():
            rounds = _rounds(lane, segment, threads)
            make = _exponent_groups if codec is Codec.EXPONENT else _gap_groups
            for group in make(work, rounds, FORMATS[dtype]):
                segments = tuple(Segment(elements, count, len(data)) for elements, count, data in group.segments)
                groups.append(SegmentGroup(dtype, len(group.tables), group.raw, segments))
                payload += [group.tables, *(data for _, _, data in group.segments)]
    header = DeltaHeader(
        base_digest=base_digest,
        target_digest=target_digest,
        tensors=tuple(DeltaTensor(one.name, one.dtype, one.shape, changed[one.name]) for one in tensors),
        groups=tuple(groups),
    )
    return write_blob(codec, header, payload)


def _rounds(lane: Sequence[DeltaTensor], segment: int, threads: int) -> Iterator[list[list[Piece]]]:
    """The lane's segments, as many at a time as there are threads."""
    total = sum(tensor.elements for tensor in lane)
    sizes = [min(segment, total - begin) for begin in range(0, total, segment)]
    row: list[list[Piece]] = []
    for found in pieces(lane, sizes):
        row.append(found)
        if len(row) == threads:
            yield row
            row = []
    if row:
        yield row


def _elements(segment: Sequence[Piece]) -> int:
    return sum(piece.end - piece.begin for piece in segment)


def _exponent_groups(work: _Work, rounds: Iterator[list[list[Piece]]], form: NumberFormat) -> Iterator[_Group]:
    from . import exponent, tables

    held: list[tuple[list[Piece], exponent.Changes]] = []

    def close() -> _Group:
        coding = exponent.make_coding([found for _, found in held], form)
        text = tables.write_tables(coding)
        stored = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(text)
        coded = list(work.pool.map(lambda one: exponent.encode_segment(one[1], coding), held))
        for (covered, found), data in zip(held, coded, strict=True):
            work.tally(covered, found.by_piece, len(data))
        segments = [
            (_elements(covered), found.kinds.size, data) for (covered, found), data in zip(held, coded, strict=True)
        ]
        held.clear()
        return _Group(stored, len(text), segments)

    for row in rounds:
        held += zip(row, work.pool.map(lambda one: exponent.scan(*work.sides(one), form), row), strict=True)
        if sum(found.kinds.size for _, found in held) >= GROUP_CHANGES:
            yield close()
    if held:
        yield close()


def _gap_groups(work: _Work, rounds: Iterator[list[list[Piece]]], form: NumberFormat) -> Iterator[_Group]:
    def one(segment: list[Piece]) -> tuple[list[int], bytes]:
        indices: list[np.ndarray[Any, Any]] = []
        values: list[np.ndarray[Any, Any]] = []
        begin = 0
        for old, new in zip(*work.sides(segment), strict=True):
            found = np.flatnonzero(old != new)
            indices.append(found + begin)
            values.append(new[found])
            begin += old.size
        data = gaps.encode_segment(np.concatenate(indices), np.concatenate(values))
        return [found.size for found in indices], data

    segments = []
    for row in rounds:
        for covered, (counts, data) in zip(row, work.pool.map(one, row), strict=True):
            work.tally(covered, counts, len(data))
            segments.append((_elements(covered), sum(counts), data))
    if segments:
        yield _Group(b"", 0, segments)
