"""The CTC objective: the probability that frames collapse to labels. It knows scores, not how frames came about."""

from __future__ import annotations

from torch import Tensor

from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.ctc.forward import Likelihoods, likelihoods
from ctcdraft.drafters.drafter import Batch
from ctcdraft.nn.heads import Emissions, Scores
from ctcdraft.objectives.objective import Loss, check_frames, check_labels, mean


def of_alignments(scores: Scores, batch: Batch) -> Likelihoods:
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
    likelihoods = staticmethod(of_alignments)

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
        value = mean(-per_label_BA, feasible_BA)
        infeasible = 1 - feasible_BA.sum() / real_BA.sum().clamp(min=1)
        metrics = {"blank_rate": blank_rate(scores, batch), "infeasible_share": infeasible}
        return Loss(value, {"loss": value.detach(), **metrics})


def blank_rate(scores: Scores, batch: Batch) -> Tensor:
    """The blank's probability, mean over frames of real windows; where it depends on the text, that before anything
    has been said."""
    return mean(scores.blank_BATP[..., 0].detach().exp().mean(dim=-1), batch.lengths_BA > 0)
