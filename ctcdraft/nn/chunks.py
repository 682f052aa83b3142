"""Scores of windows: of real ones only, and a chunk at a time, so that their logits are never in memory all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20  # of logits in memory at once while labels are scored


@dataclass(frozen=True)
class RealWindows:
    """Selects the windows that have labels: rows are padded to the one with most windows, and padding costs as much.

    windows_X: their indices among all; None for all windows, as on a device other than the CPU, where the choice would
    wait for the device.
    """

    windows_X: Tensor | None
    shape: torch.Size  # [B, A]

    @classmethod
    def of(cls, labels_BAS: Tensor) -> Self:
        """Return the windows with a label; all windows if there is none."""
        windows_X = None
        if labels_BAS.is_cpu:
            windows_X = (labels_BAS >= 0).any(dim=-1).flatten().nonzero()[:, 0]
        is_choice = windows_X is not None and 0 < len(windows_X) < labels_BAS[..., 0].numel()
        return cls(windows_X if is_choice else None, labels_BAS.shape[:2])

    def select(self, column_BA: Tensor) -> Tensor:
        """Return column_1X of the selected windows X."""
        return column_BA if self.windows_X is None else column_BA.flatten(0, 1).index_select(0, self.windows_X)[None]

    def restore(self, column_1X: Tensor) -> Tensor:
        """Return column_BA of all windows, zeros for those that were not selected."""
        if self.windows_X is None:
            return column_1X
        all_X = column_1X.new_zeros(self.shape.numel(), *column_1X.shape[2:])
        return all_X.index_copy(0, self.windows_X, column_1X[0]).unflatten(0, self.shape)


def in_chunks(measure: Callable[..., Tensor], window_bytes: int, *columns_BA: Tensor) -> Tensor:
    """Return measure(*columns_X)_BA over all windows X, computed and computed again backward a chunk at a time.

    A sequence with 256 anchors x 8 frames x 32,001 classes has 262 MB of logits, so they exist for one chunk only.
    `window_bytes` is what `measure` allocates per window.
    """
    columns_X = [rearrange(column, "b a ... -> (b a) ...") for column in columns_BA]
    size = max(1, CHUNK_BYTES // window_bytes)
    chunks = list(zip(*(column.split(size) for column in columns_X), strict=True))
    if len(chunks) == 1:  # what fits is kept
        measured_X = measure(*chunks[0])
    else:
        measured_X = torch.cat([checkpoint(measure, *chunk, use_reentrant=False) for chunk in chunks])
    return measured_X.unflatten(0, columns_BA[0].shape[:2])
