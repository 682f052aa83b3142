"""CTC objectives: the probability that frames collapse to the labels, or to a text that begins with them.

`Transducer` and `PrefixTransducer` are the same without merging of repeated frames.
"""

from __future__ import annotations

from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.ctc import forward
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.ctc.forward import Likelihoods, likelihoods
from ctcdraft.errors import check_int
from ctcdraft.nn.alignment_scores import AlignmentScores
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import DecayedObjective, Loss, check_frames, counted_mean, masked_mean, share_left_out


def ctc_window_likelihoods(scores: AlignmentScores, batch: Batch) -> Likelihoods:
    return likelihoods(scores.label_BATS, scores.hold_BATS, scores.blank_BATP, batch.labels_BAS, batch.lengths_BA)


def transducer_window_likelihoods(scores: AlignmentScores, batch: Batch) -> Likelihoods:
    return forward.transducer_likelihoods(scores.label_BATS, scores.blank_BATP, batch.lengths_BA)


class CTC:
    """-log P(labels | hidden states), summed over all alignments, per label, averaged over windows (Graves et al. 2006;
    Wen et al. 2024, equations 6 and 7).

    Windows with too few frames (`frames_needed`), or with a label outside the draft vocabulary, are left out of the
    mean, and their share is a metric.
    """

    supervises = "alignments"
    needed = staticmethod(frames_needed)
    likelihoods = staticmethod(ctc_window_likelihoods)

    def __init__(self, labels: int) -> None:
        self.labels = check_int(labels, "objective.labels")

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        frames = check_frames(emissions, self.labels)
        scores = emissions.scores(batch.labels_BAS)
        log_likelihood_BA = self.likelihoods(scores, batch).text_X

        real_BA = batch.lengths_BA > 0
        feasible_BA = real_BA & (self.needed(batch.labels_BAS, batch.lengths_BA) <= frames)
        feasible_BA &= ~log_likelihood_BA.isneginf()  # outside the draft vocabulary; nan is kept and shows in the loss
        per_label_BA = log_likelihood_BA / batch.lengths_BA.clamp(min=1)
        value, count = counted_mean(-per_label_BA, feasible_BA, feasible_BA)
        # Without this metric a run could lower its loss unseen, by windows that it cannot emit.
        infeasible = share_left_out(feasible_BA, real_BA)
        metrics = {"blank_rate": blank_rate(scores, batch), "infeasible_share": infeasible}
        return Loss(value, {"loss": value.detach(), **metrics}, count)


def blank_rate(scores: AlignmentScores, batch: Batch) -> Tensor:
    """Return the mean probability of the blank over frames of real windows, before the first label is emitted."""
    # P is 1 for frames that are not label-conditioned: index 0 exists in both.
    return masked_mean(scores.blank_BATP[..., 0].detach().exp().mean(dim=-1), batch.lengths_BA > 0)


class PrefixCTC(DecayedObjective):
    """-log P(the text begins with x1 .. xk), for every k of a window, weighted by decay^(k-1).

    A draft is accepted up to its longest correct prefix, and what follows costs nothing; CTC also wants the text to end
    after the labels. Prefixes that the frames cannot emit, because of adjacent repeats or a draft vocabulary, are left
    out of the mean, and their share is a metric.
    """

    supervises = "alignments"
    likelihoods = staticmethod(ctc_window_likelihoods)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        scores = emissions.scores(batch.labels_BAS)
        prefix_BAS = self.likelihoods(scores, batch).prefix_XS  # all k from one recursion
        return self.loss(prefix_BAS, batch, blank_rate=blank_rate(scores, batch))


class Transducer(CTC):
    """-log P(labels | hidden states) per label (Graves 2012; here with at most one label per frame)."""

    supervises = "transductions"
    needed = staticmethod(forward.transducer_frames_needed)
    likelihoods = staticmethod(transducer_window_likelihoods)


class PrefixTransducer(PrefixCTC):
    """PrefixCTC for frames of a transducer, in which repeats do not merge."""

    supervises = "transductions"
    likelihoods = staticmethod(transducer_window_likelihoods)
