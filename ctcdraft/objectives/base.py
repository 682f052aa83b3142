"""What every objective owes: a value to minimise and the figures worth watching. It knows no optimiser."""

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
    """value: a scalar with a gradient. metrics: detached scalars, by name."""

    value: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """labels: S, how many labels a window should have. teaches: "alignments" where a label may fall on any frame,
    with blanks between; "transductions" where it may too, but no two frames say it together; "words" where label k
    is said by frame k and the blank learns nothing; "states" where the first frame is to be the base's next state."""

    labels: int

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss: ...


def check_labels(labels: int) -> int:
    return check_int(labels, "objective.labels")


def check_decay(decay: float) -> float:
    if not 0 < check_float(decay, "objective.decay") <= 1:
        raise InputError(
            f"objective.decay={decay}: a label's weight is decay^k, so decay lies above 0 and reaches to 1"
        )
    return decay


def check_frames(emissions: Emissions, labels: int) -> int:
    """The number of frames, which must be able to say so many labels at all."""
    if not isinstance(emissions, Emissions):
        raise InputError(
            f"this objective scores labels at frames, but the drafter gives {type(emissions).__name__} instead; "
            "use the objective that is made for this drafter"
        )
    frames = emissions.states_BATD.shape[2]
    if frames < labels:
        raise InputError(
            f"{frames} frames cannot say {labels} labels: every window would be infeasible; "
            f"raise drafter.frames to at least {labels} or lower objective.labels"
        )
    return frames


def decayed_masked_mean(values_BAS: Tensor, real_BAS: Tensor, decay: float) -> Tensor:
    """Mean of the real values, the k-th of a window (from 0) weighing decay^k: what comes first decides most.

    values 3 1, decay 1/2   ->   (3 + 1/2) / (1 + 1/2) = 7/3
    """
    weights_BAS = real_BAS * decay ** torch.arange(values_BAS.shape[-1], device=values_BAS.device)
    return (values_BAS.where(real_BAS, 0) * weights_BAS).sum() / weights_BAS.sum().clamp(min=1e-30)


def label_mask(batch: Batch) -> Tensor:
    """True_BAS where a window has a label."""
    return torch.arange(batch.labels_BAS.shape[-1], device=batch.lengths_BA.device) < batch.lengths_BA[..., None]


def masked_mean(values_BA: Tensor, real_BA: Tensor) -> Tensor:
    """Mean of the real values; 0 where there is none."""
    return values_BA.where(real_BA, 0).sum() / real_BA.sum().clamp(min=1)
