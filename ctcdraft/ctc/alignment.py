"""From frames to labels, and how many frames labels need. It knows class ids, and no probability.

The map from frames to labels is B of Graves et al. 2006, "Connectionist temporal classification",
section 3.1.
"""

import torch
from torch import Tensor


def collapse(frames_PT: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Merge repeated frames, then drop blanks; labels come back left-aligned.

    With blank = 0:   5 5 0 5 7  ->  5 5 7      0 0 0 0 0  ->  (nothing)

    A frame of -1 is a free slot, for paths of unequal length: it says nothing, as a blank does.
    Returns labels_PT (free slots hold -1) and lengths_P.
    """
    is_label_PT = (frames_PT != blank) & (frames_PT != -1)
    starts_PT = is_label_PT.clone()
    starts_PT[:, 1:] &= frames_PT[:, 1:] != frames_PT[:, :-1]

    # What is dropped goes to one column too many, so that no shape depends on the data.
    paths, frames = frames_PT.shape
    slots_PT = torch.where(starts_PT, starts_PT.cumsum(1) - 1, frames)
    labels_PT = frames_PT.new_full((paths, frames + 1), -1)
    labels_PT.scatter_(1, slots_PT, frames_PT.where(starts_PT, -1))
    return labels_PT[:, :frames], starts_PT.sum(1)


def frames_needed(labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """The fewest frames that can say the labels: one each, and a blank between equal neighbours.

    5 5 7  ->  4 (5 0 5 7)      5 6 7  ->  3      (nothing)  ->  0

    Labels from lengths on are padding and may hold anything. X is any number of leading axes.
    Returns needed_X.
    """
    later_S = torch.arange(1, max(labels_XS.shape[-1], 1), device=labels_XS.device)
    repeats_XS = (labels_XS[..., 1:] == labels_XS[..., :-1]) & (later_S < lengths_X[..., None])
    return lengths_X + repeats_XS.sum(-1)
