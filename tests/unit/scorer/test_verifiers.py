"""Details of the built-in verifiers that their fixtures do not show: parameters, arbitrary text, turn values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_scorer.nursery import read_verdict
from rollgrid_scorer.registry import Registry
from rollgrid_scorer.rewards.base import ScoreInput, TaskError, Verdict

REGISTRY = Registry()


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("regex", {"pattern": 7}, "params.pattern: Expected `str"),
        ("regex", {"pattern": "a", "grup": 1}, "params: Object contains unknown field `grup`"),
        ("regex", {"pattern": "a", "match": "fullmatch"}, "params.match: Invalid enum value"),
        ("regex", {"pattern": "(a)", "group": "x"}, "params.group: params.pattern has no group 'x'"),
        ("json_schema", {"schema": {"type": "objct"}}, r"params.schema: \$.type"),
        ("json_schema", {"extract": "last"}, "params.extract"),
        ("multiple_choice", {"letters": "AA"}, "params.letters"),
        ("math", {"digits": -1}, "params.digits"),
        ("length", {"max": 1.5}, "params.max: Expected `int"),
        ("length", {"min": 2, "max": 1}, "params.min: 2 is over params.max=1"),
        ("format", {"sections": ["think", ""]}, r"params.sections\[1\]|params.sections\[...\]"),
    ],
)
def test_a_wrong_parameter_is_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        REGISTRY.make(name, params)


PARAMS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": r"x = (\d+)", "group": 1, "answer": "4"},
    "json_schema": {"schema": {"type": "object", "required": ["a"]}},
    "multiple_choice": {"answer": "B", "casefold": True},
    "length": {"max": 10, "unit": "characters", "ramp": 5},
    "format": {},
}
PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "A", "B", " or ", "Answer: ", "\\boxed{", "}", "{", "[", '"a": 1',
     "```json\n", "```", "x = 4", "\n", " ", "(", ")", "\x00", "\ud800"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(text=st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join))
@pytest.mark.parametrize("name", PARAMS)
def test_whatever_a_model_writes_gets_a_number(name: str, text: str) -> None:
    verdict = REGISTRY.make(name, PARAMS[name]).score(ScoreInput(text=text, tokens=len(text)))
    assert isinstance(verdict, Verdict)
    assert 0.0 <= verdict.value <= 1.0
    assert not verdict.invalid_output or verdict.value == 0.0


@given(low=st.integers(0, 50), width=st.integers(0, 50), ramp=st.integers(0, 50), tokens=st.integers(0, 200))
def test_length_falls_in_a_straight_line(low: int, width: int, ramp: int, tokens: int) -> None:
    verifier = REGISTRY.make("length", {"min": low, "max": low + width, "ramp": ramp})

    def value(count: int) -> float:
        found = verifier.score(ScoreInput(text="", tokens=count))
        assert isinstance(found, Verdict)
        return found.value

    inside = low <= tokens <= low + width
    assert (value(tokens) == 1.0) is inside
    if ramp and tokens > low + width:
        assert value(tokens) == pytest.approx(max(0.0, 1 - (tokens - low - width) / ramp))
        assert value(tokens + 1) <= value(tokens)


@given(inner=st.text(min_size=1, max_size=20).filter(lambda text: text.strip() and "<" not in text))
def test_format_accepts_any_filling(inner: str) -> None:
    verifier = REGISTRY.make("format", {})
    assert verifier.score(ScoreInput(text=f"<think>{inner}</think>{inner and ' '}<answer>{inner}</answer>")) == Verdict(
        1.0
    )


def test_turn_values_are_finite_numbers_or_none() -> None:
    assert read_verdict(Verdict(1, turn_values=(1, None, 0.5))) == Verdict(1.0, turn_values=(1.0, None, 0.5))
    for bad in (math.nan, "1", math.inf, object()):
        with pytest.raises(ValueError, match="the verifier returned"):
            read_verdict(Verdict(1.0, turn_values=(0.0, bad)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5000 turn values"):
        read_verdict(Verdict(1.0, turn_values=(0.0,) * 5000))
