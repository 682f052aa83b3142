"""What objectives share: the loss with its metrics, checks of their settings, and means over windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.nn.heads import Emissions


@dataclass(frozen=True)
class Loss:
    """value: scalar with a gradient, to minimise. metrics: detached scalars, by name."""

    value: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """Computes a loss from the emissions of a batch.

    labels: S, the maximal number of labels of a window. An objective may also have `supervises`: "alignments" where a
    label may be at any frame, with blanks and repeats (CTC); "transductions" the same without merging of repeats;
    "words" where label k is at frame k and the blank is not trained; "states" where the first frame predicts the
    base's next hidden state.
    """

    labels: int

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss: ...


def check_labels(labels: int) -> int:
    return check_int(labels, "objective.labels")


class DecayedObjective:
    """An objective in which label k has the weight decay^(k-1), because a draft is accepted from its beginning."""

    def __init__(self, labels: int, decay: float) -> None:
        self.labels = check_labels(labels)
        if not 0 < check_float(decay, "objective.decay") <= 1:
            raise InputError(f"objective.decay must be > 0 and <= 1, got {decay}: label k has the weight decay^(k-1)")
        self.decay = decay

    def loss(self, log_probs_BAS: Tensor, batch: Batch, **metrics: Tensor) -> Loss:
        """Return the mean of -log_probs_BAS. Labels of probability zero are left out, and their share is a metric."""
        real_BAS = label_mask(batch)
        feasible_BAS = real_BAS & ~log_probs_BAS.isneginf()  # nan is kept and shows in the loss
        value = decayed_masked_mean(-log_probs_BAS, feasible_BAS, self.decay)
        infeasible = 1 - feasible_BAS.sum() / real_BAS.sum().clamp(min=1)
        return Loss(value, {"loss": value.detach(), **metrics, "infeasible_share": infeasible})


def check_frames(emissions: Emissions, labels: int) -> int:
    """Return the number of frames; raise InputError if there are fewer than labels."""
    if not isinstance(emissions, Emissions):
        raise InputError(
            f"this objective scores labels at frames, but the drafter returns {type(emissions).__name__}; "
            "use an objective for this kind of drafter"
        )
    frames = emissions.states_BATD.shape[2]
    if frames < labels:
        raise InputError(
            f"{frames} frames cannot emit {labels} labels, so every window would be infeasible; "
            f"raise drafter.frames to at least {labels} or lower objective.labels"
        )
    return frames


def decayed_masked_mean(values_BAS: Tensor, real_BAS: Tensor, decay: float) -> Tensor:
    """Return the mean of the real values, the k-th of a window (from 0) with weight decay^k.

    values 3 1, decay 1/2   ->   (3 + 1/2) / (1 + 1/2) = 7/3
    """
    weights_BAS = real_BAS * decay ** torch.arange(values_BAS.shape[-1], device=values_BAS.device)
    return (values_BAS.where(real_BAS, 0) * weights_BAS).sum() / weights_BAS.sum().clamp(min=1e-30)


def label_mask(batch: Batch) -> Tensor:
    """Return True_BAS where a window has a label."""
    return torch.arange(batch.labels_BAS.shape[-1], device=batch.lengths_BA.device) < batch.lengths_BA[..., None]


def masked_mean(values_BA: Tensor, real_BA: Tensor) -> Tensor:
    """Return the mean of the real values; 0 where there is none."""
    return values_BA.where(real_BA, 0).sum() / real_BA.sum().clamp(min=1)
