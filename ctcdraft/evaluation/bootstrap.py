"""Intervals by drawing questions anew, with replacement. It knows sums of columns, not what they count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import hypot

import numpy as np

RESAMPLES = 2000
COVERAGE = 0.95


def bootstrap_interval(
    statistic: Callable[..., np.ndarray], columns: Sequence[Sequence[float]], seed: int
) -> list[float] | None:
    """[low, high] of a statistic of column totals; one entry of each column a question.

    The same seed draws the same questions for every contestant, and one draw serves all columns: intervals
    are paired. Fewer than two questions have none.
    """
    table_CQ = np.asarray(columns, dtype=float)
    questions = table_CQ.shape[1]
    if questions < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn_RQ = rng.multinomial(questions, np.full(questions, 1 / questions), size=RESAMPLES)
    totals_CR = table_CQ @ drawn_RQ.T
    with np.errstate(divide="ignore", invalid="ignore"):
        values_R = statistic(*totals_CR)
    values_R = values_R[np.isfinite(values_R)]  # a draw of questions without passes has no ratio
    if not len(values_R):
        return None
    tail = (1 - COVERAGE) / 2
    return [float(bound) for bound in np.quantile(values_R, [tail, 1 - tail])]


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> list[float] | None:
    """Of a ratio of totals."""
    return bootstrap_interval(lambda top, bottom: top / bottom, [numerators, denominators], seed)


def difference_interval(
    value: float, value_interval: Sequence[float] | None, other: float, other_interval: Sequence[float] | None
) -> list[float] | None:
    """[low, high] of ours less theirs from the interval of each, taken as independent; None where one is not known.

    Distances to the bounds add up as squares do, each side of an interval by itself (MOVER, Zou and Donner 2008): what
    is left to do where the questions' own numbers are not at hand. Where both sides were asked the same questions the
    true interval is narrower, because a hard question is hard for both: `differences.py` draws those in pairs.

        3.0 [2.6, 3.4]  less  2.0 [1.7, 2.3]   ->   1.0 [0.5, 1.5]
    """
    if value_interval is None or other_interval is None:
        return None
    below = hypot(value - value_interval[0], other_interval[1] - other)
    above = hypot(value_interval[1] - value, other - other_interval[0])
    return [value - other - below, value - other + above]
