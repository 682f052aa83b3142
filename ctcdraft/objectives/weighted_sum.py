"""A weighted sum of objectives. It knows their names and weights, not what they learn."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ctcdraft.batch import Batch
from ctcdraft.errors import InputError, check_float
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Loss, Objective, check_labels


class WeightedSum:
    """parts: objectives by name. weights: one number each, 0 to leave a part out without computing it.

    Every part sees the same windows and must want as many labels as the sum does.
    """

    def __init__(self, labels: int, parts: Mapping[str, Objective], weights: Mapping[str, float]) -> None:
        self.labels = check_labels(labels)
        for name, weight in weights.items():
            check_float(weight, f"objective.weights.{name}")
        if set(parts) != set(weights) or not any(weights.values()) or min(weights.values(), default=0) < 0:
            raise InputError(
                f"objective.weights={dict(weights)} must give each of {', '.join(parts)} a weight from 0, one above it"
            )
        other = [f"{name} wants {part.labels}" for name, part in parts.items() if part.labels != labels]
        if other:
            raise InputError(
                f"objective.labels={labels}, but {', '.join(other)}; the parts of a sum share their windows"
            )
        if {"alignments", "transductions"} <= {getattr(part, "supervises", "words") for part in parts.values()}:
            raise InputError(
                f"objective.parts={', '.join(parts)} disagree: in some of them repeated frames merge, in others every "
                "frame says a word of its own; sum ctc and prefix_ctc, or transducer and prefix_transducer"
            )
        self.parts = {name: part for name, part in parts.items() if weights[name]}
        self.weights = dict(weights)

    @property
    def supervises(self) -> str:
        """Blanks are learned as soon as one part aligns; states bind the drafter more than anything else."""
        taught = {getattr(part, "supervises", "words") for part in self.parts.values()}
        return next(kind for kind in ("states", "transductions", "alignments", "words") if kind in taught)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        losses = {name: part(emissions, batch) for name, part in self.parts.items()}
        value = torch.stack([self.weights[name] * loss.value for name, loss in losses.items()]).sum()
        metrics = {f"{name}/{key}": number for name, loss in losses.items() for key, number in loss.metrics.items()}
        return Loss(value, {"loss": value.detach(), **metrics})
