"""Codec 2: gaps within each exponent class and steps from the base's value, range-coded (rANS).

At small learning rates a weight changes when the update reaches half the distance to its neighbour,
which its exponent alone decides: elements of one exponent are alike, those of another are not.  So each
exponent is a sequence of its own, a change is how many of its sequence lie before it, and what it
changes to is how far it moves in units of its last place.  One stream of a segment holds the gaps and
steps in the order in which a reader that walks over the base needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rollgrid_contracts.failures import ErrorCode

from rollgrid_weights.errors import WeightsError, invalid

from . import tables
from .numbers import GAP_TOKENS, STEP_TOKENS, NumberFormat
from .states import Bits

try:
    from . import kernels
except ImportError as error:
    raise WeightsError(
        ErrorCode.UNSUPPORTED,
        f"this codec needs numba (extra `deltas` of rollgrid-weights): {error}",
        field="codec",
    ) from error

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


class Changes(NamedTuple):
    """What one segment's scan found: by change its class, the gap behind it and its step; by class the first gap."""

    kinds: Array
    gaps: Array
    tokens: Array
    extras: Array
    first: Array
    by_piece: list[int]


def scan(base: Sequence[Bits], new: Sequence[Bits], form: NumberFormat) -> Changes:
    """Compare the pieces of one segment."""
    size, classes = sum(piece.size for piece in base), form.exponents
    ranks, last, first = (np.zeros(classes, np.int64) for _ in range(3))
    before = np.full(classes, -1, np.int64)
    # pages that no change reaches are never touched
    kinds, gaps = np.empty(size, np.uint8), np.empty(size, np.uint32)
    tokens, extras = np.empty(size, np.uint16), np.empty(size, np.uint32)
    count, by_piece = 0, []
    for old, value in zip(base, new, strict=True):
        found = kernels.scan(
            old, value, form.mantissa, classes - 1, (1 << (form.width - 1)) - 1, ranks, last, before, count, kinds,
            gaps, tokens, extras, first,
        )  # fmt: skip
        by_piece.append(found - count)
        count = found
    seen = before >= 0
    gaps[before[seen]] = (ranks - last)[seen]  # behind the last change its class ends with the segment
    first = np.where(seen, first, ranks)
    return Changes(
        kinds[:count].copy(), gaps[:count].copy(), tokens[:count].copy(), extras[:count].copy(), first, by_piece
    )


def make_coding(found: Sequence[Changes], form: NumberFormat) -> tables.Coding:
    """The frequency tables of a group of segments."""
    table = tables.share(np.sum([np.bincount(one.kinds, minlength=form.exponents) for one in found], axis=0))
    rows = max(int(table.max()) + 1, 1)
    gaps, steps = np.zeros((rows, GAP_TOKENS), np.int64), np.zeros((rows, STEP_TOKENS), np.int64)
    for one in found:
        kernels.count_tokens(one.kinds, one.gaps, one.tokens, one.first, table >= 0, table, gaps, steps)
    return tables.Coding(table, tables.normalised(gaps), tables.normalised(steps))


def encode_segment(found: Changes, coding: tables.Coding) -> bytes:
    words = np.empty(4 * found.kinds.size + 2 * coding.table.size + 2, np.uint32)
    used = kernels.encode(
        found.kinds, found.gaps, found.tokens, found.extras, found.first, coding.table >= 0, coding.table,
        coding.gap_starts, coding.gap_freqs, coding.step_starts, coding.step_freqs, words,
    )  # fmt: skip
    return np.ascontiguousarray(words[:used][::-1]).astype("<u4", copy=False).tobytes()


class Reader(NamedTuple):
    """The tables of a group, unfolded for decoding."""

    form: NumberFormat
    coding: tables.Coding
    gap_symbols: Array
    gap_starts: Array
    step_symbols: Array
    step_starts: Array


def reader(data: bytes, form: NumberFormat) -> Reader:
    """Raises WeightsError for tables that are not well formed."""
    coding = tables.read_tables(data, form.exponents)
    return Reader(
        form,
        coding,
        tables.symbols(coding.gap_freqs),
        coding.gap_starts,
        tables.symbols(coding.step_freqs),
        coding.step_starts,
    )


def decode_segment(
    data: memoryview, base: Sequence[Bits], changed: int, using: Reader, where: str
) -> list[tuple[Array, Array]]:
    """By piece the indices and new values of its changes.  Raises WeightsError for anything but a whole segment."""
    if len(data) % 4:
        raise invalid(f"{where} has {len(data)} bytes, no multiple of 4", "segments")
    form, coding = using.form, using.coding
    words = np.array(np.frombuffer(data, "<u4"), np.uint32)
    runs, coder = np.empty(form.exponents, np.int64), np.zeros(2, np.uint64)
    status = kernels.begin(words, coding.table, using.gap_symbols, using.gap_starts, coding.gap_freqs, runs, coder)
    indices, values = np.empty(changed, np.int64), np.empty(changed, form.kind)
    found, count = [], 0
    for piece in base:
        if status < 0:
            raise invalid(f"{where} {kernels.REASONS[status]}", "segments")
        status = kernels.decode(
            piece, form.mantissa, form.exponents - 1, (1 << (form.width - 1)) - 1, words, coding.table,
            using.gap_symbols, using.gap_starts, coding.gap_freqs, using.step_symbols, using.step_starts,
            coding.step_freqs, runs, coder, indices[count:], values[count:],
        )  # fmt: skip
        if status >= 0:
            found.append((indices[count : count + status], values[count : count + status]))
            count += status
    if status < 0:
        raise invalid(f"{where} {kernels.REASONS[status]}", "segments")
    if count != changed or int(coder[0]) != 1 << kernels.LOWER_BITS or int(coder[1]) != words.size:
        raise invalid(f"{where} does not end where it should", "segments")
    if runs[coding.table >= 0].any():
        raise invalid(f"{where} was made against another base: its classes end elsewhere", "base_digest")
    return found
