"""Frequency tables of the exponent-class codec: made from counts, written, read with every bound checked.

A table says how often each token comes, in parts of 2^14; neighbouring classes with few changes share
one.  A section holds, as unsigned LEB128 numbers: how many tables there are; of each exponent class 0 or
1 + the number of its table; then of each table its gaps and its steps: how many tokens, and of each how
far its number is from the one before (less one), and its frequency.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rollgrid_weights.errors import invalid

from .numbers import GAP_TOKENS, STEP_TOKENS

SCALE = 1 << 14
ENOUGH = 384
"""Changes that a table of one class has at least; below it shares with the next class."""

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Coding(NamedTuple):
    """What coder and decoder need: by class its table (-1 = no change), by table starts and frequencies."""

    table: Ints
    gap_freqs: Ints
    step_freqs: Ints

    @property
    def gap_starts(self) -> Ints:
        return starts(self.gap_freqs)

    @property
    def step_starts(self) -> Ints:
        return starts(self.step_freqs)


def starts(frequencies: Ints) -> Ints:
    return np.cumsum(frequencies, axis=1) - frequencies


def symbols(frequencies: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """By table and slot the token that the slot belongs to."""
    tokens = np.arange(frequencies.shape[1], dtype=np.uint16)
    return np.stack([np.repeat(tokens, row) for row in frequencies])


def share(changes: Ints) -> Ints:
    """By class the number of its table, from the changes of each class: -1 for none, few together."""
    table = np.full(changes.size, -1, np.int64)
    number, held = 0, 0
    for kind in np.flatnonzero(changes):
        if held >= ENOUGH:
            number, held = number + 1, 0
        table[kind] = number
        held += int(changes[kind])
    if number and held < ENOUGH:  # the last ones join those before
        table[table == number] = number - 1
    return table


def normalised(counts: Ints) -> Ints:
    """Frequencies that sum to 2^14 in each row, none that is needed zero."""
    return np.stack([_row(row) for row in counts])


def _row(counts: Ints) -> Ints:
    total = int(counts.sum())
    if not total:  # no class of the table comes twice: one token stands for all
        counts, total = np.eye(1, counts.size, dtype=np.int64)[0], 1
    exact = counts * (SCALE / total)
    frequencies = np.where(counts > 0, np.maximum(1, np.floor(exact)), 0).astype(np.int64)
    while missing := SCALE - int(frequencies.sum()):
        # the next part goes to, or comes from, whom it changes least in bits
        if missing > 0:
            gain = np.where(counts > 0, counts * np.log2(1 + 1 / np.maximum(frequencies, 1)), -1)
            order = np.argsort(-gain, kind="stable")[: min(missing, int((counts > 0).sum()))]
            frequencies[order] += 1
        else:
            loss = np.where(frequencies > 1, -counts * np.log2(1 - 1 / np.maximum(frequencies, 2)), np.inf)
            order = np.argsort(loss, kind="stable")[: min(-missing, int((frequencies > 1).sum()))]
            frequencies[order] -= 1
    return frequencies


def write_tables(coding: Coding) -> bytes:
    out = bytearray()
    _write(out, len(coding.gap_freqs))
    for row in coding.table.tolist():
        _write(out, row + 1)
    for pair in zip(coding.gap_freqs, coding.step_freqs, strict=True):
        for frequencies in pair:
            present = np.flatnonzero(frequencies)
            _write(out, len(present))
            for ahead, frequency in zip(np.diff(present, prepend=-1) - 1, frequencies[present], strict=True):
                _write(out, int(ahead))
                _write(out, int(frequency))
    return bytes(out)


def read_tables(data: bytes, classes: int) -> Coding:
    """Raises WeightsError unless it is a whole section for `classes` classes and nothing more."""
    numbers = _numbers(data)
    try:
        count = next(numbers)
        if not 1 <= count <= classes:
            raise invalid(f"the delta has {count} frequency tables for {classes} classes", "tables")
        table = np.array([next(numbers) - 1 for _ in range(classes)], np.int64)
        if table.max() >= count:
            raise invalid("a class of the delta names a frequency table that is not there", "tables")
        gaps, steps = [], []
        for _ in range(count):
            gaps.append(_read_row(numbers, GAP_TOKENS))
            steps.append(_read_row(numbers, STEP_TOKENS))
    except StopIteration:
        raise invalid("the frequency tables of the delta end early", "tables") from None
    if next(numbers, None) is not None:
        raise invalid("bytes follow the frequency tables of the delta", "tables")
    return Coding(table, np.stack(gaps), np.stack(steps))


def _read_row(numbers: Iterator[int], size: int) -> Ints:
    row, at = np.zeros(size, np.int64), -1
    for _ in range(next(numbers)):
        at += next(numbers) + 1
        frequency = next(numbers)
        if at >= size or not 1 <= frequency <= SCALE:
            raise invalid("a frequency table of the delta holds a token or frequency out of range", "tables")
        row[at] = frequency
    if int(row.sum()) != SCALE:
        raise invalid(f"a frequency table of the delta sums to {int(row.sum())}, not {SCALE}", "tables")
    return row


def _write(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _numbers(data: bytes) -> Iterator[int]:
    number, shift = 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            if shift > 28:
                raise invalid("a number in the frequency tables of the delta is too long", "tables")
        else:
            yield number
            number, shift = 0, 0
