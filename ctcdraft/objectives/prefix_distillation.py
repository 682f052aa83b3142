"""Distillation of the exact next-label distribution: summed over alignments, it imitates the base's own.

Cross-entropy and CTC raise the probability of the one text that was generated. Rejection sampling accepts a draft token
with probability sum_v min(p_v, q_v) = 1 - TV(p, q), where p is the base's distribution and q that of the label after a
prefix, joint with stopping (`ctc/next_label.py`); so does a tree of samples. This objective trains that q.

q costs the scores of the tokens that are compared, at every frame after every prefix, and these are few: the W most
probable tokens of the base. All others and stopping are one further class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.errors import check_int
from ctcdraft.nn.chunks import CHUNK_BYTES
from ctcdraft.nn.heads import Emissions
from ctcdraft.nn.linear_logsumexp import autocast_disabled
from ctcdraft.nn.next_token import next_token_log_probs
from ctcdraft.objectives.base import DecayedObjective, Loss, check_frames, label_mask
from ctcdraft.objectives.ctc import ctc_window_likelihoods
from ctcdraft.objectives.distillation import Distance
from ctcdraft.objectives.teacher import base_states, distinct, label_positions

SMALLEST = -30.0  # of log-probabilities: -inf, of a token that no frame is left for, would make KL infinite


class PrefixDistill(DecayedObjective):
    """Distance of q(label k + 1 | the text begins with the first k labels) from the base's distribution, for all k.

    The weights are decay^k. Prefixes that the frames cannot emit are left out of the mean.

    Args:
        tokens: W, the most probable tokens of the base that are compared one by one.
    """

    supervises = "alignments"

    def __init__(self, labels: int, decay: float, tokens: int, distance: Distance) -> None:
        super().__init__(labels, decay)
        self.tokens = check_int(tokens, "objective.tokens")
        self.distance = distance

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        tokens_BASW, base_BASW = base_top_tokens(emissions.head, batch, self.tokens)
        scores = emissions.scores(batch.labels_BAS)
        likelihoods = ctc_window_likelihoods(scores, batch)
        before_BAS = batch.labels_BAS.roll(1, -1).index_fill(-1, tokens_BASW.new_zeros(1), -1)
        joint_BASW = likelihoods.next_token(
            next_token_log_probs(emissions, scores, tokens_BASW), tokens_BASW == before_BAS[..., None]
        )
        prefix_BAS = torch.cat([torch.zeros_like(joint_BASW[..., :1, 0]), likelihoods.prefix_XS[..., :-1]], dim=-1)
        feasible_BAS = label_mask(batch) & ~prefix_BAS.isneginf()
        frames_BASW = (joint_BASW - prefix_BAS.where(feasible_BAS, 0)[..., None]).clamp(min=SMALLEST)
        distance_BAS = self.distance(with_rest(base_BASW), with_rest(frames_BASW))
        value, count = self.mean(distance_BAS, feasible_BAS)
        return Loss(value, {"loss": value.detach()}, count)


def with_rest(log_probs_XW: Tensor) -> Tensor:
    """Return log-probabilities of W tokens, and of everything else as one more.   1/2 1/4  ->  1/2 1/4 1/4"""
    rest_X1 = 1 - log_probs_XW.exp().sum(dim=-1, keepdim=True)
    return torch.cat([log_probs_XW, rest_X1.clamp(min=torch.finfo(rest_X1.dtype).eps).log()], dim=-1)


@torch.no_grad()
def base_top_tokens(head: Any, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Return the base's most probable tokens_BASW at every label, and their log-probabilities."""
    states_ND = base_states(head, batch)
    rows_Y, row_BAS = distinct(label_positions(batch), len(states_ND))
    count = min(count, head.blank)
    chunks = states_ND[rows_Y].split(max(1, CHUNK_BYTES // (4 * 2 * head.blank)))
    lm_head = getattr(head.words, "all", head.words)  # of a draft vocabulary: the base's own has all tokens
    with autocast_disabled(states_ND.device):  # as the base computes it in decoding
        tops = [
            lm_head(chunk_YD.to(lm_head.weight.dtype)).float().log_softmax(dim=-1).topk(count, dim=-1)
            for chunk_YD in chunks
        ]
    values_YW, indices_YW = (torch.cat(parts) for parts in zip(*tops, strict=True))
    return indices_YW[row_BAS], values_YW[row_BAS]
