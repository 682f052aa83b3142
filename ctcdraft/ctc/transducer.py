"""The transducer: frames that hear the words said before them, each saying one word or none. It knows scores alone.

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

import torch
from torch import Tensor

from ctcdraft.ctc.forward import NEVER, Likelihoods, _frames_first, _or_impossible


def likelihoods(label_XTS: Tensor, blank_XTP: Tensor, lengths_X: Tensor) -> Likelihoods:
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
    label_TSX = _frames_first(label_XTS).masked_fill(padding_SX, NEVER).clamp(min=NEVER)
    blank_TPX = _frames_first(blank_XTP).clamp(min=NEVER)

    # Row s: s labels have been said so far.
    log_zero_1X = torch.full_like(blank_TPX[0, :1], NEVER)
    emitted_SX = torch.cat([torch.zeros_like(log_zero_1X), log_zero_1X.expand(len(slot_S), *lengths_X.shape)])
    entered = []
    for label_SX, blank_PX in zip(label_TSX, blank_TPX, strict=True):
        entered.append(emitted_SX[:-1] + label_SX)
        emitted_SX = torch.logaddexp(emitted_SX + blank_PX, torch.cat([log_zero_1X, entered[-1]]))

    text_X = emitted_SX.gather(0, lengths_X[None])[0]
    # A text begins with s labels if the s-th is said in some frame: these are disjoint.
    prefix_SX = torch.stack(entered).logsumexp(dim=0)
    return Likelihoods(_or_impossible(text_X), _or_impossible(prefix_SX).movedim(0, -1))


def frames_needed(labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """The fewest frames that can say the labels: one each.   5 5 7  ->  3"""
    return lengths_X
