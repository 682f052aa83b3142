"""What every objective owes: a value to minimise and the figures worth watching. It knows no optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ctcdraft.drafters.drafter import Batch
from ctcdraft.nn.heads import Emissions


@dataclass(frozen=True)
class Loss:
    """value: a scalar with a gradient. metrics: detached scalars, by name."""

    value: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """labels: S, how many labels a window should have."""

    labels: int

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss: ...
