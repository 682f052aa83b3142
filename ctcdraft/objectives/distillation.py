"""Distillation: the distribution of frame k imitates the base's own distribution at label k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.errors import InputError, check_float
from ctcdraft.nn.frame_values import frame_values
from ctcdraft.nn.heads import Emissions, gather_label_log_probs
from ctcdraft.objectives.base import DecayedObjective, Loss, check_frames, label_mask, share_left_out
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.teacher import Teacher, base_states, distinct, label_positions, tokens_absent_from_frames

# (log-probabilities_XSV of the base, log-probabilities_XSV of the frames) -> distances_XS
Distance = Callable[[Tensor, Tensor], Tensor]


class Distill(DecayedObjective):
    """Distance of frame k's distribution from the base's at label k, weighted by decay^(k-1).

    The base's distribution is its lm_head on its hidden state before the label, given the true text up to there. The
    hidden states are in the batch, so there is no further forward pass. As in cross-entropy there is no blank.

    A draft vocabulary that the frames alone have restricts the base's distribution too, and labels for which its most
    probable token is outside are left out, as in EAGLE-3.
    """

    supervises = "tokens"

    def __init__(self, labels: int, decay: float, distance: Distance, least: float = 0.0) -> None:
        super().__init__(labels, decay, least)
        self.distance = distance

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        return self.distance_loss(self.values(emissions, batch), emissions, batch)

    def values(self, emissions: Emissions, batch: Batch) -> Tensor:
        """Return `frame_terms` of all windows."""
        check_frames(emissions, self.labels)
        states_ND, absent_V = base_states(emissions.head, batch), tokens_absent_from_frames(emissions)

        def measure(logits_XSV: Tensor, labels_XS: Tensor, position_XS: Tensor) -> Tensor:
            positions_Y, row_XS = distinct(position_XS, len(states_ND))
            base_YV = emissions.head.token_logits(states_ND[positions_Y]).float()
            # A draft model may pad its lm_head to another size; both are normalised over the rows they share.
            teacher = Teacher.of(base_YV[..., : logits_XSV.shape[-1]], absent_V)
            return frame_values(partial(self.frame_terms, teacher), logits_XSV, labels_XS, row_XS)

        return emissions.map_label_frames(measure, batch.labels_BAS, label_positions(batch))

    def frame_terms(self, teacher: Teacher, log_probs_XSV: Tensor, labels_XS: Tensor, row_XS: Tensor) -> Tensor:
        """Return the distances_XS of frames from the teacher's rows; infinite where the label is left out."""
        base_XSV = teacher.log_probs_YV[row_XS]
        if log_probs_XSV.shape[-1] > base_XSV.shape[-1]:
            log_probs_XSV = log_probs_XSV[..., : base_XSV.shape[-1]].log_softmax(dim=-1)
        distance_XS = self.distance(base_XSV, log_probs_XSV)
        if teacher.left_out_Y is None:
            return distance_XS
        return distance_XS.masked_fill(teacher.left_out_Y[row_XS], torch.inf)

    def distance_loss(self, distance_BAS: Tensor, emissions: Emissions, batch: Batch) -> Loss:
        real_BAS = label_mask(batch)
        kept_BAS = real_BAS & ~distance_BAS.isposinf()  # nan is kept and shows in the loss
        value, count = self.mean(distance_BAS, kept_BAS)
        restricted = tokens_absent_from_frames(emissions) is not None
        metrics = {"infeasible_share": share_left_out(kept_BAS, real_BAS)} if restricted else {}
        return Loss(value, {"loss": value.detach(), **metrics}, count)


class DistillWithLabels(Distill):
    """weights["cross_entropy"] * CrossEntropy + weights["distill"] * Distill, from the same logits."""

    several_counts = True  # a draft vocabulary may leave other labels out of one than of the other

    def __init__(
        self, labels: int, decay: float, distance: Distance, weights: Mapping[str, float], least: float = 0.0
    ) -> None:
        super().__init__(labels, decay, distance, least)
        self.cross_entropy = CrossEntropy(labels, decay, least)
        if set(weights) != {"cross_entropy", "distill"}:
            raise InputError(f"objective.weights must be those of cross_entropy and distill, got {dict(weights)}")
        for name, weight in weights.items():
            check_float(weight, f"objective.weights.{name}", above=0)
        self.weights = dict(weights)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        distance_BAS, log_probs_BAS = self.values(emissions, batch).unbind(-1)
        losses = {
            "cross_entropy": self.cross_entropy.of_log_probs(log_probs_BAS, batch),
            "distill": self.distance_loss(distance_BAS, emissions, batch),
        }
        value = torch.stack([self.weights[name] * loss.value for name, loss in losses.items()]).sum()
        metrics = {f"{name}/{key}": number for name, loss in losses.items() for key, number in loss.metrics.items()}
        return Loss(value, {"loss": value.detach(), **metrics}, losses["cross_entropy"].count)

    def frame_terms(self, teacher: Teacher, log_probs_XSV: Tensor, labels_XS: Tensor, row_XS: Tensor) -> Tensor:
        """Return the distances and the labels' own log-probabilities, [X, S, 2]."""
        distance_XS = super().frame_terms(teacher, log_probs_XSV, labels_XS, row_XS)
        return torch.stack([distance_XS, gather_label_log_probs(log_probs_XSV, labels_XS)], dim=-1)


def kl(base_XSV: Tensor, frames_XSV: Tensor) -> Tensor:
    """Return KL(base || frames).   1/2 1/2 and 1/4 3/4:   log(2 / sqrt 3)"""
    terms_XSV = base_XSV.exp() * (base_XSV - frames_XSV)
    return terms_XSV.where(~base_XSV.isneginf(), 0).sum(dim=-1)  # tokens of probability zero contribute nothing


def total_variation(base_XSV: Tensor, frames_XSV: Tensor) -> Tensor:
    """Return half the L1 distance, which is 1 - the acceptance rate of rejection sampling."""
    return (base_XSV.exp() - frames_XSV.exp()).abs().sum(dim=-1) / 2
