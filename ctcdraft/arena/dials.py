"""Where a dial has to stand, by arithmetic alone: numbers in, a whole number or a ratio with its interval out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def nearest(cost: Callable[[int], float], wanted: float, least: int, most: int) -> int:
    """The whole number whose cost, which grows with it, is nearest to what is wanted."""
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < wanted else (low, middle)
    return min((low, high), key=lambda value: abs(cost(value) - wanted))


def spaced(least: int, most: int, count: int) -> list[int]:
    """1 .. 64, 4 of them   ->   1 4 16 64"""
    ratio = (most / least) ** (1 / max(count - 1, 1))
    return sorted({round(least * ratio**step) for step in range(count)})


def between(values: Sequence[int], costs: Sequence[float], wanted: float) -> int:
    """The value at which the line through (values, costs), which never falls, comes to what is wanted.

    values 1 4, costs 10 16, wanted 12   ->   2

    Where even the least costs more than is wanted, the greatest that costs no more than the least: what is dear by
    itself is not to be made worse as well.
    """
    return round(float(np.interp(max(wanted, costs[0]), costs, values)))


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], seed: int, samples_drafts: int = 2000
) -> tuple[float, tuple[float, float]]:
    """With its 95 % interval over repeats, drawn in pairs: what disturbs a repeat disturbs both."""
    pairs_R2 = np.stack([np.asarray(ours), np.asarray(theirs)], axis=1)
    drawn_DR = np.random.default_rng(seed).integers(len(pairs_R2), size=(samples_drafts, len(pairs_R2)))
    medians_D2 = np.median(pairs_R2[drawn_DR], axis=1)
    low, high = np.quantile(medians_D2[:, 0] / medians_D2[:, 1], [0.025, 0.975])
    whole = np.median(pairs_R2, axis=0)
    return float(whole[0] / whole[1]), (float(low), float(high))
