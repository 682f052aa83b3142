"""The probability of a text, and of each of its beginnings, in frames. It knows scores, but no vocabulary and no loss.

The forward recursion of Graves et al. 2006, section 4.1, on two rows of states instead of one row of 2S + 1.

The transducer: frames that hear the words said before them, each saying one word or none. It knows scores alone.

Of Graves 2012, "Sequence transduction with recurrent neural networks", in the monotonic form with at most one word a
frame (Sak et al. 2017, "Recurrent neural aligner"): a blank says nothing, any other class says its word, and the next
frame comes next either way. In Graves' own form a word stays in its frame, so one frame could say all of a draft: the
text would have no bound but the search's patience, and frames would not be what they are everywhere else here, the
steps of one parallel pass. This way T frames say up to T words, all C^T alignments sum to one, and prefix search, the
exact law and training are those of CTC frames that listen (`listening.py`, `law.py`) under other transitions:

    frames  a - a b   ->   a a b        a a - b   ->   a a b          CTC reads the second as a b

So two equal words need no blank between them, no word can be held, and S labels fit into S frames, whatever they are.
The prediction network is a correction (`nn/correction.py`): it starts from anchor and root, hears the words, and is
added to the words' scores. To add to the blank's as well would say no more: a frame is normalised over all classes, so
the blank rises where all words fall.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Stands in for -inf: sums of it stay finite in float32, so no gradient ever meets inf - inf.
LOG_ZERO = -1e30


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
    label_TSX = _frames_first(label_XTS).masked_fill(padding_SX, LOG_ZERO).clamp(min=LOG_ZERO)
    hold_TSX = label_TSX
    if hold_XTS is not label_XTS:
        hold_TSX = _frames_first(hold_XTS).masked_fill(padding_SX, LOG_ZERO).clamp(min=LOG_ZERO)
    blank_TPX = _frames_first(blank_XTP).clamp(min=LOG_ZERO)

    # Row s: s labels said so far, and the last frame was a blank (or nothing yet) / was label s.
    log_zero_1X = torch.full_like(blank_TPX[0, :1], LOG_ZERO)
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
    return Likelihoods(_restore_neg_inf(text_X), _restore_neg_inf(prefix_SX).movedim(0, -1))


def _frames_first(scores_XTS: Tensor) -> Tensor:
    return scores_XTS.movedim((-2, -1), (0, 1)).contiguous()


def _restore_neg_inf(log_probs: Tensor) -> Tensor:
    return log_probs.masked_fill(log_probs <= LOG_ZERO / 2, -torch.inf)  # what is not a number stays that


def transducer_likelihoods(label_XTS: Tensor, blank_XTP: Tensor, lengths_X: Tensor) -> Likelihoods:
    """Log probabilities of the labels and of all their beginnings, every alignment summed; float32 or float64.

    label_XTS[..., t, s]: log p_t(labels[s]) where the first s labels have been said. blank_XTP[..., t, p]: log
    p_t(blank) where p labels have been said; P = S + 1, or 1 where that makes no difference. Scores from lengths on
    may be anything. -inf, and a zero gradient, where the frames are too few.

    Two frames, one label:   p(label) = 1/2 1/4   p(blank) = 1/2 3/4   and behind the label  p(blank) = 1/3 1/3
    label blank 1/2 1/3  +  blank label 1/2 1/4  =  7/24; and it begins the text with  1/2 + 1/8  =  5/8.
    """
    if label_XTS.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {label_XTS.dtype}; the forward recursion needs float32 or float64")
    slot_S = torch.arange(label_XTS.shape[-1], device=label_XTS.device)
    padding_SX = slot_S.view(-1, *[1] * lengths_X.ndim) >= lengths_X
    label_TSX = _frames_first(label_XTS).masked_fill(padding_SX, LOG_ZERO).clamp(min=LOG_ZERO)
    blank_TPX = _frames_first(blank_XTP).clamp(min=LOG_ZERO)

    # Row s: s labels have been said so far.
    log_zero_1X = torch.full_like(blank_TPX[0, :1], LOG_ZERO)
    emitted_SX = torch.cat([torch.zeros_like(log_zero_1X), log_zero_1X.expand(len(slot_S), *lengths_X.shape)])
    entered = []
    for label_SX, blank_PX in zip(label_TSX, blank_TPX, strict=True):
        entered.append(emitted_SX[:-1] + label_SX)
        emitted_SX = torch.logaddexp(emitted_SX + blank_PX, torch.cat([log_zero_1X, entered[-1]]))

    text_X = emitted_SX.gather(0, lengths_X[None])[0]
    # A text begins with s labels if the s-th is said in some frame: these are disjoint.
    prefix_SX = torch.stack(entered).logsumexp(dim=0)
    return Likelihoods(_restore_neg_inf(text_X), _restore_neg_inf(prefix_SX).movedim(0, -1))


def transducer_frames_needed(labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """The fewest frames that can say the labels: one each.   5 5 7  ->  3"""
    return lengths_X
