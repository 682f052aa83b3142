"""Bootstrap intervals over questions, and paired differences between contestants.

All contestants are resampled with the same questions. The interval of a paired difference is therefore narrower than
the two single intervals suggest, because a hard question is hard for both contestants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np

from ctcdraft.errors import InputError
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Questions

RESAMPLES = 2000
COVERAGE = 0.95


def bootstrap_interval(
    statistic: Callable[..., np.ndarray], columns: Sequence[Sequence[float]], seed: int
) -> list[float] | None:
    """Return the 95 % interval [low, high] of a statistic of column totals, or None for fewer than two questions.

    Args:
        statistic: of one array of resampled totals per column.
        columns: one value per question each.
    """
    table_CQ = np.asarray(columns, dtype=float)
    questions = table_CQ.shape[1]
    if questions < 2:
        return None
    rng = np.random.default_rng(seed)  # equal seeds resample the same questions, so that intervals are paired
    counts_RQ = rng.multinomial(questions, np.full(questions, 1 / questions), size=RESAMPLES)
    totals_CR = table_CQ @ counts_RQ.T
    with np.errstate(divide="ignore", invalid="ignore"):
        values_R = statistic(*totals_CR)
    values_R = values_R[np.isfinite(values_R)]  # resampled questions may have no forward pass at all
    if not len(values_R):
        return None
    tail = (1 - COVERAGE) / 2
    return [float(bound) for bound in np.quantile(values_R, [tail, 1 - tail])]


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> list[float] | None:
    """Return the bootstrap interval of a ratio of totals."""
    return bootstrap_interval(lambda top, bottom: top / bottom, [numerators, denominators], seed)


def difference_interval(
    value: float, value_interval: Sequence[float] | None, other: float, other_interval: Sequence[float] | None
) -> list[float] | None:
    """Return the interval of `value - other` from the interval of each, or None if one of them is unknown.

    For numbers without per-question values (MOVER, Zou and Donner 2008).

        3.0 [2.6, 3.4]  less  2.0 [1.7, 2.3]   ->   1.0 [0.5, 1.5]
    """
    if value_interval is None or other_interval is None:
        return None
    # Distances to the bounds are combined by their squares, for each side separately, as if the two were independent.
    # If both were measured on the same questions, the true interval is narrower; see `paired_difference`.
    below = hypot(value - value_interval[0], other_interval[1] - other)
    above = hypot(value_interval[1] - value, other - other_interval[0])
    return [value - other - below, value - other + above]


def comparison_pairs(names: Sequence[str], wanted: Sequence[Sequence[str]] | None) -> list[tuple[str, str]]:
    """Return the pairs (A, B) whose difference A - B is reported; by default the first drafter against every other."""
    rivals = [name for name in names if name != AUTOREGRESSIVE]
    if wanted is None:
        return [(rivals[0], other) for other in rivals[1:]]
    for pair in wanted:
        unknown = [name for name in pair if name not in names]
        if len(pair) != 2 or unknown:
            raise InputError(
                f"differences must be pairs of the rows {', '.join(names)}, got {[list(pair) for pair in wanted]}"
            )
    return [(more, less) for more, less in wanted]


@dataclass(frozen=True)
class QuestionSums:
    """Totals per question, over its turns; without times, if nothing was timed, and 0 where one question was not."""

    committed: Sequence[float]  # tokens, as tau counts them
    passes: Sequence[float]
    said: Sequence[float] = ()  # all tokens, including the prefill's; the name is that of stored comparisons
    seconds: Sequence[float] = ()  # including the prefill

    @classmethod
    def from_questions(cls, questions: Questions) -> QuestionSums:
        committed = [sum(answer.committed for answer in question) for question in questions]
        passes = [sum(len(answer.passes) for answer in question) for question in questions]
        seconds = [sum(answer.seconds for answer in question) for question in questions]
        if not sum(seconds):
            return cls(committed, passes)
        all_tokens = [sum(len(answer.tokens) for answer in question if answer.seconds) for question in questions]
        return cls(committed, passes, all_tokens, seconds)


def pool_sums(several: Sequence[QuestionSums]) -> QuestionSums:
    """Return the sums over several contestants, question by question; raise InputError if their counts differ."""
    if len(counts := {len(sums.passes) for sums in several}) > 1:
        raise InputError(
            f"evaluations of {' and '.join(map(str, sorted(counts)))} questions cannot be compared; measure all with "
            "one benchmark.limit="
        )
    columns = (zip(*column, strict=True) for column in zip(*(vars(sums).values() for sums in several), strict=True))
    return QuestionSums(*([sum(cell) for cell in column] for column in columns))


def paired_differences(
    pairs: Sequence[tuple[str, str]], answers: Mapping[str, Questions], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield one row of report.json per pair of contestants; `speedup` is None if nothing was timed."""
    sums = {name: QuestionSums.from_questions(questions) for name, questions in answers.items()}
    for more, less in pairs:
        difference = paired_difference(sums[more], sums[less], sums[AUTOREGRESSIVE], seed)
        yield {"more": more, "less": less, **difference}


def paired_difference(more: QuestionSums, less: QuestionSums, base: QuestionSums, seed: int) -> dict[str, Any]:
    """Return tau and speed-up of `more` minus those of `less`, with paired intervals. base: autoregression."""
    tau = [more.committed, more.passes, less.committed, less.passes]
    speed = [column for side in (more, less, base) for column in (side.said, side.seconds)]
    timed = all(sum(column) > 0 for column in speed)
    return {
        "questions": len(more.passes),
        "tau": statistic_of_totals(ratio_difference, tau),
        "tau_ci": bootstrap_interval(ratio_difference, tau, seed),
        "speedup": statistic_of_totals(ratio_difference, speed) if timed else None,
        "speedup_ci": bootstrap_interval(ratio_difference, speed, seed) if timed else None,
    }


def ratio_difference(a: Any, b: Any, c: Any, d: Any, *unit: Any) -> Any:
    """a / b - c / d, in units of e / f if given, as tokens per second relative to autoregression's."""
    return (a / b - c / d) / (unit[0] / unit[1]) if unit else a / b - c / d


def statistic_of_totals(statistic: Callable[..., Any], columns: Sequence[Sequence[float]]) -> float | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*(np.float64(sum(column)) for column in columns)))
    return value if np.isfinite(value) else None
