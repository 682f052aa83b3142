"""Cross-entropy: label k is said by frame k, in words alone. It knows no blank and no alignment."""

from __future__ import annotations

from ctcdraft.batch import Batch
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Loss, check_decay, check_frames, check_labels, decayed_masked_mean, label_mask


class CrossEntropy:
    """-log p_k(x_k), weighted by decay^(k-1), as Medusa's heads are trained (Cai et al. 2024, equation 1).

    The frames share the mass of the blank among the words. They are to be read `direct`. Labels that a head of some
    words cannot say teach nothing, and their share is a metric.
    """

    supervises = "words"

    def __init__(self, labels: int, decay: float) -> None:
        self.labels = check_labels(labels)
        self.decay = check_decay(decay)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        log_probs_BAS = emissions.label_log_probs(batch.labels_BAS)
        real_BAS = label_mask(batch)
        can_BAS = real_BAS & ~log_probs_BAS.isneginf()  # a head may have some of the words only
        value = decayed_masked_mean(-log_probs_BAS, can_BAS, self.decay)
        first = decayed_masked_mean(log_probs_BAS[..., :1].detach().exp(), real_BAS[..., :1], 1.0)
        infeasible = 1 - can_BAS.sum() / real_BAS.sum().clamp(min=1)
        return Loss(value, {"loss": value.detach(), "first_label": first, "infeasible_share": infeasible})
