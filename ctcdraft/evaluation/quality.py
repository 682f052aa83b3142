"""What became of the text: right or wrong, ended or cut off, stuttering or not. Pure functions of answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from ctcdraft.evaluation.acceptance import Questions, mean, ratio

# A minus belongs to the number only where nothing stands to its left that could be subtracted from: not in 5-3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """`so 5-3 = $1,002.50.`   ->   1002.50"""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def accuracy(questions: Questions, references: Sequence[str | None]) -> float | None:
    """Share of the questions with a number as reference whose last answer ends on that number."""
    correct = [
        float(last_number(question[-1].text) == wanted)
        for question, reference in zip(questions, references, strict=True)
        if reference is not None and (wanted := last_number(reference)) is not None
    ]
    return mean(correct)


def ended_share(questions: Questions) -> float | None:
    """Answers that ended by themselves, not by running out of room."""
    return mean([float(answer.ended) for question in questions for answer in question])


def repeated_4gram_share(questions: Questions) -> float | None:
    """4-grams of token ids that stood in the same answer before: a text that loops is easy to guess.

    1 2 1 2 1 2   ->   1212 2121 1212: one of three
    """
    total = repeated = 0
    for question in questions:
        for answer in question:
            grams = [answer.tokens[start : start + 4] for start in range(len(answer.tokens) - 3)]
            total += len(grams)
            repeated += len(grams) - len(set(grams))
    return ratio(repeated, total)
