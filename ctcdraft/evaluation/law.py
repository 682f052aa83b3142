"""Has what was said the base's law? For answers that owe autoregression its law, not its words. It knows no clock.

Lay the base's words, the most probable first, side by side as intervals as long as their probabilities, and mark a
chance point in the interval of the word that was said. Where words are drawn from the base's law, whatever the text
before them, these marks are uniform between 0 and 1 and independent (Rosenblatt 1952): counted in equal cells they
make a chi-square test that is exact for any number of answers, and adds up over questions and shards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ctcdraft.base import BaseLM
from ctcdraft.decoding.loop import Settings

CELLS = 20
ROWS = 64  # read from states to laws at once: a long answer over a large vocabulary would be gigabytes


def marks(base: BaseLM, prompt_L: Tensor, tokens: Sequence[int], settings: Settings, seed: int) -> list[int]:
    """How many of the answer's tokens fall into each cell, by the base's law behind the answer's own beginning."""
    said_A = torch.tensor(tokens, device=base.device)
    text_L = torch.cat([prompt_L, said_A])[:-1]
    states_AD = base.states(text_L[None], torch.ones_like(text_L)[None])[0, len(prompt_L) - 1 :]
    rng = random.Random(f"{seed} marks")
    counts = [0] * CELLS
    for rows_RD, words_R in zip(states_AD.split(ROWS), said_A.split(ROWS), strict=True):
        before_R, own_R = interval(settings.law(base.head(rows_RD)).double().exp(), words_R)
        for before, own in zip(before_R.tolist(), own_R.tolist(), strict=True):
            counts[min(int((before + rng.random() * own) * CELLS), CELLS - 1)] += 1
    return counts


def interval(probs_RV: Tensor, words_R: Tensor) -> tuple[Tensor, Tensor]:
    """Where each word's interval begins, and its length; equally probable words lie in the order of their ids.

    0.2 0.5 0.3, word 0   ->   begins at 0.8 and is 0.2 long
    """
    own_R1 = probs_RV.gather(1, words_R[:, None])
    ids_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    first_RV = (probs_RV > own_R1) | ((probs_RV == own_R1) & (ids_V < words_R[:, None]))
    return (probs_RV * first_RV).sum(1), own_R1[:, 0]


@dataclass(frozen=True)
class Fit:
    """How well counts fit equal cells. p_value: the chance of a fit no better; tv: total variation."""

    tokens: int
    chi_square: float
    p_value: float
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
        p_value = float(torch.special.gammaincc(half[0], half[1]))
        return cls(tokens, chi_square, p_value, sum(abs(count - expected) for count in counts) / tokens / 2)


def added(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(cell) for cell in zip(*columns, strict=True)]
