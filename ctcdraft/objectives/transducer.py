"""The transducer's objectives: those of CTC, where no two frames merge. They know scores, not how frames came about."""

from __future__ import annotations

from ctcdraft.ctc import transducer
from ctcdraft.ctc.forward import Likelihoods
from ctcdraft.drafters.drafter import Batch
from ctcdraft.nn.heads import Scores
from ctcdraft.objectives.ctc import CTC
from ctcdraft.objectives.prefix_ctc import PrefixCTC


def of_transductions(scores: Scores, batch: Batch) -> Likelihoods:
    """Of every window, where each frame says one word or none."""
    return transducer.likelihoods(scores.label_BATS, scores.blank_BATP, batch.lengths_BA)


class Transducer(CTC):
    """-log P(labels | states), summed over all alignments, per label (Graves 2012; here with at most one label a
    frame). Every window that has a frame for each label is feasible."""

    supervises = "transductions"
    needed = staticmethod(transducer.frames_needed)
    likelihoods = staticmethod(of_transductions)


class PrefixTransducer(PrefixCTC):
    """-log P(the text begins with x1 .. xk) for every k of a window, weighted by decay^(k-1)."""

    supervises = "transductions"
    likelihoods = staticmethod(of_transductions)
