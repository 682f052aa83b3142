"""One contestant less another on the same questions, with intervals. It knows sums a question, not who they are of.

An interval of a difference is narrower than the two intervals suggest: a hard question is hard for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ctcdraft.errors import InputError
from ctcdraft.evaluation import acceptance
from ctcdraft.evaluation.acceptance import Questions
from ctcdraft.evaluation.bootstrap import interval
from ctcdraft.evaluation.records import AUTOREGRESSIVE

Column = list[float]
Sides = Callable[[str], Questions]  # a contestant's answers, question by question


def paired(names: Sequence[str], wanted: Sequence[Sequence[str]] | None) -> list[tuple[str, str]]:
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


def differences(pairs: Sequence[tuple[str, str]], sides: Sides, seed: int) -> Iterator[dict[str, Any]]:
    """One row a pair; `speedup` is null where nothing was timed."""
    for more, less in pairs:
        yield {"more": more, "less": less, **difference(sides(more), sides(less), sides(AUTOREGRESSIVE), seed)}


def difference(more: Questions, less: Questions, base: Questions, seed: int) -> dict[str, Any]:
    """tau and speed-up of `more` less those of `less`, each a ratio of totals, over the same draws of questions.

    base: autoregression's answers to these questions.
    """
    counts = (acceptance.tokens, acceptance.passes)
    tau: list[Column] = [[float(count(question)) for question in side] for side in (more, less) for count in counts]
    speed = [column for side in (more, less, base) for column in said_and_spent(side)]
    timed = all(sum(column) > 0 for column in speed)
    return {
        "questions": len(more),
        "tau": of_totals(less_ratio, tau),
        "tau_ci": interval(less_ratio, tau, seed),
        "speedup": of_totals(less_speed, speed) if timed else None,
        "speedup_ci": interval(less_speed, speed, seed) if timed else None,
    }


def said_and_spent(side: Questions) -> tuple[Column, Column]:
    """Tokens and seconds of every question, prefill included."""
    said: Column = [float(sum(len(answer.tokens) for answer in question)) for question in side]
    return said, [sum(answer.seconds for answer in question) for question in side]


def less_ratio(a: Any, b: Any, c: Any, d: Any) -> Any:
    """a / b - c / d"""
    return a / b - c / d


def less_speed(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """(a / b - c / d) / (e / f): tokens a second, in units of the base's own."""
    return (a / b - c / d) / (e / f)


def of_totals(statistic: Callable[..., Any], columns: Sequence[Column]) -> float | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*(np.float64(sum(column)) for column in columns)))
    return value if np.isfinite(value) else None
