"""What objectives share: the loss with its metrics, checks of their settings, weighted sums, means over windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.distributed import Distributed
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.step_counts import mean_over_processes

SUPERVISED = ("states", "transductions", "alignments", "tokens")  # the strictest first


@dataclass(frozen=True)
class Loss:
    value: Tensor  # scalar with a gradient, to minimise
    metrics: dict[str, Tensor]  # detached scalars, by name; tensors, because numbers would wait for the accelerator
    # What `value` was divided by, which weighs the batches of a step; None: they weigh the same.
    count: Tensor | None = None


class Objective(Protocol):
    """Computes a loss from the emissions of a batch.

    labels: S, the maximal number of labels of a window. An objective may also have `supervises`: "alignments" where a
    label may be at any frame, with blanks and repeats (CTC); "transductions" the same without merging of repeats;
    "tokens" where label k is at frame k and the blank is not trained; "states" where the first frame predicts the
    base's next hidden state; and `several_counts`, true where its value is a sum of means over different labels.
    """

    labels: int

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss: ...


class DecayedObjective:
    """An objective in which label k has the weight decay^(k-1), because a draft is accepted from its beginning.

    least: the weight of labels that would have less.
    """

    def __init__(self, labels: int, decay: float, least: float = 0.0) -> None:
        self.labels = check_int(labels, "objective.labels")
        self.decay = check_float(decay, "objective.decay", above=0, most=1)
        self.least = check_float(least, "objective.least", least=0, most=1)

    def mean(self, values_BAS: Tensor, real_BAS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the real values and the sum of the weights, as `counted_mean` does.

        values 3 1, decay 1/2   ->   (3 + 1/2) / (1 + 1/2) = 7/3
        """
        steps_S = torch.arange(real_BAS.shape[-1], device=real_BAS.device, dtype=values_BAS.dtype)
        return counted_mean(values_BAS, real_BAS, real_BAS * (self.decay**steps_S).clamp(min=self.least))

    def loss(self, log_probs_BAS: Tensor, batch: Batch, **metrics: Tensor) -> Loss:
        """Return the mean of -log_probs_BAS. Labels of probability zero are left out, and their share is a metric."""
        real_BAS = label_mask(batch)
        feasible_BAS = real_BAS & ~log_probs_BAS.isneginf()  # nan is kept and shows in the loss
        value, count = self.mean(-log_probs_BAS, feasible_BAS)
        infeasible = share_left_out(feasible_BAS, real_BAS)
        return Loss(value, {"loss": value.detach(), **metrics, "infeasible_share": infeasible}, count)


class WeightedSum:
    """The sum of weight * value over named objectives, which share their windows and hence `labels`.

    weights: one number >= 0 per part; a part of weight 0 is not computed.
    """

    def __init__(self, labels: int, parts: Mapping[str, Objective], weights: Mapping[str, float]) -> None:
        self.labels = check_int(labels, "objective.labels")
        for name, weight in weights.items():
            check_float(weight, f"objective.weights.{name}")
        if set(parts) != set(weights) or not any(weights.values()) or min(weights.values(), default=0) < 0:
            raise InputError(
                f"objective.weights must be >= 0 for each of {', '.join(parts)} and > 0 for one, got {dict(weights)}"
            )
        other = [f"{name} has {part.labels}" for name, part in parts.items() if part.labels != labels]
        if other:
            raise InputError(f"objective.labels={labels}, but {', '.join(other)}; set them equal in all parts of a sum")
        kinds = {getattr(part, "supervises", "tokens") for part in parts.values()}
        if unknown := kinds - set(SUPERVISED):
            raise InputError(f"`supervises` must be one of {', '.join(SUPERVISED)}, got {unknown.pop()}")
        if {"alignments", "transductions"} <= kinds:
            raise InputError(
                f"objective.parts={', '.join(parts)} disagree: in some of them repeated frames merge, in others "
                "they do not; sum ctc and prefix_ctc, or transducer and prefix_transducer"
            )
        self.parts = {name: part for name, part in parts.items() if weights[name]}
        self.weights = dict(weights)

    @property
    def several_counts(self) -> bool:
        """Whether the value is a sum of means over different labels."""
        return len(self.parts) > 1 or any(getattr(part, "several_counts", False) for part in self.parts.values())

    @property
    def supervises(self) -> str:
        """What the strictest part supervises: hidden states need an EAGLE drafter, alignments train the blank."""
        kinds = {getattr(part, "supervises", "tokens") for part in self.parts.values()}
        return next(kind for kind in SUPERVISED if kind in kinds)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        if isinstance(emissions, Emissions):
            emissions = replace(emissions, kept_scores=[])  # computed once for all parts
        losses = {name: part(emissions, batch) for name, part in self.parts.items()}
        value = torch.stack([self.weights[name] * loss.value for name, loss in losses.items()]).sum()
        metrics = {f"{name}/{key}": number for name, loss in losses.items() for key, number in loss.metrics.items()}
        # The first part's, which weighs the batches of a step where no other part counts (`several_counts`).
        return Loss(value, {"loss": value.detach(), **metrics}, next(iter(losses.values())).count)


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


def masked_mean(values_X: Tensor, real_X: Tensor) -> Tensor:
    """Return the mean of the real values; 0 where there is none."""
    return counted_mean(values_X, real_X, real_X)[0]


def counted_mean(values_X: Tensor, real_X: Tensor, weights_X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of the real values, and the sum of the weights; see `mean_over_processes`."""
    count = mean_over_processes(weights_X.sum()).to(values_X.dtype)
    # `where` before the product: inf or nan of a value that is left out, times 0, would be nan.
    return (values_X.where(real_X, 0) * weights_X).sum() / count.clamp(min=1e-30), count


def share_left_out(kept_X: Tensor, real_X: Tensor) -> Tensor:
    return 1 - mean_over_processes(kept_X.sum()) / mean_over_processes(real_X.sum()).clamp(min=1e-30)


def step_metrics(losses: Sequence[Loss], processes: Distributed) -> dict[str, float]:
    """Return the metrics of a step: means over its batches, weighted by their counts, and over processes."""
    counts = [torch.ones_like(loss.value.detach()) if loss.count is None else loss.count for loss in losses]
    counts_M, names = torch.stack(counts).double(), losses[0].metrics
    metrics_KM = torch.stack([torch.stack([loss.metrics[name].double() for loss in losses]) for name in names])
    means_K = processes.sum(metrics_KM @ (counts_M / counts_M.sum().clamp(min=1e-30))) / processes.world_size
    return dict(zip(names, means_K.tolist(), strict=True))


def label_mask(batch: Batch) -> Tensor:
    """Return True_BAS where a window has a label."""
    return torch.arange(batch.labels_BAS.shape[-1], device=batch.lengths_BA.device) < batch.lengths_BA[..., None]
