"""Sliding windows of a base's attention, laid over masks of trees, packs and padded rows.

A token sees the last `window` tokens of those that it sees at all, itself included. Counted, not subtracted from
positions: what a row of a mask sees is one text in order (the committed text, then a node's ancestors, then itself),
so that its last `window` entries are those at a distance below `window`, wherever their cache rows are.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor


class SlidingWindow:
    """The masks of a base that has layers of sliding attention, in the form that stock modelling code takes.

    kinds: the layer types, where the model mixes several: a mask for each; empty: every layer slides, one mask.
    """

    def __init__(self, window: int, layer_types: frozenset[str]) -> None:
        self.window = window
        self.layer_types = layer_types

    @classmethod
    def of(cls, config: Any, context_length: int) -> Self | None:
        """Return the window of a model's config; None where it has none or none that a text of this length fills.

        The tokens furthest apart, the first and the last, have a distance of context_length - 1, and a token sees
        distances below its window: a window as long as the context hides nothing.
        """
        kinds = frozenset(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if not window or (kinds and "sliding_attention" not in kinds) or window >= context_length:
            return None
        return cls(window, kinds)

    def __call__(self, mask_XM: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the additive masks of all layer types for one that holds what full attention sees."""
        slid_XM = keep_last_visible(mask_XM, self.window)
        if not self.layer_types:
            return slid_XM
        return {kind: slid_XM if kind == "sliding_attention" else mask_XM for kind in self.layer_types}


def keep_last_visible(mask_XM: Tensor, window: int) -> Tensor:
    """Return an additive mask (0: seen) that keeps the last `window` entries seen in every row.

    0 0 - 0 0, window 3   ->   - 0 - 0 0
    """
    left_XM = (mask_XM == 0).flip(-1).cumsum(dim=-1).flip(-1)
    return mask_XM.masked_fill(left_XM > window, torch.finfo(mask_XM.dtype).min)
