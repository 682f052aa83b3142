"""Attention masks and lookups for packed sequences, and the masks of a base with sliding-window attention.

    tokens         a0 a1 a2 b0 b1 c0 c1 c2      three texts in a pack
    position ids    0  1  2  0  1  0  1  2      of every token in its own text

A sequence of one text is a pack of one. Padding on the right counts as the end of the last text: under a causal mask
no real token sees it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


def visible_mask(at_BQ: Tensor, position_ids_BL: Tensor) -> Tensor:
    """Return true_BQL where the token at index at_BQ may attend: to its own text, up to itself.

    position ids 0 1 2 0 1, at 4   ->   0 0 0 1 1
    """
    positions_L = torch.arange(position_ids_BL.shape[1], device=position_ids_BL.device)
    begin_BQ = at_BQ - position_ids_BL.gather(1, at_BQ)
    return (begin_BQ[..., None] <= positions_L) & (positions_L <= at_BQ[..., None])


def packed_causal_mask(position_ids_BL: Tensor) -> Tensor | None:
    """Return `visible_mask` of every position with an axis for heads, true_B1LL; None if no sequence is packed."""
    if position_ids_BL.is_meta:  # a dry run has no values to compare
        return None
    positions_BL = torch.arange(position_ids_BL.shape[1], device=position_ids_BL.device).expand_as(position_ids_BL)
    # Costs one host synchronisation on a CUDA device; but without a mask the fastest attention kernels run.
    if torch.equal(position_ids_BL, positions_BL):
        return None
    return visible_mask(positions_BL, position_ids_BL)[:, None]


def gather_following(x_BLD: Tensor, at_BA: Tensor, position_ids_BL: Tensor, steps: int) -> Tensor:
    """Return the entries at and after at_BA, x_BASD for S = `steps`; past the end of a text its last one is repeated.

    position ids 0 1 2 0 1, at 1, 4 steps   ->   x1 x2 x2 x2
    """
    steps_S = torch.arange(steps, device=at_BA.device)
    reached_BAS = (at_BA[..., None] + steps_S).clamp(max=position_ids_BL.shape[1] - 1)
    position_ids_BAS = position_ids_BL.gather(1, reached_BAS.flatten(1)).view_as(reached_BAS)
    # Position ids restart in a later text, so they never equal those expected here.
    own_BAS = position_ids_BAS - position_ids_BAS[..., :1] == reached_BAS - at_BA[..., None]
    last_BA1 = (reached_BAS * own_BAS).amax(dim=-1, keepdim=True)
    index_BRD = reached_BAS.minimum(last_BA1).flatten(1)[..., None].expand(-1, -1, x_BLD.shape[-1])
    return x_BLD.gather(1, index_BRD).unflatten(1, reached_BAS.shape[1:])


class SlidingWindow(NamedTuple):
    """The masks of a base with sliding-window layers, in the form that stock modeling code expects."""

    window: int  # tokens that a token sees, itself included
    layer_types: frozenset[str]  # a mask for each, where the model mixes several; empty: one mask, every layer slides

    @classmethod
    def of(cls, config: Any, context_length: int) -> Self | None:
        """Return the window of a model's config; None if it has none, or one at least as long as the context."""
        layer_types = frozenset(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        # A token sees distances below its window, and no two are further apart than context_length - 1.
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
    # Counted, not compared by position id: the visible entries of a row are one text in order (the committed text, a
    # node's ancestors, the node), wherever their cache rows are, so the last `window` are those at a smaller distance.
    remaining_XM = (mask_XM == 0).flip(-1).cumsum(dim=-1).flip(-1)
    return mask_XM.masked_fill(remaining_XM > window, torch.finfo(mask_XM.dtype).min)


def additive_mask(seen_TM: Tensor, dtype: torch.dtype, repeats: int = 1) -> Tensor:
    """Return 0 where `seen_TM` is True and the lowest number of the dtype elsewhere, all rows so many times."""
    expanded = seen_TM.expand(repeats, *seen_TM.shape)
    return torch.where(expanded, *mask_values(dtype, seen_TM.device)).flatten(0, 1)


@cache  # on the device from then on, where captured graphs read them
def mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of an additive mask, as scalars: of what is seen, and of what is not."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device), torch.full(
            (), torch.finfo(dtype).min, dtype=dtype, device=device
        )
