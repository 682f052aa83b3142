"""The CTC objective: the probability that frames collapse to labels. It knows scores, not how frames came about.

The prefix objective: the probability that the collapsed text begins with the labels. It knows scores, not frames.

The transducer's objectives: those of CTC, where no two frames merge. They know scores, not how frames came about.
"""

from __future__ import annotations

from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.ctc import forward
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.ctc.forward import Likelihoods, likelihoods
from ctcdraft.nn.heads import AlignmentScores, Emissions
from ctcdraft.objectives.base import (
    Loss,
    check_decay,
    check_frames,
    check_labels,
    decayed_masked_mean,
    label_mask,
    masked_mean,
)


def ctc_window_likelihoods(scores: AlignmentScores, batch: Batch) -> Likelihoods:
    """Of every window, where repeated frames merge."""
    return likelihoods(scores.label_BATS, scores.hold_BATS, scores.blank_BATP, batch.labels_BAS, batch.lengths_BA)


class CTC:
    """-log P(labels | states), summed over all alignments, per label, averaged over windows (Graves et al. 2006;
    Wen et al. 2024, equations 6 and 7). labels: S, the most labels a window has.

    S labels with r adjacent repeats need S + r frames. Windows that have too few, or a word that the head cannot
    say, are left out of the mean and their share is a metric: hidden, they would look like learning.
    """

    supervises = "alignments"
    needed = staticmethod(frames_needed)
    likelihoods = staticmethod(ctc_window_likelihoods)

    def __init__(self, labels: int) -> None:
        self.labels = check_labels(labels)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        frames = check_frames(emissions, self.labels)
        scores = emissions.scores(batch.labels_BAS)
        log_likelihood_BA = self.likelihoods(scores, batch).text_X

        real_BA = batch.lengths_BA > 0
        feasible_BA = real_BA & (self.needed(batch.labels_BAS, batch.lengths_BA) <= frames)
        feasible_BA &= ~log_likelihood_BA.isneginf()  # words that the head cannot say; what is not a number must show
        per_label_BA = log_likelihood_BA / batch.lengths_BA.clamp(min=1)
        value = masked_mean(-per_label_BA, feasible_BA)
        infeasible = 1 - feasible_BA.sum() / real_BA.sum().clamp(min=1)
        metrics = {"blank_rate": blank_rate(scores, batch), "infeasible_share": infeasible}
        return Loss(value, {"loss": value.detach(), **metrics})


def blank_rate(scores: AlignmentScores, batch: Batch) -> Tensor:
    """The blank's probability, mean over frames of real windows; where it depends on the text, that before anything
    has been said."""
    return masked_mean(scores.blank_BATP[..., 0].detach().exp().mean(dim=-1), batch.lengths_BA > 0)


class PrefixCTC:
    """-log P(the text begins with x1 .. xk), for every k of a window, weighted by decay^(k-1).

    It asks for what drafting is paid for: a draft is worth its longest right beginning, and what the frames
    say after it costs nothing, where CTC wants the text to end there. All k come from one recursion.
    Prefixes with adjacent repeats that the frames cannot say are left out; their share is a metric.
    """

    supervises = "alignments"
    likelihoods = staticmethod(ctc_window_likelihoods)

    def __init__(self, labels: int, decay: float) -> None:
        self.labels = check_labels(labels)
        self.decay = check_decay(decay)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        scores = emissions.scores(batch.labels_BAS)
        prefix_BAS = self.likelihoods(scores, batch).prefix_XS
        real_BAS = label_mask(batch)
        feasible_BAS = real_BAS & ~prefix_BAS.isneginf()  # what is not a number must show
        value = decayed_masked_mean(-prefix_BAS, feasible_BAS, self.decay)
        infeasible = 1 - feasible_BAS.sum() / real_BAS.sum().clamp(min=1)
        metrics = {"blank_rate": blank_rate(scores, batch), "infeasible_share": infeasible}
        return Loss(value, {"loss": value.detach(), **metrics})


def transducer_window_likelihoods(scores: AlignmentScores, batch: Batch) -> Likelihoods:
    """Of every window, where each frame says one word or none."""
    return forward.transducer_likelihoods(scores.label_BATS, scores.blank_BATP, batch.lengths_BA)


class Transducer(CTC):
    """-log P(labels | states), summed over all alignments, per label (Graves 2012; here with at most one label a
    frame). Every window that has a frame for each label is feasible."""

    supervises = "transductions"
    needed = staticmethod(forward.transducer_frames_needed)
    likelihoods = staticmethod(transducer_window_likelihoods)


class PrefixTransducer(PrefixCTC):
    """-log P(the text begins with x1 .. xk) for every k of a window, weighted by decay^(k-1)."""

    supervises = "transductions"
    likelihoods = staticmethod(transducer_window_likelihoods)
