"""The CTC objective: the probability that frames collapse to labels. It knows scores, not how frames came about."""

from __future__ import annotations

from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.ctc.forward import log_likelihood
from ctcdraft.drafters.drafter import Batch
from ctcdraft.errors import InputError
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.objective import Loss


class CTC:
    """-log P(labels | states), summed over all alignments, per label, averaged over windows (Graves et al. 2006;
    Wen et al. 2024, equations 6 and 7). labels: S, the most labels a window has.

    S labels with r adjacent repeats need S + r frames. Windows that have too few are left out of the mean
    and their share is a metric: hidden, they would look like learning.
    """

    def __init__(self, labels: int) -> None:
        if labels < 1:
            raise InputError(f"objective.labels={labels}: a window needs at least one label")
        self.labels = labels

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        frames = emissions.states_BATD.shape[2]
        if frames < self.labels:
            raise InputError(
                f"{frames} frames cannot say {self.labels} labels: every window would be infeasible; "
                f"raise drafter.frames to at least {self.labels} or lower objective.labels"
            )
        scores = emissions.scores(batch.labels_BAS)
        label_BATS = scores.label_BATS - scores.log_normaliser_BAT[..., None]
        blank_BAT = scores.blank_BAT - scores.log_normaliser_BAT
        log_likelihood_BA = log_likelihood(label_BATS, blank_BAT, batch.labels_BAS, batch.lengths_BA)

        real_BA = batch.lengths_BA > 0
        feasible_BA = real_BA & (frames_needed(batch.labels_BAS, batch.lengths_BA) <= frames)
        per_label_BA = log_likelihood_BA / batch.lengths_BA.clamp(min=1)
        windows = feasible_BA.sum().clamp(min=1)
        value = -per_label_BA.where(feasible_BA, 0).sum() / windows
        said = (blank_BAT.detach().exp().mean(dim=-1) * real_BA).sum() / real_BA.sum().clamp(min=1)
        infeasible = 1 - feasible_BA.sum() / real_BA.sum().clamp(min=1)
        return Loss(value, {"loss": value.detach(), "blank_rate": said, "infeasible_share": infeasible})
