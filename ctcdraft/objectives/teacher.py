"""The base's own distributions at the labels: its lm_head on the hidden states of the batch, given the true text.

Windows overlap, so a position is before a label of several of them; it is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.heads import Emissions, TokenEmissions
from ctcdraft.nn.masks import gather_following


@dataclass(frozen=True)
class Teacher:
    """Log-probabilities of the base at several positions.

    left_out_Y: where its most probable token is outside a draft vocabulary that the frames alone have; None without.
    """

    log_probs_YV: Tensor
    left_out_Y: Tensor | None

    @classmethod
    def of(cls, logits_YV: Tensor, absent_V: Tensor | None) -> Self:
        """Return the distributions over the tokens that are not absent."""
        if absent_V is None:
            return cls(logits_YV.log_softmax(dim=-1), None)
        absent_V = absent_V[: logits_YV.shape[-1]]
        restricted_YV = logits_YV.masked_fill(absent_V, -torch.inf).log_softmax(dim=-1)
        return cls(restricted_YV, absent_V[logits_YV.argmax(dim=-1)])


def tokens_absent_from_frames(emissions: Emissions) -> Tensor | None:
    """Return true_V for tokens outside a draft vocabulary that the frames alone have; None if they have none."""
    own = emissions.own.modules() if isinstance(emissions, TokenEmissions) else ()
    heads = [part for part in own if isinstance(part, DraftVocabHead)]  # those of several frames have the same tokens
    return heads[0].row_of_token_V < 0 if heads else None


def base_states(head: Any, batch: Batch) -> Tensor:
    """Return the hidden states_ND that the base's lm_head reads, of all positions N = B * L."""
    # Without gradient: the teacher must not change, even where an adapter trains the base.
    width = head.words.weight.shape[1]  # of several layers the last one comes first
    return batch.states_BLD.detach()[..., :width].flatten(0, 1)


def label_positions(batch: Batch) -> Tensor:
    """Return which of all positions N the base predicts the labels from, position_BAS; in free slots the first label's.

    anchor a, root at a + 1, labels at a + 2, a + 3, ...   ->   a + 1, a + 2, ...
    """
    rows, length = batch.position_ids_BL.shape
    position_BL1 = torch.arange(rows * length, device=batch.labels_BAS.device).view(rows, length, 1)
    position_BAS = before_labels(position_BL1, batch)[..., 0]
    return position_BAS.where(batch.labels_BAS >= 0, position_BAS[..., :1])


def before_labels(x_BLD: Tensor, batch: Batch) -> Tensor:
    """Return the entries_BASD at the positions before the labels; arbitrary ones in free slots."""
    steps = batch.labels_BAS.shape[-1] + 1
    return gather_following(x_BLD, batch.anchors_BA, batch.position_ids_BL, steps)[:, :, 1:]


def distinct(position_X: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the positions_Y to compute, and the row_X among them of each.   3 4 4 5  ->  3 4 5, 0 1 1 2

    total: how many there are at most.
    """
    if position_X.is_cpu:
        return position_X.unique(return_inverse=True)
    # How many are distinct is not known without waiting for the device: all positions or all labels, whichever is less.
    if total < position_X.numel():
        return torch.arange(total, device=position_X.device), position_X
    return position_X.flatten(), torch.arange(position_X.numel(), device=position_X.device).view_as(position_X)
