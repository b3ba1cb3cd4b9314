"""States for deltas: arrays of raw bits by name and dtype, and hypothesis strategies of adversarial pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from rollgrid_weights.delta.numbers import FORMATS, NumberFormat
from rollgrid_weights.delta.states import State, TensorBits

DTYPES = sorted(FORMATS)
SHAPES = st.sampled_from([(), (0,), (1,), (3, 0), (2,), (5, 3), (17,), (4, 4, 4), (130,)])


def state(**tensors: tuple[str, tuple[int, ...], Any]) -> dict[str, TensorBits]:
    """By name: dtype, shape, bits."""
    return {
        name: TensorBits(dtype, shape, np.array(bits, FORMATS[dtype].kind).reshape(-1))
        for name, (dtype, shape, bits) in tensors.items()
    }


def copied(found: State) -> dict[str, TensorBits]:
    return {name: tensor._replace(bits=tensor.bits.copy()) for name, tensor in found.items()}


def same(one: State, other: State) -> bool:
    """Equal bit for bit."""
    return one.keys() == other.keys() and all(
        tensor[:2] == other[name][:2] and tensor.bits.tobytes() == other[name].bits.tobytes()
        for name, tensor in one.items()
    )


def patterns(form: NumberFormat) -> list[int]:
    """Both zeros, the smallest and largest denormals and normals, infinities, NaNs of several payloads, ± all."""
    exponents = ((1 << form.width - 1) - 1) ^ ((1 << form.mantissa) - 1)
    one = 1 << form.mantissa
    positive = [0, 1, one - 1, one, one + 1, exponents - 1, exponents, exponents + 1, exponents + one // 2]
    positive += [(1 << form.width - 1) - 1, (form.exponents // 2) << form.mantissa]
    return sorted({bits | sign for bits in positive for sign in (0, 1 << form.width - 1)})


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, TensorBits], dict[str, TensorBits]]:
    """Two states of the same tensors: alike, a few elements apart, or different in every element."""
    base: dict[str, TensorBits] = {}
    target: dict[str, TensorBits] = {}
    for number in range(draw(st.integers(0, 4))):
        form = FORMATS[draw(st.sampled_from(DTYPES))]
        shape = draw(SHAPES)
        name, count = f"t{number}", math.prod(shape)
        bits = st.sampled_from(patterns(form)) | st.integers(0, (1 << form.width) - 1)
        if draw(st.booleans()):  # like weights: of few exponents
            bits = st.integers(0, (3 << form.mantissa) - 1)
        old = draw(st.lists(bits, min_size=count, max_size=count))
        kind = draw(st.sampled_from(["same", "some", "notch", "all", "any"]))
        new = [draw(bits) for _ in old] if kind == "any" else list(old)
        if kind == "all":
            new = [(found + 1 + draw(st.integers(0, 2))) % (1 << form.width) for found in old]
        elif kind in ("some", "notch") and count:
            for place in draw(st.lists(st.integers(0, count - 1), max_size=8)):
                new[place] = draw(bits) if kind == "some" else (old[place] ^ 1)
        base |= state(**{name: (form.dtype, shape, old)})
        target |= state(**{name: (form.dtype, shape, new)})
    return base, target
