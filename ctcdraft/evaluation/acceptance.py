"""How long the accepted drafts are, from the counts of passes. Pure functions; they know no seconds and no text.

A question is the list of its answers, one a turn. None stands for a ratio without a denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctcdraft.decoding.loop import Pass
from ctcdraft.decoding.passes import alpha_of
from ctcdraft.evaluation.records import Answer

Questions = Sequence[Sequence[Answer]]


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def mean(values: Sequence[float | None]) -> float | None:
    """Of the values there are."""
    there = [value for value in values if value is not None]
    return ratio(sum(there), len(there))


def tokens(question: Sequence[Answer]) -> int:
    return sum(answer.committed for answer in question)


def passes(question: Sequence[Answer]) -> int:
    return sum(len(answer.passes) for answer in question)


def tau(questions: Questions) -> float | None:
    """Tokens committed by passes / passes, a ratio of totals.

    4 tokens in 2 passes, 6 tokens in 2   ->   10 / 4 = 2.5
    """
    return ratio(sum(map(tokens, questions)), sum(map(passes, questions)))


def tau_mean(questions: Questions) -> float | None:
    """Mean over questions of tokens / passes."""
    return mean([ratio(tokens(question), passes(question)) for question in questions])


def tau_paper(questions: Questions) -> float | None:
    """The paper's beta: each turn counts its last loop index, which starts at 0, so one pass is missing.

    4 tokens in 2 passes, 6 tokens in 2   ->   mean of 4 / 1 and 6 / 1 = 5
    """
    last = [sum(max(len(answer.passes) - 1, 0) for answer in question) for question in questions]
    return mean([ratio(tokens(question), index) for question, index in zip(questions, last, strict=True)])


def all_passes(questions: Questions) -> list[Pass]:
    return [step for question in questions for answer in question for step in answer.passes]


def alpha(questions: Questions) -> list[float | None]:
    """From depth 1; see `alpha_of`."""
    return alpha_of(all_passes(questions))


def acceptance_rate(questions: Questions) -> float | None:
    """Accepted guesses / depth of what was drafted."""
    steps = all_passes(questions)
    return ratio(sum(step.accepted for step in steps), sum(step.drafted for step in steps))
