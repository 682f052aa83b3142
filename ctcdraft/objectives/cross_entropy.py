"""Cross-entropy: frame k predicts label k, without blank and alignment."""

from __future__ import annotations

from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import DecayedObjective, Loss, check_frames, label_mask, masked_mean


class CrossEntropy(DecayedObjective):
    """-log p_k(x_k), weighted by decay^(k-1), as Medusa's heads are trained (Cai et al. 2024, equation 1).

    Frames are normalised over the tokens, without the blank; build trees from them with drafter/tree=per_frame. Labels
    outside a draft vocabulary are left out of the mean, and their share is a metric.
    """

    supervises = "tokens"

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        return self.of_log_probs(emissions.label_log_probs(batch.labels_BAS), batch)

    def of_log_probs(self, log_probs_BAS: Tensor, batch: Batch) -> Loss:
        """Return the loss, given the labels' own log-probabilities."""
        # A metric beside the loss: how probable the first label is, without which nothing is accepted.
        first = masked_mean(log_probs_BAS[..., 0].detach().exp(), label_mask(batch)[..., 0])
        return self.loss(log_probs_BAS, batch, first_label=first)
