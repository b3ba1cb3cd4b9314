"""What five seeds allow to say: intervals, whether there is a rise, whether two trainers are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Mean(NamedTuple):
    """A mean and its two-sided interval (Student's t) at `level`."""

    mean: float
    low: float
    high: float
    level: float


class Rise(NamedTuple):
    """Whether the mean is above zero: one-sided t test."""

    interval: Mean
    p: float


class Equivalence(NamedTuple):
    """Two one-sided t tests of paired differences against a margin (Schuirmann 1987).

    `p` below 0.05 says: the mean difference lies within ±margin.  `interval` is the 90 % interval, which then lies
    within the margin, too.
    """

    interval: Mean
    margin: float
    p: float

    @property
    def equivalent(self) -> bool:
        return self.p < 0.05


def mean_of(values: Sequence[float], level: float = 0.95) -> Mean:
    from scipy import stats

    data = np.asarray(values, dtype=float)
    error = data.std(ddof=1) / np.sqrt(len(data))
    if error == 0:  # all alike: t has no say
        return Mean(float(data.mean()), float(data.mean()), float(data.mean()), level)
    low, high = stats.t.interval(level, len(data) - 1, loc=data.mean(), scale=error)
    return Mean(float(data.mean()), float(low), float(high), level)


def rise_of(differences: Sequence[float]) -> Rise:
    from scipy import stats

    data = np.asarray(differences, dtype=float)
    if data.std() == 0:
        return Rise(mean_of(differences), 0.0 if data[0] > 0 else 1.0)
    return Rise(mean_of(differences), float(stats.ttest_1samp(data, 0.0, alternative="greater").pvalue))


def equivalence_of(differences: Sequence[float], margin: float) -> Equivalence:
    from scipy import stats

    data = np.asarray(differences, dtype=float)
    interval = mean_of(differences, level=0.9)
    if data.std() == 0:
        return Equivalence(interval, margin, 0.0 if abs(data[0]) < margin else 1.0)
    above = stats.ttest_1samp(data, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(data, margin, alternative="less").pvalue
    return Equivalence(interval, margin, float(max(above, below)))
