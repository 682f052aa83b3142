"""A table made of weights that are at rest: what every draft would compute again. It knows no draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Table:
    """Values, and the weights that they were made of: kept, so that no other can come to lie where they lay."""

    values: Tensor
    source_weights: tuple[Tensor, ...]
    state: tuple[tuple[int, int], ...]


class Resting(nn.Module):
    """A module whose table is made once and used until its weights change: by a step, a file, another device. What
    writes past torch's count of changes (`weight.data`) does so in training, behind which the table is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self._table: Table | None = None

    def train(self, mode: bool = True) -> Any:
        self._table = None
        return super().train(mode)

    def is_cacheable(self, *weights: Tensor) -> bool:
        """Whether a table may be made of these now. On a CPU alone: there a row that is read saves a product. Weights
        made in inference mode are left out, because torch does not count what changes them."""
        if self.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        return all(weight.is_cpu and not weight.is_inference() for weight in weights)

    def cached(self, make: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        """What `make` made of these weights, or makes of them now."""
        state = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if self._table is None or self._table.state != state:
            self._table = Table(make(), tuple(weight.detach() for weight in weights), state)
        return self._table.values
