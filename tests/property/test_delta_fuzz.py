"""Damaged, truncated and invented deltas are refused by a typed error: no crash, no allocation by what they announce."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts import codec as wire
from rollgrid_weights.delta import tables
from rollgrid_weights.delta.blob import (
    DIGEST_BYTES,
    FRONT,
    MAGIC,
    MAX_SEGMENT,
    Codec,
    DeltaHeader,
    DeltaTensor,
    Segment,
    SegmentGroup,
    read_blob,
    write_blob,
)
from rollgrid_weights.delta.decode import apply_delta
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.errors import WeightsError

from tests.support.delta_states import copied, same, state

RANDOM = np.random.default_rng(3)
OLD = RANDOM.integers(0x3800, 0x3D00, 900)
NEW = OLD ^ (RANDOM.random(900) < 0.2)
BASE = state(a=("BF16", (30, 20), OLD[:600]), b=("BF16", (300,), OLD[600:]), c=("F32", (3,), [0, 1 << 31, 5]))
TARGET = state(a=("BF16", (30, 20), NEW[:600]), b=("BF16", (300,), NEW[600:]), c=("F32", (3,), [1 << 31, 0, 6]))
BLOBS = {codec: encode_delta(BASE, TARGET, codec=codec, segment=256) for codec in Codec}
BODY = FRONT.size + DIGEST_BYTES
unhurried = settings(deadline=None)
both = pytest.mark.parametrize("codec", Codec)


def outcome(blob: bytes) -> bool | None:
    """Whether it was applied and gave the target; None when refused.  Anything else escapes."""
    built = copied(BASE)
    try:
        apply_delta(read_blob(blob), BASE, built)
    except WeightsError as error:
        wire.encode(error.info(), wire.JSON)
        return None
    return same(built, TARGET)


def sealed(blob: bytes) -> bytes:
    """With the digest that its bytes have: as a publisher would send it who means harm."""
    front, body = blob[: FRONT.size], blob[BODY:]
    return front + hashlib.sha256(front + body).digest() + body


def with_header(blob: bytes, change: Any) -> bytes:
    """The blob with another header; `change` gets the header as JSON values."""
    magic, version, codec, stored, _raw, payload = FRONT.unpack_from(blob)
    header = msgspec.json.decode(zstandard.decompress(blob[BODY : BODY + stored]))
    text = msgspec.json.encode(change(header))
    packed = zstandard.compress(text)
    front = FRONT.pack(magic, version, codec, len(packed), len(text), payload)
    return sealed(front + bytes(DIGEST_BYTES) + packed + blob[BODY + stored :])


@both
def test_the_good_ones_are_good(codec: Codec) -> None:
    assert outcome(BLOBS[codec]) is True
    assert outcome(with_header(BLOBS[codec], lambda header: header)) is True


@unhurried
@both
@given(data=st.data())
def test_A43_a_flipped_byte_is_refused(codec: Codec, data: st.DataObject) -> None:
    blob = bytearray(BLOBS[codec])
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    assert outcome(bytes(blob)) is None


@unhurried
@both
@given(data=st.data())
def test_a_cut_or_a_longer_one_is_refused(codec: Codec, data: st.DataObject) -> None:
    blob = BLOBS[codec]
    assert outcome(blob[: data.draw(st.integers(0, len(blob) - 1))]) is None
    assert outcome(blob + data.draw(st.binary(min_size=1, max_size=8))) is None


@settings(deadline=None, max_examples=150)
@both
@given(data=st.data())
def test_damage_under_a_right_digest_never_crashes(codec: Codec, data: st.DataObject) -> None:
    blob = bytearray(BLOBS[codec])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(blob) - 1))
        blob[place] = data.draw(st.integers(0, 255))
    outcome(sealed(bytes(blob)))


@unhurried
@both
@given(data=st.data())
def test_invented_payloads_never_crash(codec: Codec, data: st.DataObject) -> None:
    """Frames and words of any kind where the segments' bytes were."""
    blob = BLOBS[codec]
    stored = FRONT.unpack_from(blob)[3]
    begin = data.draw(st.integers(BODY + stored, len(blob) - 1))
    junk = data.draw(st.binary(min_size=len(blob) - begin, max_size=len(blob) - begin))
    outcome(sealed(blob[:begin] + junk))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 66) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@unhurried
