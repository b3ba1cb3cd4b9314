"""The study's statistics against textbook values (A20)."""

from __future__ import annotations

import pytest

from examples.own_trainer.intervals import equivalence_of, mean_of, rise_of


def near(expected: float) -> object:
    return pytest.approx(expected, abs=5e-4)


def test_an_interval_is_the_mean_and_so_many_standard_errors() -> None:
    found = mean_of([1, 2, 3, 4, 5])  # mean 3, error sqrt(2.5 / 5) = 0.7071, t(0.975, 4) = 2.7764
    assert found.mean == 3
    assert (found.low, found.high) == (near(3 - 2.7764 * 0.70711), near(3 + 2.7764 * 0.70711))


def test_a_rise_is_judged_one_sided() -> None:
    assert rise_of([1, 2, 3, 4, 5]).p == near(0.00662)  # t = 3 / 0.7071 = 4.243, 4 degrees of freedom
    assert rise_of([-1, 1, -2, 2, 0]).p == near(0.5)
    assert rise_of([0.5, 0.5]).p == 0


def test_alike_means_within_the_margin_and_not_merely_no_difference_found() -> None:
    close = equivalence_of([0.01, -0.01, 0.0, 0.02, -0.02], margin=0.05)
    assert close.equivalent
    assert -0.05 < close.interval.low < close.interval.high < 0.05
    # no significant difference from 0 either, but far too uncertain to be called alike
    assert not equivalence_of([0.2, -0.2, 0.1, -0.1, 0.0], margin=0.05).equivalent
    # certain, and too far apart
    assert not equivalence_of([0.08, 0.081, 0.079, 0.08, 0.082], margin=0.05).equivalent


def test_the_tests_agree_with_the_interval_at_the_margin() -> None:
    data = [0.01, 0.02, 0.03, 0.0, 0.015]
    edge = equivalence_of(data, margin=0.05).interval.high
    assert equivalence_of(data, margin=edge).p == near(0.05)
