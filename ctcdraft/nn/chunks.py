"""Scores of windows a chunk at a time, so that their logits are never in memory all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20  # of logits in memory at once while labels are scored


def in_chunks(
    measure: Callable[..., Tensor], window_bytes: int, *columns_BA: Tensor, kept_BA: Tensor | None = None
) -> Tensor:
    """Return measure(*columns_X)_BA over all windows X, computed and computed again backward a chunk at a time.

    A sequence with 256 anchors x 8 frames x 32,001 classes has 262 MB of logits, so they exist for one chunk only.

    Args:
        window_bytes: what `measure` allocates per window.
        kept_BA: the windows to measure; the others get zeros. None: all.
    """
    columns_X = [rearrange(column, "b a ... -> (b a) ...") for column in columns_BA]
    kept_X = None if kept_BA is None or kept_BA.all() else kept_BA.flatten()
    if kept_X is not None:
        columns_X = [column[kept_X] for column in columns_X]
    size = max(1, CHUNK_BYTES // window_bytes)
    chunks = list(zip(*(column.split(size) for column in columns_X), strict=True))
    if len(chunks) == 1:  # what fits is kept
        measured_X = measure(*chunks[0])
    else:
        measured_X = torch.cat([checkpoint(measure, *chunk, use_reentrant=False) for chunk in chunks])
    if kept_X is not None:
        all_X = measured_X.new_zeros(len(kept_X), *measured_X.shape[1:])
        measured_X = all_X.masked_scatter(kept_X.view(-1, *[1] * (all_X.ndim - 1)), measured_X)
    return measured_X.unflatten(0, columns_BA[0].shape[:2])