@both
@given(data=st.data())
def test_invented_headers_never_crash(codec: Codec, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(["base_digest", "target_digest", "tensors", "groups"]))
    number = st.integers(-1, 1 << 62)
    values = JSON | st.lists(
        st.tuples(st.text(max_size=3), st.sampled_from(["BF16", "F32", "F4"]), st.lists(number), number)
    )
    outcome(with_header(BLOBS[codec], lambda header: header | {field: data.draw(values)}))


@given(st.binary(max_size=200))
def test_bytes_of_anything(data: bytes) -> None:
    for blob in (data, MAGIC + data):
        with pytest.raises(WeightsError):
            read_blob(blob)


@given(st.binary(max_size=200))
def test_tables_of_anything(data: bytes) -> None:
    try:
        found = tables.read_tables(data, 32)
    except WeightsError:
        return
    assert (found.gap_freqs.sum(1) == tables.SCALE).all()


def refused(blob: bytes) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        apply_delta(read_blob(blob), BASE, copied(BASE))
    return caught.value


@both
def test_what_a_header_announces_is_bounded_before_anything_is_allocated(codec: Codec) -> None:
    huge = [["a", "BF16", [1 << 40, 1 << 40], 0]]
    assert refused(with_header(BLOBS[codec], lambda header: header | {"tensors": huge})).limit
    groups = [["BF16", 0, 0, [[1 << 40, 1, 1]]]]
    assert refused(with_header(BLOBS[codec], lambda header: header | {"groups": groups})).field == "groups"
    front = FRONT.pack(MAGIC, 1, codec, 10, 1 << 31, 0)
    assert refused(front + bytes(DIGEST_BYTES + 10)).limit
    packed = zstandard.compress(bytes(1 << 20))  # a header that unpacks to more than it says
    front = FRONT.pack(MAGIC, 1, codec, len(packed), 100, 0)
    assert "unpacks to" in refused(sealed(front + bytes(DIGEST_BYTES) + packed)).message


@both
def test_a_segment_that_would_not_fit_into_memory_is_refused(codec: Codec) -> None:
    def of(elements: int) -> bytes:
        tensor, segment = DeltaTensor("a", "F32", (elements,), 0), Segment(elements, 0, 0)
        group = SegmentGroup("F32", 0, 0, (segment,))
        return write_blob(codec, DeltaHeader(base_digest="", target_digest="", tensors=(tensor,), groups=(group,)), [])

    assert read_blob(of(MAX_SEGMENT)).elements == MAX_SEGMENT
    found = refused(of(MAX_SEGMENT + 1))
    assert (found.code, found.field, found.limit) == ("limit_exceeded", "groups", "16777216 elements")


@both
def test_segments_and_groups_that_would_keep_a_reader_busy_for_hours_are_refused(codec: Codec) -> None:
    """Of zstd they take a few thousand bytes, of a reader a task or an unfolding of tables each."""
    many = [["F32", 0, 0, [[1, 0, 0]] * 70_000]]
    tensors = [["a", "F32", [70_000], 0]]
    found = refused(with_header(BLOBS[codec], lambda header: header | {"tensors": tensors, "groups": many}))
    assert (found.code, found.field, found.limit) == ("limit_exceeded", "groups", "65536 segments")
    twice = [["F32", 0, 0, [[35_000, 0, 0]]]] * 2
    found = refused(with_header(BLOBS[codec], lambda header: header | {"tensors": tensors, "groups": twice}))
    assert (found.code, found.field, found.limit) == ("limit_exceeded", "groups", "1 groups of this dtype")
    empty = [["F32", 0, 0, []]] * 2
    found = refused(with_header(BLOBS[codec], lambda header: header | {"groups": [*header["groups"], *empty]}))
    assert (found.code, found.field) == ("limit_exceeded", "groups")


