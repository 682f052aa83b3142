"""Sliding-window attention of a base, applied to the masks of trees, packed sequences and padded batches.

A token sees the last `window` of its visible tokens, itself included. They are counted instead of comparing position
ids: the visible entries of a mask's row are one text in order (the committed text, a node's ancestors, the node), so
the last `window` of them are those at a distance below `window`, wherever their cache rows are.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor


class SlidingWindow:
    """The masks of a base with sliding-window layers, in the form that stock modeling code expects.

    layer_types: where the model mixes several, a mask for each; empty: one mask, every layer slides.
    """

    def __init__(self, window: int, layer_types: frozenset[str]) -> None:
        self.window = window
        self.layer_types = layer_types

    @classmethod
    def of(cls, config: Any, context_length: int) -> Self | None:
        """Return the window of a model's config; None if it has none, or one at least as long as the context.

        Two tokens are at most context_length - 1 apart, and a token sees distances below its window: a window as long
        as the context hides nothing.
        """
        layer_types = frozenset(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if not window or (layer_types and "sliding_attention" not in layer_types) or window >= context_length:
            return None
        return cls(window, layer_types)

    def __call__(self, mask_XM: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the additive masks of all layer types, given that of full attention."""
        sliding_XM = keep_last_visible(mask_XM, self.window)
        if not self.layer_types:
            return sliding_XM
        return {kind: sliding_XM if kind == "sliding_attention" else mask_XM for kind in self.layer_types}


def keep_last_visible(mask_XM: Tensor, window: int) -> Tensor:
    """Return an additive mask that keeps the last `window` visible entries (0) of every row.

    0 0 - 0 0, window 3   ->   - 0 - 0 0
    """
    remaining_XM = (mask_XM == 0).flip(-1).cumsum(dim=-1).flip(-1)
    return mask_XM.masked_fill(remaining_XM > window, torch.finfo(mask_XM.dtype).min)
