"""The lower bound of a text's tokens is never above their number, whatever the tokenizer does to text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_rendering.least import LeastTokens
from rollgrid_rendering.renderer import Renderer, TooManyTokens
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.support.tiny_models import TinyModel, tiny_model

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200) | st.text(" ab\n0<|im_end>", max_size=400)


def _plain() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model(TinyModel()) / "tokenizer.json"))


def _normalized(normalizer: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = _plain()
        tokenizer.normalizer = normalizer
        return tokenizer

    return make


def _split(behavior: str) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = _plain()
        split = pre_tokenizers.Split(Regex(r"\s+"), behavior)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return tokenizer

    return make


def _greedy_token() -> Tokenizer:
    tokenizer = _plain()
    tokenizer.add_tokens([AddedToken("ab", lstrip=True, rstrip=True)])
    return tokenizer


def _long_token() -> Tokenizer:
    tokenizer = _plain()
    tokenizer.add_tokens([AddedToken("ab" * 40)])
    return tokenizer


CERTAIN: dict[str, Callable[[], Tokenizer]] = {
    "plain": _plain,
    "nfc": _normalized(normalizers.NFC()),
    "nfkc": _normalized(normalizers.NFKC()),
    "isolated": _split("isolated"),
    "merged": _split("merged_with_next"),
    "long token": _long_token,
}
SILENT: dict[str, Callable[[], Tokenizer]] = {
    "removed": _split("removed"),
    "strip": _normalized(normalizers.Strip()),
    "replace": _normalized(normalizers.Replace("a", "")),
    "greedy token": _greedy_token,
}


@cache
def made(name: str) -> tuple[Tokenizer, LeastTokens]:
    tokenizer = {**CERTAIN, **SILENT}[name]()
    return tokenizer, LeastTokens.from_backend(tokenizer)


@pytest.mark.parametrize("name", [*CERTAIN, *SILENT])
@given(text=TEXTS)
def test_never_above_the_real_number(name: str, text: str) -> None:
    tokenizer, least = made(name)
    assert least.of(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_long_text_is_known_to_be_long(name: str) -> None:
    assert made(name)[1].of("x" * 100_000) >= 1000


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_claimed_where_text_may_vanish(name: str) -> None:
    assert made(name)[1].of("x" * 100_000) == 0


def test_rewritten_text_is_not_judged() -> None:
    assert made("nfc")[1].of("e\u0301" * 1000) == 0
    assert LeastTokens.from_backend(None).of("x" * 1000) == 0


def test_a_renderer_refuses_without_tokenizing() -> None:
    renderer = Renderer.load(tiny_model(TinyModel()))
    text = "abc " * 500
    assert len(renderer.encode(text, at_most=2000)) > 100
    with pytest.raises(TooManyTokens) as refused:
        renderer.encode(text, at_most=100)
    assert 100 < refused.value.least <= len(renderer.encode(text))
