"""Several texts behind one another in one row: who sees whom, and where a text ends. It knows places, no words.

    row        a0 a1 a2 b0 b1 c0 c1 c2      three texts in a pack
    places      0  1  2  0  1  0  1  2      of every position in its own text

A row of one text is a pack of one. What pads a row on the right counts as the end of its last text: it stands
behind all that is real, so nothing real sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_mask(at_BQ: Tensor, position_ids_BL: Tensor) -> Tensor:
    """True_BQL where what stands at a position may see another: its own text, up to itself.

    places 0 1 2 0 1, at 4   ->   0 0 0 1 1
    """
    positions_L = torch.arange(position_ids_BL.shape[1], device=position_ids_BL.device)
    begin_BQ = at_BQ - position_ids_BL.gather(1, at_BQ)
    return (begin_BQ[..., None] <= positions_L) & (positions_L <= at_BQ[..., None])


def packed_causal_mask(position_ids_BL: Tensor) -> Tensor | None:
    """`visible` of every position, with an axis for heads: True_B1LL; None where no row holds a second text.

    None, because rows of one text need no mask and then run through the fastest kernels; to know it costs a CUDA
    device one wait. On paper (tensors without values) a row is one text.
    """
    if position_ids_BL.is_meta:
        return None
    positions_BL = torch.arange(position_ids_BL.shape[1], device=position_ids_BL.device).expand_as(position_ids_BL)
    if torch.equal(position_ids_BL, positions_BL):
        return None
    return visible_mask(positions_BL, position_ids_BL)[:, None]


def gather_following(x_BLD: Tensor, at_BA: Tensor, position_ids_BL: Tensor, steps: int) -> Tensor:
    """What stands at a position and behind it, x_BASD for S = `steps`; past the end of its text the text's last.

    places 0 1 2 0 1, at 1, 4 steps   ->   x1 x2 x2 x2
    """
    steps_S = torch.arange(steps, device=at_BA.device)
    reached_BAS = (at_BA[..., None] + steps_S).clamp(max=position_ids_BL.shape[1] - 1)
    position_ids_BAS = position_ids_BL.gather(1, reached_BAS.flatten(1)).view_as(reached_BAS)
    # A later text starts to count anew, so its places never catch up with those expected here.
    own_BAS = position_ids_BAS - position_ids_BAS[..., :1] == reached_BAS - at_BA[..., None]
    last_BA1 = (reached_BAS * own_BAS).amax(dim=-1, keepdim=True)
    index_BRD = reached_BAS.minimum(last_BA1).flatten(1)[..., None].expand(-1, -1, x_BLD.shape[-1])
    return x_BLD.gather(1, index_BRD).unflatten(1, reached_BAS.shape[1:])
