"""The forward recursion: log-likelihoods of labels, and of all their prefixes, under CTC and under a transducer.

CTC is Graves et al. 2006, section 4.1, on two rows of S + 1 states instead of one row of 2S + 1.

The transducer is that of Graves 2012, "Sequence transduction with recurrent neural networks", in the monotonic form
with at most one token per frame (Sak et al. 2017, "Recurrent neural aligner"): a blank emits nothing, any other class
emits its token, and either way the next frame follows. In Graves' own form a frame may emit any number of tokens, so
the length of a text would not be bounded by the number of frames. Here T frames emit up to T tokens and all C^T
alignments sum to one, so prefix search, exact distribution and training are those of label-conditioned CTC frames
under another topology (`topology.py`):

    frames  a - a b   ->   a a b        a a - b   ->   a a b          CTC collapses the second to a b

Equal tokens need no blank between them, and S labels always fit into S frames. The prediction network is a logit
correction (`nn/logit_correction.py`), added to the token logits. Adding it to the blank's too would gain nothing: a
frame is normalised over all classes, so the blank rises where all tokens fall.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Stands in for -inf: sums of it stay finite in float32, so no gradient ever meets inf - inf.
LOG_ZERO = -1e30


@dataclass(frozen=True)
class Likelihoods:
    """Log-likelihoods of labels; -inf where no alignment exists."""

    text_X: Tensor  # log P(the frames collapse to exactly the labels)
    prefix_XS: Tensor  # at s, log P(they collapse to a text that begins with the first s + 1 labels)
    # Log-masses before every frame, row s after s labels (S + 1 rows): from which another token may begin; and from
    # which the last label may begin again.
    begins_TSX: list[tuple[Tensor, Tensor]]

    def next_token(self, token_XTSW: Tensor, repeats_XSW: Tensor) -> Tensor:
        """Return log P_XSW(the text begins with the first s labels and then token w), s = 0 .. S - 1.

        Args:
            token_XTSW: log p_t(token w) after the first s labels.
            repeats_XSW: whether the token equals label s, the one before it.
        """
        terms = []
        for (other_SX, again_SX), token_XSW in zip(self.begins_TSX, token_XTSW.unbind(-3), strict=True):
            other_XS, again_XS = other_SX[:-1].movedim(0, -1), again_SX[:-1].movedim(0, -1)
            begin_XSW = torch.where(repeats_XSW, again_XS[..., None], other_XS[..., None])
            terms.append(begin_XSW + token_XSW.clamp(min=LOG_ZERO))
        return torch.stack(terms).logsumexp(dim=0)


def log_likelihood(label_XTS: Tensor, blank_XT: Tensor, labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """Return log P_X(independent frames collapse to the labels), summed over all alignments.

    Two frames, one label:   p(label) = 1/2 1/4   p(blank) = 1/2 3/4
    label label 1/8  +  label blank 3/8  +  blank label 1/8  =  5/8, and its log is returned.

    Where no alignment exists (too few frames, or zero probabilities) the value is -inf and the gradient zero.

    Args:
        label_XTS: at [t, s], log p_t(labels[s]), normalised over all classes; float32 or float64. X is any number of
            leading axes.
        blank_XT: log p_t(blank), normalised likewise.
        labels_XS, lengths_X: labels from lengths on are padding; ids and scores there may be anything.
    """
    return likelihoods(label_XTS, label_XTS, blank_XT[..., None], labels_XS, lengths_X).text_X


def likelihoods(
    label_XTS: Tensor, repeat_XTS: Tensor, blank_XTP: Tensor, labels_XS: Tensor, lengths_X: Tensor
) -> Likelihoods:
    """Return the same for label-conditioned frames, and for all prefixes.

    The frames of log_likelihood's example: P(the text begins with the label)  =  1/2  +  1/2 * 1/4  =  5/8.

    Args:
        label_XTS: at [t, s], log p_t(labels[s]) after the first s labels.
        repeat_XTS: the same class after the first s + 1 labels, so that the frame repeats it.
        blank_XTP: at [t, p], log p_t(blank) after p labels; P = S + 1, or 1 for frames that are not conditioned.
    """
    padding_SX = _padding(label_XTS, lengths_X)
    labels_SX = labels_XS.movedim(-1, 0)
    equal_SX = torch.zeros_like(padding_SX)
    equal_SX[1:] = labels_SX[1:] == labels_SX[:-1]
    label_TSX = _frames_first(label_XTS, padding_SX)
    repeat_TSX = label_TSX if repeat_XTS is label_XTS else _frames_first(repeat_XTS, padding_SX)
    blank_TPX = _frames_first(blank_XTP)

    # Row s: s labels so far, and the last frame was a blank (or there was none) / was label s.
    log_zero_1X = torch.full_like(blank_TPX[0, :1], LOG_ZERO)
    ends_in_blank_SX = torch.cat([torch.zeros_like(log_zero_1X), log_zero_1X.expand_as(padding_SX)])
    ends_in_label_SX = log_zero_1X.expand_as(ends_in_blank_SX)
    begins, begun = [], []
    for label_SX, repeat_SX, blank_PX in zip(label_TSX, repeat_TSX, blank_TPX, strict=True):
        either_SX = torch.logaddexp(ends_in_blank_SX, ends_in_label_SX)
        begins.append((either_SX, ends_in_blank_SX))
        # A label equal to the one before it can only follow a blank, or the two would merge.
        begun.append(torch.where(equal_SX, ends_in_blank_SX[:-1], either_SX[:-1]) + label_SX)
        ends_in_label_SX = torch.cat([log_zero_1X, torch.logaddexp(ends_in_label_SX[1:] + repeat_SX, begun[-1])])
        ends_in_blank_SX = either_SX + blank_PX
    return _result(torch.logaddexp(ends_in_blank_SX, ends_in_label_SX), begins, begun, lengths_X)


def transducer_likelihoods(label_XTS: Tensor, blank_XTP: Tensor, lengths_X: Tensor) -> Likelihoods:
    """Return the log-likelihoods of the labels and of their prefixes under a transducer; arguments of `likelihoods`.

    Two frames, one label:   p(label) = 1/2 1/4   p(blank) = 1/2 3/4   and after the label  p(blank) = 1/3 1/3
    label blank 1/2 1/3  +  blank label 1/2 1/4  =  7/24; and it begins the text with  1/2 + 1/8  =  5/8.
    """
    padding_SX = _padding(label_XTS, lengths_X)
    label_TSX, blank_TPX = _frames_first(label_XTS, padding_SX), _frames_first(blank_XTP)

    # Row s: s labels so far.
    log_zero_1X = torch.full_like(blank_TPX[0, :1], LOG_ZERO)
    emitted_SX = torch.cat([torch.zeros_like(log_zero_1X), log_zero_1X.expand_as(padding_SX)])
    begins, begun = [], []
    for label_SX, blank_PX in zip(label_TSX, blank_TPX, strict=True):
        begins.append((emitted_SX, emitted_SX))
        begun.append(emitted_SX[:-1] + label_SX)
        emitted_SX = torch.logaddexp(emitted_SX + blank_PX, torch.cat([log_zero_1X, begun[-1]]))
    return _result(emitted_SX, begins, begun, lengths_X)


def transducer_frames_needed(labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """Return the fewest frames_X that can emit the labels: one each.   5 5 7  ->  3"""
    return lengths_X


def _padding(scores_XTS: Tensor, lengths_X: Tensor) -> Tensor:
    """Return true_SX from the lengths on. Raise ValueError for half-precision scores."""
    if scores_XTS.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {scores_XTS.dtype}; the forward recursion needs float32 or float64")
    slot_S = torch.arange(scores_XTS.shape[-1], device=scores_XTS.device)
    return slot_S.view(-1, *[1] * lengths_X.ndim) >= lengths_X[None]


def _frames_first(scores_XTS: Tensor, padding_SX: Tensor | None = None) -> Tensor:
    """Return scores_TSX: each step then works on whole contiguous rows of X, several times faster on a CPU."""
    scores_TSX = scores_XTS.movedim((-2, -1), (0, 1)).contiguous()
    if padding_SX is not None:
        scores_TSX = scores_TSX.masked_fill(padding_SX, LOG_ZERO)
    return scores_TSX.clamp(min=LOG_ZERO)


def _result(
    final_SX: Tensor, begins: list[tuple[Tensor, Tensor]], begun: list[Tensor], lengths_X: Tensor
) -> Likelihoods:
    """final_SX: log-mass of s labels after the last frame; begun[t]: of label s beginning in frame t."""
    text_X = final_SX.gather(0, lengths_X[None])[0]
    # A text begins with s labels if the s-th begins in some frame: these events are disjoint.
    prefix_SX = torch.stack(begun).logsumexp(dim=0)
    return Likelihoods(_restore_neg_inf(text_X), _restore_neg_inf(prefix_SX).movedim(0, -1), begins)


def _restore_neg_inf(log_probs: Tensor) -> Tensor:
    return log_probs.masked_fill(log_probs <= LOG_ZERO / 2, -torch.inf)  # NaN stays NaN
