"""Deltas of adversarial tensors come back bit for bit, and applying twice is applying once (A43, A51)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollgrid_weights.delta.blob import Codec, read_blob
from rollgrid_weights.delta.decode import apply_delta, decode_delta
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.numbers import FORMATS
from rollgrid_weights.delta.states import State, tensor_bits

from tests.support.delta_states import DTYPES, copied, pairs, patterns, same, state

unhurried = settings(deadline=None)


def one(bits: list[int], dtype: str = "BF16") -> State:
    return state(w=(dtype, (len(bits),), bits))


NAN = (one([0x7FC1, 0xFFC1, 0x7F81]), one([0x7FC2, 0x7FC1, 0xFF81]))
ZEROS = (one([0x0000, 0x8000]), one([0x8000, 0x0000]))
NOTHING: tuple[State, State] = ({}, {})


@unhurried
@pytest.mark.parametrize("codec", Codec)
@given(pair=pairs(), segment=st.sampled_from([1, 2, 7, 64, 1 << 20]), threads=st.integers(1, 3))
@example(pair=NAN, segment=64, threads=1)
@example(pair=ZEROS, segment=1, threads=2)
@example(pair=NOTHING, segment=1, threads=1)
def test_A43_round_trip(codec: Codec, pair: tuple[State, State], segment: int, threads: int) -> None:
    base, target = pair
    before = copied(base)
    delta = read_blob(encode_delta(base, target, codec=codec, segment=segment, threads=threads))
    built = copied(base)
    apply_delta(delta, base, built, threads=threads)
    assert same(built, target)
    apply_delta(delta, base, built, threads=threads)  # again: an overwrite
    assert same(built, target)
    assert same(base, before)
    apply_delta(delta, before, before, threads=threads)  # in place
    assert same(before, target)
    changed = {name: int((base[name].bits != target[name].bits).sum()) for name in base}
    assert {tensor.name: tensor.changed for tensor in delta.header.tensors} == changed


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_every_pattern_to_every_other(codec: Codec, dtype: str) -> None:
    form = FORMATS[dtype]
    found = list(range(256)) if form.width == 8 else patterns(form)
    old = [bits for bits in found for _ in found]
    base, target = state(w=(dtype, (len(old),), old)), state(w=(dtype, (len(old),), found * len(found)))
    built = copied(base)
    apply_delta(read_blob(encode_delta(base, target, codec=codec, segment=1000)), base, built)
    assert same(built, target)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])
def test_many_elements_in_many_segments(codec: Codec, dtype: str, share: float) -> None:
    """Long gaps, tables of many tokens, and (with one table for all) classes that a segment lacks."""
    form, random = FORMATS[dtype], np.random.default_rng(7)
    old = random.integers(0, 1 << form.width, 300_001, dtype=np.uint64).astype(form.kind)
    new = old ^ (random.random(old.size) < share).astype(form.kind)
    base = {"a": tensor_bits("a", dtype, (old.size,), old), "b": tensor_bits("b", dtype, (old.size,), old)}
    target = {"a": tensor_bits("a", dtype, (old.size,), new), "b": base["b"]}
    delta = read_blob(encode_delta(base, target, codec=codec, segment=1 << 16, threads=2))
    built = copied(base)
    apply_delta(delta, base, built, threads=2)
    assert same(built, target)
    assert sum(patch.indices.size for patches in decode_delta(delta, base) for patch in patches) == delta.changed


def test_the_same_delta_from_any_number_of_threads() -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, 100_000).astype(np.uint16)
    base = {"w": tensor_bits("w", "BF16", (old.size,), old)}
    target = {"w": tensor_bits("w", "BF16", (old.size,), old ^ (random.random(old.size) < 0.01).astype(np.uint16))}
    made = {encode_delta(base, target, segment=4096, threads=threads) for threads in (1, 2, 5)}
    assert len(made) == 1
