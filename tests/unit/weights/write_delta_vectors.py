"""Writes `vectors/delta.json`: deltas that every reader of the format must read, now and later.

    python -m tests.unit.weights.write_delta_vectors

Published vectors never change; new ones are added at the end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rollgrid_weights.delta.blob import Codec
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.numbers import FORMATS
from rollgrid_weights.delta.states import TensorBits

from tests.support.delta_states import DTYPES, patterns, state

VECTORS = Path(__file__).parent / "vectors" / "delta.json"

Pair = tuple[dict[str, TensorBits], dict[str, TensorBits]]


def pairs() -> dict[str, tuple[Pair, int]]:
    """By name two states and the elements of a segment."""
    made: dict[str, tuple[Pair, int]] = {}
    two = [[0x3F80, 0x3F81, 0xBF80, 0x0000], [0x3F81, 0x3F81, 0xBF7F, 0x8000]]
    made["one notch up, none, one down over an exponent, zero to minus zero"] = (
        (state(w=("BF16", (2, 2), two[0])), state(w=("BF16", (2, 2), two[1]))),
        64,
    )
    made["no tensors"] = ({}, {}), 64
    made["no change"] = (state(w=("BF16", (3,), [1, 2, 3])), state(w=("BF16", (3,), [1, 2, 3]))), 64
    made["an empty tensor and a scalar"] = (
        (state(a=("F16", (0, 4), []), b=("F16", (), [0x3C00])), state(a=("F16", (0, 4), []), b=("F16", (), [0xFC01]))),
        64,
    )
    for dtype in DTYPES:
        old = patterns(FORMATS[dtype])
        pair = state(p=(dtype, (len(old),), old)), state(p=(dtype, (len(old),), [*old[1:], old[0]]))
        made[f"every special pattern to the next, {dtype}"] = pair, 8
    random = np.random.default_rng(20)
    bits = random.integers(0x3A00, 0x3D00, 1200)
    moved = np.where(random.random(1200) < 0.05, bits + random.integers(-40, 40, 1200), bits)
    made["two tensors, three segments, raw bits"] = (
        (
            state(a=("BF16", (20, 50), bits[:1000]), b=("BF16", (200,), bits[1000:])),
            state(a=("BF16", (20, 50), moved[:1000]), b=("BF16", (200,), moved[1000:])),
        ),
        500,
    )
    far = np.zeros(70_000, np.int64)
    far[69_000] = 5
    made["a gap of more than 16 bits"] = (
        (state(w=("F8_E5M2", (70_000,), [0] * 70_000)), state(w=("F8_E5M2", (70_000,), far))),
        1 << 17,
    )
    return made


def vectors() -> list[dict[str, Any]]:
    found = []
    for name, ((base, target), segment) in pairs().items():
        for codec in Codec:
            tensors = [
                {
                    "name": key,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "base": packed(tensor),
                    "target": packed(target[key]),
                }
                for key, tensor in base.items()
            ]
            blob = encode_delta(base, target, codec=codec, segment=segment)
            found.append(
                {"name": name, "codec": int(codec), "segment": segment, "tensors": tensors, "delta": blob.hex()}
            )
    return found


def packed(tensor: TensorBits) -> str:
    """Little-endian bytes as hex; a long row of zero bytes before the end as `00*<count>+`."""
    text = tensor.bits.astype(tensor.bits.dtype.newbyteorder("<")).tobytes().hex()
    zeros = (len(text) - len(text.lstrip("0"))) // 2
    return f"00*{zeros}+{text[2 * zeros :]}" if zeros > 64 else text


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(vectors(), indent=1) + "\n")
