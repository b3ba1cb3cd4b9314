"""A reader of delta files in plain Python, written from `docs/reference/delta-format.md` alone: slow, and nobody's import.

It shows that the page is enough to implement the format, and holds the real reader to it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import zstandard

FORMATS = {"BF16": (16, 7), "F16": (16, 10), "F32": (32, 23), "F8_E4M3": (8, 3), "F8_E5M2": (8, 2)}
L = 1 << 31

Tensors = dict[str, list[int]]
"""Elements by tensor as unsigned integers."""


def read(blob: bytes, base: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The header, and the target."""
    magic, version, codec, stored, raw, payload = struct.unpack_from("<8sHHIIQ", blob)
    assert (magic, version) == (b"rgdelta\n", 1)
    assert len(blob) == 60 + stored + payload
    assert hashlib.sha256(blob[:28] + blob[60:]).digest() == blob[28:60]
    text = zstandard.ZstdDecompressor().decompress(blob[60 : 60 + stored])
    assert len(text) == raw
    header = json.loads(text)
    target = {name: list(bits) for name, bits in base.items()}
    places = {dtype: elements(header["tensors"], dtype) for dtype in FORMATS}
    at = 60 + stored
    for dtype, tables, _, segments in header["groups"]:
        coding = Coding(blob[at : at + tables], dtype) if codec == 2 else None
        at += tables
        for count, changed, size in segments:
            segment = [next(places[dtype]) for _ in range(count)]
            data = blob[at : at + size]
            at += size
            old = [base[name][place] for name, place in segment]
            changes = by_exponent(data, old, coding) if coding else by_gap(data, changed, dtype)
            assert len(changes) == changed
            for index, bits in changes:
                name, place = segment[index]
                target[name][place] = bits
    assert at == len(blob)
    return header, target


def elements(tensors: list[Any], dtype: str) -> Iterator[tuple[str, int]]:
    """The lane of a dtype: every element of its tensors in turn."""
    for name, kind, shape, _ in tensors:
        if kind == dtype:
            for place in range(math.prod(shape)):
                yield name, place


def by_gap(data: bytes, changed: int, dtype: str) -> list[tuple[int, int]]:
    if not changed:
        return []
    item = FORMATS[dtype][0] // 8
    sizes = struct.unpack_from(f"<{3 + item}I", data)
    at, streams = 4 * (3 + item), []
    for size in sizes:
        streams.append(zstandard.ZstdDecompressor().decompress(data[at : at + size]))
        at += size
    low, high, long, *values = streams
    longs = iter(struct.unpack(f"<{len(long) // 4}I", long))
    changes, index = [], -1
    for number in range(changed):
        gap = low[number] | high[number] << 8
        index += 1 + (next(longs) if gap == 0xFFFF else gap)
        changes.append((index, sum(plane[number] << 8 * byte for byte, plane in enumerate(values))))
    return changes


class Coding:
    """The frequency tables of a group."""

    def __init__(self, stored: bytes, dtype: str) -> None:
        numbers = leb128(zstandard.ZstdDecompressor().decompress(stored))
        self.width, self.mantissa = FORMATS[dtype]
        count = next(numbers)
        self.table = [next(numbers) - 1 for _ in range(1 << (self.width - 1 - self.mantissa))]
        self.gaps, self.steps = [], []
        for _ in range(count):
            self.gaps.append(slots(numbers))
            self.steps.append(slots(numbers))
        assert next(numbers, None) is None


def leb128(data: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0


def slots(numbers: Iterator[int]) -> list[tuple[int, int, int]]:
    """By slot the token, its first slot, its frequency."""
    found: list[tuple[int, int, int]] = []
    token = -1
    for _ in range(next(numbers)):
        token += next(numbers) + 1
        frequency = next(numbers)
        found += [(token, len(found), frequency)] * frequency
    assert len(found) == 1 << 14
    return found


class Stream:
    """The coder's state and the words that are left."""

    def __init__(self, data: bytes) -> None:
        self.words = iter(struct.unpack(f"<{len(data) // 4}I", data))
        self.state = next(self.words) | next(self.words) << 32

    def refill(self) -> None:
        if self.state < L:
            self.state = self.state << 32 | next(self.words)

    def token(self, table: list[tuple[int, int, int]]) -> int:
        slot = self.state & 0x3FFF
        token, start, frequency = table[slot]
        self.state = frequency * (self.state >> 14) + slot - start
        self.refill()
        return token

    def number(self, token: int) -> int:
        """The number of a token: with its raw bits, if it has any."""
        if token < 16:
            return token
        octave, quarter = divmod(token - 16, 4)
        bits = octave + 2
        rest = self.state & ((1 << bits) - 1)
        self.state >>= bits
        self.refill()
        return (4 + quarter << bits) + rest


def by_exponent(data: bytes, old: list[int], coding: Coding) -> list[tuple[int, int]]:
    stream, sign = Stream(data), 1 << coding.width - 1
    run = {
        kind: stream.number(stream.token(coding.gaps[table])) for kind, table in enumerate(coding.table) if table >= 0
    }
    changes = []
    for index, bits in enumerate(old):
        kind = (bits & (sign - 1)) >> coding.mantissa
        if kind not in run:
            continue
        if run[kind]:
            run[kind] -= 1
            continue
        token = stream.token(coding.steps[coding.table[kind]])
        distance = stream.number(token >> 2)
        size = (bits & (sign - 1)) + (-distance if token & 2 else distance)
        assert 0 <= size < sign
        changes.append((index, size | ((bits & sign) ^ (sign if token & 1 else 0))))
        run[kind] = stream.number(stream.token(coding.gaps[coding.table[kind]]))
    assert stream.state == L
    assert next(stream.words, None) is None
    assert not any(run.values())
    return changes
