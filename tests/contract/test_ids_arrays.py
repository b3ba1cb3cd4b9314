"""Ids are stable for ever, seeds never repeat among neighbours, packed arrays are what they were made of."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts import codec, ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.scoring import Score, ScorerKind, ScorerSpec, ScoreStatus, combine, next_todo

WORDS = st.text(max_size=40)
UINT32 = st.integers(0, 2**32 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def test_ids_are_what_they_have_always_been() -> None:
    assert ids.group_id("acme", "run-1", "key", 7) == "g3zfwb6bfd2fbsea5p2khrasu"
    assert ids.batch_id("acme", "run-1", "key") == "bnxkkgcciirry3cnqon43dysn"
    assert ids.idempotency_key("acme", "key") == "ilssrb42swwgiduk5v63qlffe"
    assert ids.pool_id("smol", "float32", "cpu", "local") == "ptvl4dsfiiukapfumd663ye2v"
    assert ids.sample_seed(42, 3) == 6799004032316978641
    assert ids.sample_id("g1", 3) == "g1.3"
    assert ids.turn_id("g1", 3, 2) == "g1.3.t2"


@given(st.tuples(WORDS, WORDS, WORDS, st.integers(0, 10**6)), st.tuples(WORDS, WORDS, WORDS, st.integers(0, 10**6)))
def test_two_groups_share_an_id_only_when_they_are_the_same(
    one: tuple[str, str, str, int], other: tuple[str, str, str, int]
) -> None:
    if "\x1f" in "".join(one[:3] + other[:3]):
        return  # the separator: no name, and refused in keys
    assert (ids.group_id(*one) == ids.group_id(*other)) == (one == other)


@given(WORDS, WORDS, WORDS)
def test_ids_are_subject_tokens(tenant: str, run: str, key: str) -> None:
    for made in (ids.group_id(tenant, run, key, 0), ids.batch_id(tenant, run, key), ids.pool_id(tenant, run, key, "")):
        assert ids.is_name(made)


@given(st.integers(0, 2**63 - 1), st.integers(0, 63))
def test_seeds_have_63_bits_and_are_repeatable(seed: int, index: int) -> None:
    made = ids.sample_seed(seed, index)
    assert 0 <= made < 2**63
    assert made == ids.sample_seed(seed, index)
    assert made != ids.sample_seed(seed, index, offset=1)


@given(st.integers(0, 2**62))
def test_neighbouring_groups_share_no_seed(seed: int) -> None:
    """The engine's own n seeds children by seed + index: group s+1 then repeats group s (measured)."""
    made = [ids.sample_seed(seed + group, index) for group in range(16) for index in range(8)]
    assert len(set(made)) == len(made)
    assert not set(made) & set(range(seed, seed + 32))


@given(st.lists(UINT32, max_size=200))
def test_token_ids_round_trip_everywhere(values: list[int]) -> None:
    packed = TokenIds.of(values)
    assert packed.tolist() == values == list(packed)
    assert len(packed) == len(values)
    assert packed.packed == struct.pack(f"<{len(values)}I", *values)
    assert np.frombuffer(packed.packed, packed.dtype).tolist() == values
    for form in (codec.MSGPACK, codec.JSON):
        assert codec.decode(codec.encode(packed, form), TokenIds, form) == packed


@given(st.lists(FLOAT32, max_size=200))
def test_floats_round_trip_everywhere(values: list[float]) -> None:
    packed = Floats.of(values)
    assert packed.tolist() == values
    assert packed.packed == struct.pack(f"<{len(values)}f", *values)
    assert codec.decode(codec.encode(packed), Floats) == packed
    if all(map(math.isfinite, values)):  # JSON has no infinity
        assert codec.decode(codec.encode(packed, codec.JSON), Floats, codec.JSON) == packed


@given(st.lists(UINT32, max_size=20), st.lists(UINT32, max_size=20))
def test_arrays_are_equal_when_their_values_are(one: list[int], other: list[int]) -> None:
    left, right = TokenIds.of(one), TokenIds.of(other)
    assert (left == right) == (one == other)
    assert left != Floats(left.packed)
    if one == other:
        assert hash(left) == hash(right)


@pytest.mark.parametrize("value", [-1, 2**32, 2**70])
def test_a_token_id_that_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds.of([value])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1023])
def test_a_buffer_of_a_broken_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        TokenIds(b"\x00" * size)


# -- rewards: failure is data, never 0 ------------------------------------------------------------------

SPECS = st.lists(
    st.builds(
        ScorerSpec,
        name=st.sampled_from("abcd"),
        type=st.just("x"),
        kind=st.sampled_from([kind for kind in ScorerKind if kind is not ScorerKind.DONE]),
        weight=st.floats(-2, 2),
        gate=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda spec: spec.name,
).map(tuple)


@given(SPECS, st.data())
def test_a_reward_is_null_exactly_when_some_scorer_gave_no_number(
    specs: tuple[ScorerSpec, ...], data: st.DataObject
) -> None:
    scores = []
    for spec in specs:
        status = data.draw(st.sampled_from([None, *ScoreStatus]))
        if status is not None:
            value = data.draw(st.floats(-1, 1)) if status.has_value else None
            scores.append(Score(scorer=spec.name, status=status, value=value))
    reward, status = combine(specs, tuple(scores))
    numbers = {score.scorer for score in scores if score.status.has_value}
    assert (reward is not None) == (numbers == {spec.name for spec in specs})
    assert status.has_value == (reward is not None)


@given(SPECS)
def test_a_sample_visits_every_scorer_kind_once_and_then_is_done(specs: tuple[ScorerSpec, ...]) -> None:
    visited, kind = [], next_todo(specs)
    while kind is not ScorerKind.DONE:
        visited.append(kind)
        kind = next_todo(specs, after=kind)
    assert len(set(visited)) == len(visited)
    assert set(visited) == {spec.kind for spec in specs}
