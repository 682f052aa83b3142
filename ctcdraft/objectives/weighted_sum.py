"""A weighted sum of objectives."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ctcdraft.batch import Batch
from ctcdraft.errors import InputError, check_float
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Loss, Objective, check_labels


class WeightedSum:
    """The sum of weight * value over named objectives, which share their windows and hence `labels`.

    Args:
        parts: objectives by name.
        weights: one number >= 0 per part; a part of weight 0 is not computed.
    """

    def __init__(self, labels: int, parts: Mapping[str, Objective], weights: Mapping[str, float]) -> None:
        self.labels = check_labels(labels)
        for name, weight in weights.items():
            check_float(weight, f"objective.weights.{name}")
        if set(parts) != set(weights) or not any(weights.values()) or min(weights.values(), default=0) < 0:
            raise InputError(
                f"objective.weights must be >= 0 for each of {', '.join(parts)} and > 0 for one, got {dict(weights)}"
            )
        other = [f"{name} has {part.labels}" for name, part in parts.items() if part.labels != labels]
        if other:
            raise InputError(f"objective.labels={labels}, but {', '.join(other)}; set them equal in all parts of a sum")
        if {"alignments", "transductions"} <= {getattr(part, "supervises", "words") for part in parts.values()}:
            raise InputError(
                f"objective.parts={', '.join(parts)} disagree: in some of them repeated frames merge, in others "
                "they do not; sum ctc and prefix_ctc, or transducer and prefix_transducer"
            )
        self.parts = {name: part for name, part in parts.items() if weights[name]}
        self.weights = dict(weights)

    @property
    def supervises(self) -> str:
        """What the strictest part supervises: hidden states need an EAGLE drafter, alignments train the blank."""
        kinds = {getattr(part, "supervises", "words") for part in self.parts.values()}
        return next(kind for kind in ("states", "transductions", "alignments", "words") if kind in kinds)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        losses = {name: part(emissions, batch) for name, part in self.parts.items()}
        value = torch.stack([self.weights[name] * loss.value for name, loss in losses.items()]).sum()
        metrics = {f"{name}/{key}": number for name, loss in losses.items() for key, number in loss.metrics.items()}
        return Loss(value, {"loss": value.detach(), **metrics})