@both
def test_another_base_is_refused_by_the_tensor(codec: Codec) -> None:
    delta = read_blob(BLOBS[codec])
    for other, says in (
        ({name: BASE[name] for name in ("a", "b")}, "missing"),
        (BASE | state(c=("F32", (1, 3), [0, 0, 0])), "[1, 3]"),
        (BASE | state(c=("F16", (3,), [0, 0, 0])), "F16"),
    ):
        with pytest.raises(WeightsError) as caught:
            apply_delta(delta, other, copied(other))
        assert caught.value.field == "c"
        assert says in caught.value.message


def test_A43_another_state_of_the_base_is_seen_by_the_exponent_codec() -> None:
    """Not by every element, which is what the digests are for; by every one whose exponent moved."""
    other = copied(BASE)
    other["a"].bits[5] ^= 1 << 9
    with pytest.raises(WeightsError):
        apply_delta(read_blob(BLOBS[Codec.EXPONENT]), other, copied(other))


def test_A43_a_base_of_other_exponents_behind_the_last_change_is_seen() -> None:
    """All symbols read well there: only the count of the class to the end of the segment is another."""
    base, target = (state(w=("BF16", (4,), bits)) for bits in ([128, 128, 128, 128], [129, 128, 128, 128]))
    delta = read_blob(encode_delta(base, target))
    other = state(w=("BF16", (4,), [128, 128, 128, 256]))
    with pytest.raises(WeightsError) as caught:
        apply_delta(delta, other, copied(other))
    assert caught.value.field == "base_digest"


@both
def test_changes_of_other_tensors_than_the_header_says_are_refused(codec: Codec) -> None:
    def moved(header: Any) -> Any:
        (a, b, c) = header["tensors"]
        return header | {"tensors": [[*a[:3], a[3] + 1], [*b[:3], b[3] - 1], c]}

    assert refused(with_header(BLOBS[codec], moved)).field == "a"


@both
def test_an_index_behind_the_end_of_a_segment_is_refused(codec: Codec) -> None:
    """A delta of ten elements whose header says four, as the base has."""
    base, target = state(w=("BF16", (10,), [128] * 10)), state(w=("BF16", (10,), [128] * 9 + [129]))

    def shortened(header: Any) -> Any:
        dtype, tables_, raw, [[_, changed, size]] = header["groups"][0]
        return header | {"tensors": [["w", dtype, [4], 1]], "groups": [[dtype, tables_, raw, [[4, changed, size]]]]}

    short = state(w=("BF16", (4,), [128] * 4))
    with pytest.raises(WeightsError) as caught:
        apply_delta(read_blob(with_header(encode_delta(base, target, codec=codec), shortened)), short, copied(short))
    assert caught.value.field == "segments"


def test_A43_another_version_of_the_format_is_unsupported() -> None:
    for place in (8, 10):
        blob = bytearray(BLOBS[Codec.GAPS])
        blob[place] = 9
        assert refused(sealed(bytes(blob))).field == "codec"


def test_a_codec_that_names_the_wrong_one_is_refused() -> None:
    for codec, other in ((Codec.GAPS, Codec.EXPONENT), (Codec.EXPONENT, Codec.GAPS)):
        blob = bytearray(BLOBS[codec])
        blob[10] = other
        assert outcome(sealed(bytes(blob))) is None


def test_states_that_do_not_fit_are_not_encoded() -> None:
    for other in ({"a": TARGET["a"]}, TARGET | state(d=("F32", (), [0])), TARGET | state(c=("F32", (3, 1), [0, 0, 0]))):
        with pytest.raises(WeightsError):
            encode_delta(BASE, other)
    with pytest.raises(WeightsError) as caught:
        encode_delta(BASE, TARGET, max_bytes=20)
    assert caught.value.field == "delta"


def test_the_header_says_what_there_is() -> None:
    header = read_blob(BLOBS[Codec.EXPONENT]).header
    assert isinstance(header, DeltaHeader)
    assert [tensor.name for tensor in header.tensors] == ["a", "b", "c"]
    assert [sum(segment.elements for segment in group.segments) for group in header.groups] == [900, 3]
