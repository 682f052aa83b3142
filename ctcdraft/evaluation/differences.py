"""One contestant less another on the same questions, with intervals. It knows sums a question, not who they are of.

An interval of a difference is narrower than the two intervals suggest: a hard question is hard for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ctcdraft.errors import InputError
from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.bootstrap import bootstrap_interval
from ctcdraft.evaluation.metrics import Questions
from ctcdraft.evaluation.records import AUTOREGRESSIVE

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
        counted = cls([*map(metrics.committed_tokens, questions)], [*map(metrics.count_passes, questions)])
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
