"""The probability of a text under independent frames. It knows scores, but no vocabulary and no loss.

The forward recursion of Graves et al. 2006, section 4.1, on two rows of states instead of one row of 2S + 1.
"""

import torch
from torch import Tensor

# Stands in for -inf: sums of it stay finite in float32, so no gradient ever meets inf - inf.
NEVER = -1e30


def log_likelihood(label_XTS: Tensor, blank_XT: Tensor, labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """Log probability that the frames collapse to the labels, summed over all alignments.

    label_XTS[..., t, s] is log p_t(labels[s]) and blank_XT is log p_t(blank), both already normalised over
    all classes; X is any number of leading axes. Labels from lengths on are padding: they may hold any id,
    and their scores may be anything. float32 or float64.

    Two frames, one label:   p(label) = 1/2 1/4   p(blank) = 1/2 3/4
    label label 1/8  +  label blank 3/8  +  blank label 1/8  =  5/8, and its log is returned.

    Where no alignment says the labels (too few frames, or a zero where it hurts) the value is -inf and the
    gradient zero. Returns log_likelihood_X.
    """
    if label_XTS.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {label_XTS.dtype}; the forward recursion needs float32 or float64")
    # Labels first: each step works on whole contiguous rows of X, several times faster on a CPU.
    labels_SX, lengths_1X = labels_XS.movedim(-1, 0), lengths_X[None]
    slot_S = torch.arange(labels_SX.shape[0], device=labels_XS.device)
    padding_SX = slot_S.view(-1, *[1] * lengths_X.ndim) >= lengths_1X
    repeat_SX = torch.zeros_like(padding_SX)
    repeat_SX[1:] = labels_SX[1:] == labels_SX[:-1]
    label_TSX = label_XTS.movedim((-2, -1), (0, 1)).contiguous()
    label_TSX = label_TSX.masked_fill(padding_SX, NEVER).clamp(min=NEVER)
    blank_TX = blank_XT.movedim(-1, 0).clamp(min=NEVER).contiguous()

    # Row s: s labels said so far, and the last frame was a blank (or nothing yet) / was label s.
    never_1X = torch.full_like(blank_TX[:1], NEVER)
    blanked_SX = torch.cat([torch.zeros_like(never_1X), never_1X.expand(len(labels_SX), *lengths_X.shape)])
    said_SX = never_1X.expand_as(blanked_SX)
    for label_SX, blank_X in zip(label_TSX, blank_TX, strict=True):
        either_SX = torch.logaddexp(blanked_SX, said_SX)
        # A label equal to the one before it can only follow a blank, or the two would merge.
        before_SX = torch.where(repeat_SX, blanked_SX[:-1], either_SX[:-1])
        said_SX = torch.cat([never_1X, torch.logaddexp(said_SX[1:], before_SX) + label_SX])
        blanked_SX = either_SX + blank_X

    total_X = torch.logaddexp(blanked_SX, said_SX).gather(0, lengths_1X)[0]
    return torch.where(total_X > NEVER / 2, total_X, -torch.inf)
