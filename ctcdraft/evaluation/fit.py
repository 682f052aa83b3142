"""Counts in equal cells, and how well they fit them. It knows numbers, not what was counted (law.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

CELLS = 20
FEWEST = 100  # marks that a p-value asks for: chi-square's law is a limit, good from about five expected in a cell


@dataclass(frozen=True)
class Marks:
    """How many tokens fell into each cell, in each of the two orders. by_draft: of those tokens alone before which a
    draft's law stood."""

    by_base: list[int]
    by_draft: list[int]

    @classmethod
    def none(cls) -> Self:
        return cls([0] * CELLS, [0] * CELLS)

    def __add__(self, other: Marks) -> Marks:
        return Marks(added([self.by_base, other.by_base]), added([self.by_draft, other.by_draft]))


@dataclass(frozen=True)
class Fit:
    """How well counts fit equal cells. p_value: the chance of a fit no better, None for too few tokens to tell; tv:
    total variation."""

    tokens: int
    chi_square: float
    p_value: float | None
    tv: float

    @classmethod
    def of(cls, counts: Sequence[int]) -> Self | None:
        """None where nothing was counted.

        30 10 of two cells   ->   chi-square 10^2/20 + 10^2/20 = 10, tv 1/4
        """
        tokens = sum(counts)
        if not tokens:
            return None
        expected = tokens / len(counts)
        chi_square = sum((count - expected) ** 2 / expected for count in counts)
        half = torch.tensor([(len(counts) - 1) / 2, chi_square / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(half[0], half[1])) if tokens >= FEWEST else None
        return cls(tokens, chi_square, p_value, sum(abs(count - expected) for count in counts) / tokens / 2)


def added(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(cell) for cell in zip(*columns, strict=True)]
