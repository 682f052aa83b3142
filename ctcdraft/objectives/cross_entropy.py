"""Cross-entropy: frame k predicts label k, without blank and alignment."""

from __future__ import annotations

from ctcdraft.batch import Batch
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Loss, check_decay, check_frames, check_labels, decayed_masked_mean, label_mask


class CrossEntropy:
    """-log p_k(x_k), weighted by decay^(k-1), as Medusa's heads are trained (Cai et al. 2024, equation 1).

    Frames are normalised over the tokens, without the blank; build trees from them with drafter/tree=per_frame. Labels
    outside a draft vocabulary are left out of the mean, and their share is a metric.
    """

    supervises = "words"

    def __init__(self, labels: int, decay: float) -> None:
        self.labels = check_labels(labels)
        self.decay = check_decay(decay)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        log_probs_BAS = emissions.label_log_probs(batch.labels_BAS)
        real_BAS = label_mask(batch)
        feasible_BAS = real_BAS & ~log_probs_BAS.isneginf()  # a label outside the draft vocabulary
        value = decayed_masked_mean(-log_probs_BAS, feasible_BAS, self.decay)
        first = decayed_masked_mean(log_probs_BAS[..., :1].detach().exp(), real_BAS[..., :1], 1.0)
        infeasible = 1 - feasible_BAS.sum() / real_BAS.sum().clamp(min=1)
        return Loss(value, {"loss": value.detach(), "first_label": first, "infeasible_share": infeasible})
