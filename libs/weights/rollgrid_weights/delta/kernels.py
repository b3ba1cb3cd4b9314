# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The loops over elements, compiled: find what changed, code it, find it again.  Plain arrays in and out.

Every loop checks the bounds of what it reads and writes; what is wrong comes back as a negative number
(`REASONS`), never as an exception or a write outside an array.  All release the interpreter's lock.
Integers are of 64 bits and unsigned where bits are meant: numba would turn a mixture into floats.
"""

from __future__ import annotations

import numba
import numpy as np

from .numbers import DIRECT

SCALE_BITS = 14
"""Frequencies of one table sum to 2^14."""
LOWER_BITS = 31
"""The coder's state is in [2^31, 2^63) between symbols; it takes and gives 32 bits at a time."""
NEVER = 1 << 62
"""A run that no segment reaches: the class has no change."""

TRUNCATED, TOO_MANY, NO_CHANGE, NOT_A_NUMBER = -1, -2, -3, -4
REASONS = {
    TRUNCATED: "ends before its last symbol",
    TOO_MANY: "has more changes than it announces",
    NO_CHANGE: "holds a step that changes nothing, or one that is not in its shortest form",
    NOT_A_NUMBER: "steps out of the number format",
}


def _compiled(function):
    """Compiled on first use, and kept on disk where there is a place to write to."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return numba.njit(nogil=True)(function)


_inlined = numba.njit(nogil=True, inline="always")

_ONE, _32 = np.uint64(1), np.uint64(32)
_LOWER = np.uint64(1 << LOWER_BITS)
_SCALE = np.uint64(SCALE_BITS)
_SLOTS = np.uint64((1 << SCALE_BITS) - 1)
_MASK32 = np.uint64(0xFFFF_FFFF)


@_inlined
def _token(number):
    """(token, raw bits) of a natural number below 2^32."""
    if number < DIRECT:
        return number, 0
    high = 4
    while number >> (high + 1):
        high += 1
    return DIRECT + (high - 4) * 4 + ((number >> (high - 2)) & 3), high - 2


@_compiled
def scan(base, new, shift, classes, magnitude, ranks, last, before, found, kinds, gaps, tokens, extras, first):
    """Record every change of one piece; gives how many the segment has so far.

    By class: `ranks` elements so far, `last` the rank after the newest change, `before` where that change
    is recorded (-1 = none), `first` the gap before the first.  By change: its class in `kinds`, the step
    (`tokens`, `extras`), and in `gaps` the elements of its class between it and the next of the class.
    """
    count = found
    for i in range(base.size):
        old = np.int64(base[i])
        kind = (old >> shift) & classes
        value = np.int64(new[i])
        if old != value:
            gap = ranks[kind] - last[kind]
            if before[kind] < 0:
                first[kind] = gap
            else:
                gaps[before[kind]] = gap
            before[kind] = count
            last[kind] = ranks[kind] + 1
            away = (value & magnitude) - (old & magnitude)
            flags = np.int64((old ^ value) > magnitude)
            if away < 0:
                away = -away
                flags += 2
            token, bits = _token(away)
            kinds[count] = kind
            tokens[count] = token * 4 + flags
            extras[count] = away & ((1 << bits) - 1)
            count += 1
        ranks[kind] += 1
    return count


@_compiled
def count_tokens(kinds, gaps, tokens, first, active, table, gap_counts, step_counts):
    """Add one segment's tokens to the counts of its classes' tables."""
    for kind in range(active.size):
        if active[kind]:
            token, _ = _token(np.int64(first[kind]))
            gap_counts[table[kind], token] += 1
    for i in range(kinds.size):
        token, _ = _token(np.int64(gaps[i]))
        gap_counts[table[kinds[i]], token] += 1
        step_counts[table[kinds[i]], tokens[i]] += 1


@_inlined
def _put(state, words, at, start, frequency):
    limit = ((_LOWER >> _SCALE) << _32) * frequency
    if state >= limit:
        words[at] = np.uint32(state & _MASK32)
        at += 1
        state >>= _32
    return ((state // frequency) << _SCALE) + (state % frequency) + start, at


@_inlined
def _put_raw(state, words, at, value, bits):
    width = np.uint64(bits)
    if state >= ((_LOWER >> width) << _32):
        words[at] = np.uint32(state & _MASK32)
        at += 1
        state >>= _32
    return (state << width) | np.uint64(value), at


@_inlined
def _put_number(state, words, at, number, starts, frequencies):
    token, bits = _token(number)
    if bits:
        state, at = _put_raw(state, words, at, number & ((1 << bits) - 1), bits)
    return _put(state, words, at, np.uint64(starts[token]), np.uint64(frequencies[token]))


@_compiled
def encode(kinds, gaps, tokens, extras, first, active, table, gap_starts, gap_freqs, step_starts, step_freqs, words):
    """Code one segment from its end to its beginning; gives the number of words, the newest last."""
    state, at = _LOWER, 0
    for i in range(kinds.size - 1, -1, -1):
        row = table[kinds[i]]
        state, at = _put_number(state, words, at, np.int64(gaps[i]), gap_starts[row], gap_freqs[row])
        token = np.int64(tokens[i])
        distance = token >> 2
        if distance >= DIRECT:
            state, at = _put_raw(state, words, at, np.int64(extras[i]), ((distance - DIRECT) >> 2) + 2)
        state, at = _put(state, words, at, np.uint64(step_starts[row, token]), np.uint64(step_freqs[row, token]))
    for kind in range(active.size - 1, -1, -1):
        if active[kind]:
            row = table[kind]
            state, at = _put_number(state, words, at, np.int64(first[kind]), gap_starts[row], gap_freqs[row])
    words[at] = np.uint32(state >> _32)
    words[at + 1] = np.uint32(state & _MASK32)
    return at + 2


@_inlined
def _get(state, words, at, symbols, starts, frequencies):
    """(symbol, state, at); `at` is negative once a word is missing."""
    slot = state & _SLOTS
    symbol = np.int64(symbols[slot])
    state = np.uint64(frequencies[symbol]) * (state >> _SCALE) + slot - np.uint64(starts[symbol])
    if state < _LOWER:
        if at >= words.size:
            return symbol, state, np.int64(TRUNCATED)
        state = (state << _32) | np.uint64(words[at])
        at += 1
    return symbol, state, at


@_inlined
def _get_rest(token, state, words, at):
    """(number, state, at) behind its token."""
    if token < DIRECT:
        return token, state, at
    bits = ((token - DIRECT) >> 2) + 2
    width = np.uint64(bits)
    rest = np.int64(state & ((_ONE << width) - _ONE))
    state >>= width
    if state < _LOWER:
        if at >= words.size:
            return token, state, np.int64(TRUNCATED)
        state = (state << _32) | np.uint64(words[at])
        at += 1
    return ((np.int64(4) + ((token - DIRECT) & 3)) << bits) + rest, state, at


@_compiled
def begin(words, table, gap_symbols, gap_starts, gap_freqs, runs, coder):
    """Read the state and the first gap of every class that has a table; gives 0 or a reason."""
    if words.size < 2:
        return TRUNCATED
    state, at = (np.uint64(words[1]) << _32) | np.uint64(words[0]), np.int64(2)
    if state < _LOWER or state >= _ONE << np.uint64(63):
        return TRUNCATED
    for kind in range(runs.size):
        row = table[kind]
        if row < 0:
            runs[kind] = NEVER
            continue
        token, state, at = _get(state, words, at, gap_symbols[row], gap_starts[row], gap_freqs[row])
        if at >= 0:
            runs[kind], state, at = _get_rest(token, state, words, at)
        if at < 0:
            return at
    coder[0] = state
    coder[1] = np.uint64(at)
    return 0


@_compiled
def decode(
    base, shift, classes, magnitude, words, table, gap_symbols, gap_starts, gap_freqs, step_symbols, step_starts,
    step_freqs, runs, coder, indices, values,
):  # fmt: skip
    """The changes of one piece into `indices` and `values`; gives how many, or a reason."""
    count, state, at = 0, coder[0], np.int64(coder[1])
    for i in range(base.size):
        old = np.int64(base[i])
        kind = (old >> shift) & classes
        run = runs[kind]
        if run:
            runs[kind] = run - 1
            continue
        if count >= indices.size:
            return TOO_MANY
        row = table[kind]
        token, state, at = _get(state, words, at, step_symbols[row], step_starts[row], step_freqs[row])
        if at < 0:
            return at
        distance, state, at = _get_rest(token >> 2, state, words, at)
        if at < 0:
            return at
        if distance == 0 and token != 1:
            return NO_CHANGE
        size = (old & magnitude) + (distance if not token & 2 else -distance)
        if size < 0 or size > magnitude:
            return NOT_A_NUMBER
        sign = (old & (magnitude + 1)) ^ ((token & 1) * (magnitude + 1))
        indices[count] = i
        values[count] = sign | size
        count += 1
        token, state, at = _get(state, words, at, gap_symbols[row], gap_starts[row], gap_freqs[row])
        if at >= 0:
            runs[kind], state, at = _get_rest(token, state, words, at)
        if at < 0:
            return at
    coder[0] = state
    coder[1] = np.uint64(at)
    return count
