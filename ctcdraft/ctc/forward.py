"""The probability of a text, and of each of its beginnings, in frames. It knows scores, but no vocabulary and no loss.

The forward recursion of Graves et al. 2006, section 4.1, on two rows of states instead of one row of 2S + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Stands in for -inf: sums of it stay finite in float32, so no gradient ever meets inf - inf.
NEVER = -1e30


@dataclass(frozen=True)
class Likelihoods:
    """text_X: log P(the frames collapse to just the labels). prefix_XS[s]: log P(they collapse to a text that
    begins with the first s + 1 labels), whatever comes then. -inf where no alignment says it."""

    text_X: Tensor
    prefix_XS: Tensor


def log_likelihood(label_XTS: Tensor, blank_XT: Tensor, labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """Log probability that independent frames collapse to the labels, summed over all alignments.

    label_XTS[..., t, s] is log p_t(labels[s]) and blank_XT is log p_t(blank), both already normalised over
    all classes; X is any number of leading axes. Labels from lengths on are padding: they may hold any id,
    and their scores may be anything. float32 or float64.

    Two frames, one label:   p(label) = 1/2 1/4   p(blank) = 1/2 3/4
    label label 1/8  +  label blank 3/8  +  blank label 1/8  =  5/8, and its log is returned.

    Where no alignment says the labels (too few frames, or a zero where it hurts) the value is -inf and the
    gradient zero. Returns log_likelihood_X.
    """
    return likelihoods(label_XTS, label_XTS, blank_XT[..., None], labels_XS, lengths_X).text_X


def likelihoods(
    label_XTS: Tensor, hold_XTS: Tensor, blank_XTP: Tensor, labels_XS: Tensor, lengths_X: Tensor
) -> Likelihoods:
    """The same where a frame may depend on the text collapsed from the frames before it, and for all prefixes.

    label_XTS[..., t, s]: log p_t(labels[s]) where the first s labels have been said; hold_XTS: the same class
    where it has just been said itself, so that the frame repeats it. blank_XTP[..., t, p]: log p_t(blank)
    where p labels have been said; P = S + 1, or 1 where that makes no difference.

    The frames of log_likelihood's example: P(the text begins with the label)  =  1/2  +  1/2 * 1/4  =  5/8.
    """
    if label_XTS.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {label_XTS.dtype}; the forward recursion needs float32 or float64")
    # Labels first: each step works on whole contiguous rows of X, several times faster on a CPU.
    labels_SX, lengths_1X = labels_XS.movedim(-1, 0), lengths_X[None]
    slot_S = torch.arange(labels_SX.shape[0], device=labels_XS.device)
    padding_SX = slot_S.view(-1, *[1] * lengths_X.ndim) >= lengths_1X
    repeat_SX = torch.zeros_like(padding_SX)
    repeat_SX[1:] = labels_SX[1:] == labels_SX[:-1]
    label_TSX = _frames_first(label_XTS).masked_fill(padding_SX, NEVER).clamp(min=NEVER)
    hold_TSX = label_TSX
    if hold_XTS is not label_XTS:
        hold_TSX = _frames_first(hold_XTS).masked_fill(padding_SX, NEVER).clamp(min=NEVER)
    blank_TPX = _frames_first(blank_XTP).clamp(min=NEVER)

    # Row s: s labels said so far, and the last frame was a blank (or nothing yet) / was label s.
    log_zero_1X = torch.full_like(blank_TPX[0, :1], NEVER)
    ends_in_blank_SX = torch.cat([torch.zeros_like(log_zero_1X), log_zero_1X.expand(len(labels_SX), *lengths_X.shape)])
    ends_in_label_SX = log_zero_1X.expand_as(ends_in_blank_SX)
    entered = []
    for label_SX, hold_SX, blank_PX in zip(label_TSX, hold_TSX, blank_TPX, strict=True):
        either_SX = torch.logaddexp(ends_in_blank_SX, ends_in_label_SX)
        # A label equal to the one before it can only follow a blank, or the two would merge.
        entered.append(torch.where(repeat_SX, ends_in_blank_SX[:-1], either_SX[:-1]) + label_SX)
        ends_in_label_SX = torch.cat([log_zero_1X, torch.logaddexp(ends_in_label_SX[1:] + hold_SX, entered[-1])])
        ends_in_blank_SX = either_SX + blank_PX

    text_X = torch.logaddexp(ends_in_blank_SX, ends_in_label_SX).gather(0, lengths_1X)[0]
    # A text begins with s labels if the s-th is said for the first time in some frame: these are disjoint.
    prefix_SX = torch.stack(entered).logsumexp(dim=0)
    return Likelihoods(_or_impossible(text_X), _or_impossible(prefix_SX).movedim(0, -1))


def _frames_first(scores_XTS: Tensor) -> Tensor:
    return scores_XTS.movedim((-2, -1), (0, 1)).contiguous()


def _or_impossible(log_probs: Tensor) -> Tensor:
    return log_probs.masked_fill(log_probs <= NEVER / 2, -torch.inf)  # what is not a number stays that
