"""Distillation: the distribution of frame k imitates the base's own distribution at label k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.heads import Emissions, TokenEmissions
from ctcdraft.nn.masks import gather_following
from ctcdraft.objectives.base import DecayedObjective, Loss, check_frames, label_mask, share_left_out

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

    def __init__(self, labels: int, decay: float, distance: Distance) -> None:
        super().__init__(labels, decay)
        self.distance = distance

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        own = emissions.own.modules() if isinstance(emissions, TokenEmissions) else ()
        frames_restrict = any(isinstance(part, DraftVocabHead) for part in own)
        width = emissions.head.words.weight.shape[1]  # of the base; of several layers the last one comes first

        def label_distance(log_probs_XSV: Tensor, labels_XS: Tensor, states_XSD: Tensor) -> Tensor:
            base_XSV = emissions.head.token_logits(states_XSD[..., :width]).float()
            # A draft model may pad its lm_head to another size; both are normalised over the rows they share.
            common = min(base_XSV.shape[-1], log_probs_XSV.shape[-1])
            if log_probs_XSV.shape[-1] > common:
                log_probs_XSV = log_probs_XSV[..., :common].log_softmax(dim=-1)
            base_XSV = base_XSV[..., :common]
            if not frames_restrict:
                return self.distance(base_XSV.log_softmax(dim=-1), log_probs_XSV)
            absent_XSV = log_probs_XSV.isneginf()
            left_out_XS = absent_XSV.gather(-1, base_XSV.argmax(dim=-1, keepdim=True))[..., 0]
            restricted_XSV = base_XSV.masked_fill(absent_XSV, -torch.inf).log_softmax(dim=-1)
            return self.distance(restricted_XSV, log_probs_XSV).masked_fill(left_out_XS, torch.inf)

        distance_BAS = emissions.map_label_frames(label_distance, batch.labels_BAS, base_states_at_labels(batch))
        real_BAS = label_mask(batch)
        kept_BAS = real_BAS & ~distance_BAS.isposinf()  # nan is kept and shows in the loss
        value, count = self.mean(distance_BAS, kept_BAS)
        metrics = {"infeasible_share": share_left_out(kept_BAS, real_BAS)} if frames_restrict else {}
        return Loss(value, {"loss": value.detach(), **metrics}, count)


def base_states_at_labels(batch: Batch) -> Tensor:
    """Return hidden states_BASD from which the base predicts the labels, of all layers; arbitrary ones in free slots.

    anchor a, root at a + 1, labels at a + 2, a + 3, ...   ->   states a + 1, a + 2, ...
    """
    # Without gradient: the teacher must not change, even where an adapter trains the base.
    return before_labels(batch.states_BLD.detach(), batch)


def before_labels(x_BLD: Tensor, batch: Batch) -> Tensor:
    """Return the entries_BASD at the positions before the labels."""
    steps = batch.labels_BAS.shape[-1] + 1
    return gather_following(x_BLD, batch.anchors_BA, batch.position_ids_BL, steps)[:, :, 1:]


def kl(base_XSV: Tensor, frames_XSV: Tensor) -> Tensor:
    """Return KL(base || frames).   1/2 1/2 and 1/4 3/4:   log(2 / sqrt 3)"""
    terms_XSV = base_XSV.exp() * (base_XSV - frames_XSV)
    return terms_XSV.where(~base_XSV.isneginf(), 0).sum(dim=-1)  # tokens of probability zero contribute nothing


def total_variation(base_XSV: Tensor, frames_XSV: Tensor) -> Tensor:
    """Return half the L1 distance, which is 1 - the acceptance rate of rejection sampling."""
    return (base_XSV.exp() - frames_XSV.exp()).abs().sum(dim=-1) / 2
