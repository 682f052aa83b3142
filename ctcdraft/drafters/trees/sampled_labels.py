"""Chains of draft tokens sampled from frames: CTC labels summed over alignments, or one token per frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.drafters.trees.sampled_chains import ChainSampler, SampledChains, sample_tree
from ctcdraft.errors import check_int


class SampledLabels:
    """Chains of labels sampled from the exact CTC distribution, in which the end of the text is one outcome.

    Args:
        chains: number of chains; they share the nodes evenly, and equal prefixes are merged.
    """

    interprets_as = "alignments"
    samples_drafts = True
    topology: Topology = CTC_TOPOLOGY

    def __init__(self, chains: int) -> None:
        self.chains = check_int(chains, "drafter.tree.chains")

    def __call__(
        self, log_probs_TC: Tensor, request: TreeRequest, conditioned: ConditionedFrames | None = None
    ) -> TokenTree:
        blank = log_probs_TC.shape[-1] - 1

        def sampler(chains: int) -> ChainSampler:
            if conditioned is None:
                return PrefixBatch.empty(log_probs_TC.double().exp(), blank, chains, self.topology)
            labels = PrefixBatch.empty(conditioned_probs(conditioned)[0], blank, chains, self.topology)
            return ConditionedChainSampler(labels, conditioned)

        return sample_tree(sampler, self.chains, request.limit_depth(len(log_probs_TC)))


class SampledTokens(PerFrameTree):
    """Chains of one token per frame, for heads whose frame k is draft token k."""

    samples_drafts = True

    def __init__(self, chains: int) -> None:
        self.step_tree = SampledChains(chains)
        self.exact = False


@dataclass(frozen=True)
class ConditionedChainSampler:
    """Label distributions from frames that are conditioned on the labels of their own chain."""

    labels: PrefixBatch
    conditioned: ConditionedFrames

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        return self.labels.next_distribution()

    def extend(self, tokens_K: Tensor) -> Self:
        rows_K = torch.arange(len(tokens_K), device=tokens_K.device)
        if len(self.conditioned.memory_KR) == 1:  # the empty prefix, from which all chains start
            rows_K = torch.zeros_like(rows_K)
        conditioned = self.conditioned.extend(tokens_K, rows_K)
        return type(self)(self.labels.extend(tokens_K, conditioned_probs(conditioned)), conditioned)


def conditioned_probs(conditioned: ConditionedFrames) -> Tensor:
    """Return the frames conditioned on K prefixes: probabilities_KTC with the blank as last class."""
    factor_KV, scale_KT = conditioned.factors()
    token_probs_KTV = conditioned.token_probs_TV * factor_KV[:, None] * scale_KT[..., None]
    blank_KT = conditioned.log_probs_TC[:, -1].exp() * scale_KT
    return torch.cat([token_probs_KTV, blank_KT[..., None]], dim=-1)
