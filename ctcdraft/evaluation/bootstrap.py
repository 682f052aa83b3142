"""Intervals by drawing questions anew, with replacement. It knows sums of columns, not what they count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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


AnswersByName = Callable[[str], Questions]  # a contestant's answers, question by question


def comparison_pairs(names: Sequence[str], wanted: Sequence[Sequence[str]] | None) -> list[tuple[str, str]]:
    """Who is compared with whom: as wanted, or the first but autoregression less every other."""
    rivals = [name for name in names if name != AUTOREGRESSIVE]
    if wanted is None:
        return [(rivals[0], other) for other in rivals[1:]]
    for pair in wanted:
        unknown = [name for name in pair if name not in names]
        if len(pair) != 2 or unknown:
            raise InputError(
                f"differences={[list(pair) for pair in wanted]}: a pair is two of the rows {', '.join(names)}"
            )
    return [(more, less) for more, less in wanted]


@dataclass(frozen=True)
class QuestionSums:
    """Of every question, over its turns. committed: tokens that passes committed. said: all tokens, the prefill's
    included. seconds: prefill included; they and `said` are empty where nothing was timed."""

    committed: Sequence[float]
    passes: Sequence[float]
    said: Sequence[float] = ()
    seconds: Sequence[float] = ()

    @classmethod
    def from_questions(cls, questions: Questions) -> QuestionSums:
        counted = cls(
            [sum(answer.committed for answer in question) for question in questions],
            [sum(len(answer.passes) for answer in question) for question in questions],
        )
        seconds = [sum(answer.seconds for answer in question) for question in questions]
        if not sum(seconds):
            return counted
        all_tokens = [sum(len(answer.tokens) for answer in question) for question in questions]
        return replace(counted, said=all_tokens, seconds=seconds)


def pool_sums(several: Sequence[QuestionSums]) -> QuestionSums:
    """Question by question the sums of all, who answered the same questions."""
    if len(many := {len(one.passes) for one in several}) > 1:
        raise InputError(
            f"{' and '.join(map(str, sorted(many)))} questions cannot be set against each other; measure all with one "
            "benchmark.limit="
        )
    columns = (zip(*column, strict=True) for column in zip(*(vars(one).values() for one in several), strict=True))
    return QuestionSums(*([sum(cell) for cell in column] for column in columns))


def paired_differences(pairs: Sequence[tuple[str, str]], sides: AnswersByName, seed: int) -> Iterator[dict[str, Any]]:
    """One row a pair; `speedup` is null where nothing was timed."""
    base = QuestionSums.from_questions(sides(AUTOREGRESSIVE))
    for more, less in pairs:
        metrics = paired_difference(
            QuestionSums.from_questions(sides(more)), QuestionSums.from_questions(sides(less)), base, seed
        )
        yield {"more": more, "less": less, **metrics}


def paired_difference(more: QuestionSums, less: QuestionSums, base: QuestionSums, seed: int) -> dict[str, Any]:
    """tau and speed-up of `more` less those of `less`, each a ratio of totals, over the same draws of questions.

    base: autoregression's answers to these questions.
    """
    tau = [more.committed, more.passes, less.committed, less.passes]
    speed = [column for side in (more, less, base) for column in (side.said, side.seconds)]
    timed = all(sum(column) > 0 for column in speed)
    return {
        "questions": len(more.passes),
        "tau": statistic_of_totals(ratio_difference, tau),
        "tau_ci": bootstrap_interval(ratio_difference, tau, seed),
        "speedup": statistic_of_totals(speedup_difference, speed) if timed else None,
        "speedup_ci": bootstrap_interval(speedup_difference, speed, seed) if timed else None,
    }


def ratio_difference(a: Any, b: Any, c: Any, d: Any) -> Any:
    """a / b - c / d"""
    return a / b - c / d


def speedup_difference(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """(a / b - c / d) / (e / f): tokens a second, in units of the base's own."""
    return (a / b - c / d) / (e / f)


def statistic_of_totals(statistic: Callable[..., Any], columns: Sequence[Sequence[float]]) -> float | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*(np.float64(sum(column)) for column in columns)))
    return value if np.isfinite(value) else None
