"""THE shift: which state, which root, which labels. Every training window is cut here, and nowhere else.

It knows tokens and answer masks; not who drafts, nor what is done with the labels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def label_windows(
    tokens_BL: Tensor, mask_BL: Tensor, anchors_BA: Tensor, label_length: int, ended_BL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What each anchor is asked to guess.

    tokens     x0  x1  x2  x3  x4  x5
    anchor 1       h1                     last position the base has read
    root               x2                 its next token, already certain
    labels                 x3  x4  x5     what the draft must say

    Root and labels lie inside one answer (mask_BL is 1 there); near its end the window is shorter and runs
    to the answer's last token, EOS included. That holds where the text of the anchor ended by itself (ended_BL);
    one that was cut off goes on, unknown to us, so there only full windows count: nothing may learn to fall
    silent. Several texts in a row are kept apart by the mask, which is 0 on the first token of each.

    Returns roots_BA, labels_BAS (free slots hold -1) and lengths_BA, 0 where an anchor is not valid.
    """
    length = tokens_BL.shape[1]
    steps_S = torch.arange(label_length, device=tokens_BL.device)
    at_BAS = anchors_BA[..., None] + 2 + steps_S
    answer_BL = mask_BL.bool()
    root_BA = (anchors_BA + 1).clamp(max=length - 1)
    roots_in_answer_BA = answer_BL.gather(1, root_BA) & (anchors_BA + 1 < length)
    flat = at_BAS.clamp(max=length - 1).flatten(1)
    inside_BAS = answer_BL.gather(1, flat).view_as(at_BAS) & (at_BAS < length) & roots_in_answer_BA[..., None]
    reached_BAS = inside_BAS.long().cumprod(dim=-1)
    ended_BA = ended_BL.gather(1, anchors_BA)
    reached_BAS = reached_BAS * (ended_BA | (reached_BAS.sum(dim=-1) == label_length))[..., None]
    labels_BAS = tokens_BL.gather(1, flat).view_as(at_BAS)
    labels_BAS = torch.where(reached_BAS.bool(), labels_BAS, -1)
    return tokens_BL.gather(1, root_BA), labels_BAS, reached_BAS.sum(dim=-1)


def valid_anchors(mask_BL: Tensor) -> Tensor:
    """Where a window of at least one label fits: root and label are answer tokens. The anchor may be the last
    prompt token, because every generation's first draft starts there.

    mask     0 0 1 1 1 0      anchors  0 1 1 0 0 0
    """
    valid_BL = torch.zeros_like(mask_BL, dtype=torch.bool)
    valid_BL[:, :-2] = (mask_BL[:, 1:-1] > 0) & (mask_BL[:, 2:] > 0)
    return valid_BL


def sample_anchors(mask_BL: Tensor, anchors: int, rng: torch.Generator) -> Tensor:
    """Up to `anchors` valid positions a row without replacement, in random order.

    Rows with fewer get position L - 1 in the free slots, which `label_windows` finds to be no anchor.
    """
    valid_BL = valid_anchors(mask_BL)
    keys_BL = torch.rand(valid_BL.shape, generator=rng).to(mask_BL.device).masked_fill(~valid_BL, -1.0)
    keys_BA, anchors_BA = keys_BL.topk(min(anchors, keys_BL.shape[1]), dim=1)
    return torch.where(keys_BA >= 0, anchors_BA, mask_BL.shape[1] - 1)
