"""The numeric verifier: which number a solution ends in, and when it is right."""

from __future__ import annotations

from fractions import Fraction

import pytest
from rollgrid_scorer.rewards.base import ScoreInput, TaskError
from rollgrid_scorer.rewards.numeric import Numeric, answered_number, last_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("first 1, then 2", 2),
        ("1,234,567", 1234567),
        ("1,2", 2),
        ("12,34", 34),
        ("$1,200.50", Fraction("1200.5")),
        ("-$5", -5),
        ("-3", -3),
        ("x=-3", -3),
        ("\u22123", -3),
        ("5-3", 3),
        ("- 42", 42),
        (".5", Fraction(1, 2)),
        ("3.", 3),
        ("1e3", 1000),
        ("1.5E-3", Fraction(3, 2000)),
        ("2e", 2),
        ("1/2", Fraction(1, 2)),
        ("3 / 4", Fraction(3, 4)),
        ("-1/2", Fraction(-1, 2)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{ 1 }{ 3 }", Fraction(-1, 3)),
        (r"1{,}000", 1000),
        (r"1\,000", 1000),
        ("50%", 50),
        (r"50\%", 50),
        ("12/25/2023", 2023),
        ("0.1 + 0.2 = 0.3", Fraction(3, 10)),
    ],
)
def test_last_number(text: str, value: object) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize("text", ["", "none", "1/0", "1e999999999", "9" * 5000, "\u0663", "½", "∞"])
def test_unreadable(text: str) -> None:
    assert last_number(text) is None


def test_conventions_in_order() -> None:
    assert answered_number(r"7 \boxed{42} 9") == 42
    assert answered_number("work 12\n#### 1,234\n") == 1234
    assert answered_number("<answer>5 apples</answer> of 9") == 5
    assert answered_number(r"\boxed{no number} 9") is None
    assert answered_number(r"\boxed{x = \frac{1}{2}}") == Fraction(1, 2)


def test_percent_as_ratio() -> None:
    assert last_number("50%", percent_is_ratio=True) == Fraction(1, 2)
    assert Numeric(percent="ratio").score(ScoreInput(text="50%", task={"answer": 0.5})).value == 1.0


@pytest.mark.parametrize(
    ("params", "text", "answer", "value"),
    [
        ({}, "0.30000001", 0.3, 1.0),
        ({}, "0.3001", 0.3, 0.0),
        ({"tolerance": 0.01}, "0.305", 0.3, 1.0),
        ({"relative": 0.01}, "1009", 1000, 1.0),
        ({"relative": 0.01}, "1011", 1000, 0.0),
        ({}, "72", "She sold 24+48=72 clips. #### 72", 1.0),
        ({}, "1/3", "0.3333333", 1.0),
        ({}, "-4", 4, 0.0),
    ],
)
def test_values(params: dict[str, float], text: str, answer: object, value: float) -> None:
    assert Numeric(**params).score(ScoreInput(text=text, task={"answer": answer})).value == value  # type: ignore[arg-type]


def test_unparsable_output_is_invalid_output_with_value_0() -> None:
    verdict = Numeric().score(ScoreInput(text="I do not know", task={"answer": 1}))
    assert (verdict.value, verdict.invalid_output) == (0.0, True)


@pytest.mark.parametrize("answer", [None, True, "no number", [], float("nan"), float("inf")])
def test_a_reference_that_is_no_number_raises(answer: object) -> None:
    with pytest.raises(TaskError):
        Numeric().score(ScoreInput(text="1", task={"answer": answer}))


@pytest.mark.parametrize(
    "params", [{"tolerance": -1}, {"tolerance": float("nan")}, {"relative": "x"}, {"percent": "?"}]
)
def test_bad_parameters_raise(params: dict[str, object]) -> None:
    with pytest.raises(TaskError):
        Numeric(**params)  # type: ignore[arg-type]
