"""The numeric parser against everything: it never fails, never stalls, and reads what Python writes."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from rollgrid_scorer.rewards.numeric import _NUMBER, _last_run, answered_number, last_number

NUMERIC_SOUP = st.text(alphabet="0123456789.,-+eE/%$\\{}()fracboxd#<>answer ½−\n", max_size=200)


@given(st.text() | NUMERIC_SOUP)
def test_any_text_gives_a_number_or_none(text: str) -> None:
    assert isinstance(answered_number(text), Fraction | None)


@given(st.integers(min_value=-(10**30), max_value=10**30))
def test_integers_are_read_with_and_without_separators(number: int) -> None:
    for text in (f"{number}", f"{number:,}", f"The result: {number:,}.", f"#### {number}", rf"\boxed{{{number:,}}}"):
        assert answered_number(text) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_exactly(number: float) -> None:
    assert last_number(repr(number)) == Fraction(repr(number))


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_fractions_are_read(top: int, bottom: int) -> None:
    expected = Fraction(top, bottom)
    assert last_number(f"so {top}/{bottom}") == expected
    assert last_number(rf"so $\frac{{{top}}}{{{bottom}}}$") == expected


@given(st.integers(0, 10**9), st.text(alphabet="abc ,.;:\n()", max_size=50))
def test_the_last_number_wins(number: int, tail: str) -> None:
    assert last_number(f"17 and {number} {tail}") == number


@given(st.text() | NUMERIC_SOUP)
def test_searching_the_last_run_alone_finds_what_a_full_search_finds(text: str) -> None:
    whole = [match.span() for match in _NUMBER.finditer(text)]
    run = [match.span() for match in _NUMBER.finditer(text, _last_run(text))]
    assert run[-1:] == whole[-1:]
