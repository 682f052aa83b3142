"""The label shift: which hidden state, which root and which labels make one training window.

    position       0    1    2    3    4    5
    tokens_BL     x0   x1   x2   x3   x4   x5
    hidden state        h1                         anchor 1: the last position the base model has read
    root                     x2                    anchor + 1: the next token, already committed when drafting
    labels                        x3   x4   x5     anchor + 2 ...: the tokens the draft head must propose

This is the situation of decoding: after a verification step the base model has hidden states up to the anchor and has
already emitted one more token (the root), and the drafter proposes what follows the root. The offsets +1 and +2 are
written in this file and nowhere else, because a shift by one still trains and only shows in the acceptance length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def label_windows(
    tokens_BL: Tensor, mask_BL: Tensor, anchors_BA: Tensor, label_length: int, ended_BL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the roots, the labels and the number of labels of every anchor (picture above).

    Root and labels are inside one response. Near the end of a response that ended with EOS the window is shorter and
    includes EOS. Where a response was truncated its continuation is unknown, so only full windows count there:
    otherwise the draft head would learn to stop.

    Args:
        mask_BL: 1 on response tokens. It is 0 on the first token of every packed sequence, which keeps windows from
            reaching into the next sequence.
        ended_BL: true on the tokens of responses that ended by themselves; a row can have several responses.

    Returns:
        roots_BA, labels_BAS (-1 in unused slots) and lengths_BA (0 where an anchor is invalid).
    """
    length = tokens_BL.shape[1]
    offsets_S = torch.arange(label_length, device=tokens_BL.device)
    root_positions_BA = anchors_BA + 1
    label_positions_BAS = anchors_BA[..., None] + 2 + offsets_S
    is_response_BL = mask_BL.bool()
    safe_positions_BA = root_positions_BA.clamp(max=length - 1)
    valid_root_BA = is_response_BL.gather(1, safe_positions_BA) & (root_positions_BA < length)
    flat = label_positions_BAS.clamp(max=length - 1).flatten(1)
    valid_BAS = is_response_BL.gather(1, flat).view_as(label_positions_BAS) & (label_positions_BAS < length)
    # The product is 1 up to the first position that is not part of the response, and 0 from there on.
    prefix_BAS = (valid_BAS & valid_root_BA[..., None]).long().cumprod(dim=-1)
    ended_BA = ended_BL.gather(1, safe_positions_BA)  # of the root's response: the anchor may be in the prompt
    prefix_BAS = prefix_BAS * (ended_BA | (prefix_BAS.sum(dim=-1) == label_length))[..., None]
    labels_BAS = torch.where(prefix_BAS.bool(), tokens_BL.gather(1, flat).view_as(prefix_BAS), -1)
    return tokens_BL.gather(1, safe_positions_BA), labels_BAS, prefix_BAS.sum(dim=-1)


def valid_anchors(mask_BL: Tensor) -> Tensor:
    """Return a bool mask of the positions after which a root and at least one label are response tokens.

    The last prompt token is a valid anchor: the first draft of every generation starts there.

    mask     0 0 1 1 1 0      anchors  0 1 1 0 0 0
    """
    valid_BL = torch.zeros_like(mask_BL, dtype=torch.bool)
    valid_BL[:, :-2] = (mask_BL[:, 1:-1] > 0) & (mask_BL[:, 2:] > 0)
    return valid_BL


def sample_anchors(mask_BL: Tensor, anchors: int | None, random_BL: Tensor) -> Tensor:
    """Return anchors_BA: up to `anchors` valid positions per row, without replacement, in the order of random numbers.

    Rows with fewer valid positions are filled with position L - 1, which `label_windows` gives length 0. None: all.
    """
    valid_BL = valid_anchors(mask_BL)
    if anchors is None:
        anchors = max(1, int(valid_BL.sum(dim=1).max()))
    keys_BL = random_BL.to(mask_BL.device).masked_fill(~valid_BL, -1.0)
    keys_BA, anchors_BA = keys_BL.topk(min(anchors, keys_BL.shape[1]), dim=1)
    return torch.where(keys_BA >= 0, anchors_BA, mask_BL.shape[1] - 1)
