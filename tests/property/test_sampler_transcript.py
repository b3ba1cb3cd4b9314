"""The text of a sample that arrives in portions: joined it is the text of all its ids, wherever it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.jobs import SamplingParams
from rollgrid_sampler.transcript import UNFINISHED, Transcript, whole_text

VOCAB = 512
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=60)
letters = st.lists(st.integers(67, 92), min_size=1, max_size=60)


@cache
def byte_level() -> Any:
    from tokenizers import Tokenizer

    from tests.support.tiny_models import tiny_model

    return Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))


@cache
def word_pieces() -> Any:
    """A tokenizer that spells blanks as ▁ and drops the first one, as Llama 2's does."""
    from tokenizers import Tokenizer, decoders, models

    words = [f"▁w{i}" if i % 2 else f"x{i}" for i in range(VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="x0"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def decode_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def portions(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("make", [byte_level, word_pieces])
@given(ids=tokens, cuts=st.lists(st.integers(0, 100), max_size=6))
def test_joined_portions_are_the_whole_text(make: Callable[[], Any], ids: list[int], cuts: list[int]) -> None:
    decode = decode_of(make())
    transcript = Transcript(decode, SamplingParams(max_tokens=1))
    joined = ""
    for portion in portions(ids, cuts):
        joined += transcript.push(portion)
    assert joined + transcript.finish() == decode(ids)
    assert transcript.text == decode(ids)


@given(st.text(max_size=40), st.integers(0, 200))
def test_what_is_released_ends_between_characters_and_depends_on_the_ids_alone(text: str, cut: int) -> None:
    text = text.replace(UNFINISHED, "")
    ids = byte_level().encode(text).ids
    cut %= len(ids) + 1
    decode = decode_of(byte_level())
    one_by_one, at_once = (Transcript(decode, SamplingParams(max_tokens=1)) for _ in range(2))
    for token in ids[:cut]:
        one_by_one.push([token])
    at_once.push(ids[:cut])
    assert one_by_one.text == at_once.text
    assert text.startswith(one_by_one.text)
    assert one_by_one.text + one_by_one.push(ids[cut:]) + one_by_one.finish() == text


@settings(max_examples=300)
@given(
    letters,
    st.lists(st.text(alphabet="abcdefg", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 10),
    st.booleans(),
    st.integers(0, 100),
)
def test_a_stop_string_is_found_over_every_join_and_never_shows(
    ids: list[int], stop: list[str], least: int, include: bool, cut: int
) -> None:
    """The earliest end wins, none before `min_tokens`; one letter is one token here."""
    spelled = decode_of(byte_level())(ids)
    assert len(spelled) == len(ids)
    sampling = SamplingParams(
        max_tokens=99, min_tokens=least, stop=tuple(stop), include_stop_str_in_output=include, ignore_eos=True
    )
    expected = None
    for end in range(least + 1, len(ids) + 1):
        hits = [s for s in stop if spelled[:end].endswith(s)]
        if hits:
            expected = (end, hits)
            break
    transcript = Transcript(decode_of(byte_level()), sampling)
    cut %= len(ids) + 1
    shown = transcript.push(ids[:cut])
    shown += transcript.push(ids[cut:])
    shown += transcript.finish()
    if expected is None:
        assert (transcript.stopped, shown) == (None, spelled)
        return
    end, hits = expected
    assert transcript.stopped in hits
    assert transcript.count == end
    assert shown == spelled[: end if include else end - len(transcript.stopped)]
    assert whole_text(decode_of(byte_level()), ids[:end], transcript.stopped, include=include) == shown


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    ids = byte_level().encode
    transcript = Transcript(decode_of(byte_level()), SamplingParams(max_tokens=9, stop=("bcd",)))
    shown = ["".join(transcript.push([token]) for token in ids(letter).ids) for letter in "abcxb"]
    assert shown == ["a", "", "", "bcx", ""]
    assert transcript.finish() == "b"
