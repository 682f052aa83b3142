"""Distillation: frame k says what the base would say of word k. It knows two laws and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.nn.heads import Emissions
from ctcdraft.nn.packing import gather_following
from ctcdraft.objectives.base import Loss, check_decay, check_frames, check_labels, decayed_masked_mean, label_mask

# (the base's log-probabilities_XSV, the frames' log-probabilities_XSV) -> how far apart they are_XS
Distance = Callable[[Tensor, Tensor], Tensor]


class Distill:
    """The distance of frame k's law from the base's own at label k, weighted by decay^(k-1).

    The base's law is its head on its state before the label, with the true text up to there; the states are
    those of the batch, so nothing is read twice. Like cross-entropy it speaks of words alone.
    """

    supervises = "words"

    def __init__(self, labels: int, decay: float, distance: Distance) -> None:
        self.labels = check_labels(labels)
        self.decay = check_decay(decay)
        self.distance = distance

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)

        width = emissions.head.words.weight.shape[1]  # the base's, whoever speaks; the last tap comes first

        def apart(log_probs_XSV: Tensor, labels_XS: Tensor, states_XSD: Tensor) -> Tensor:
            base_XSV = emissions.head.token_logits(states_XSD[..., :width]).float()
            # Rows that one head has and the other has not are padding; both laws are those of the words they share, and
            # those of a head of some words are both over these.
            common = min(base_XSV.shape[-1], log_probs_XSV.shape[-1])
            if log_probs_XSV.shape[-1] > common:
                log_probs_XSV = log_probs_XSV[..., :common].log_softmax(dim=-1)
            return self.distance(base_XSV[..., :common].log_softmax(dim=-1), log_probs_XSV)

        distance_BAS = emissions.map_label_frames(apart, batch.labels_BAS, base_states_at_labels(batch))
        value = decayed_masked_mean(distance_BAS, label_mask(batch), self.decay)
        return Loss(value, {"loss": value.detach()})


def base_states_at_labels(batch: Batch) -> Tensor:
    """States_BASD from which the base itself says the labels, all taps; for free slots any state. Without
    a gradient: what is to be imitated does not learn from it, even where the base is adapted.

    anchor a, root at a + 1, labels at a + 2, a + 3, ...   ->   states a + 1, a + 2, ...
    """
    steps = batch.labels_BAS.shape[-1] + 1
    return gather_following(batch.states_BLD.detach(), batch.anchors_BA, batch.position_ids_BL, steps)[:, :, 1:]


def kl(base_XSV: Tensor, frames_XSV: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the frames' law from the base's: 1/2 1/2 from 1/4 3/4 is log 2 / sqrt 3."""
    terms_XSV = base_XSV.exp() * (base_XSV - frames_XSV)
    return terms_XSV.where(~base_XSV.isneginf(), 0).sum(dim=-1)  # what cannot be said is not missed


def total_variation(base_XSV: Tensor, frames_XSV: Tensor) -> Tensor:
    """Half the sum of differences: 1 minus the share of drawn words that rejection sampling would accept."""
    return (base_XSV.exp() - frames_XSV.exp()).abs().sum(dim=-1) / 2
