"""What the counts of passes say of depths. It knows neither text nor clock, nor whose passes they are."""

from __future__ import annotations

from collections.abc import Sequence

from ctcdraft.decoding.loop import Pass


def alpha_of(steps: Sequence[Pass]) -> list[float | None]:
    """From depth 1: passes that accepted depth k / passes that accepted depth k - 1 and had a node below it; None where
    nobody had.

    Accepted 2, 0 (open), 0 (nothing below) of trees 2 deep   ->   [1/2, 1/1]
    """
    rates: list[float | None] = []
    for depth in range(1, max((step.drafted for step in steps), default=0) + 1):
        accepted = sum(step.accepted >= depth for step in steps)
        refused = sum(step.accepted == depth - 1 and step.rejected_child for step in steps)
        rates.append(accepted / (accepted + refused) if accepted + refused else None)
    return rates
