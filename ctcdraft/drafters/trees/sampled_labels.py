"""From frames to drawn chains: of labels, every alignment summed, or of the frames' own words. It knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.draft_sampling import DraftSampling
from ctcdraft.drafters.trees.per_frame import PerFrameStepFunction
from ctcdraft.drafters.trees.sampled_chains import StepwiseChainSampler, chains_and_depth, checked_chains, sample_tree


class SampledLabels:
    """Chains of labels from the exact CTC law: every alignment summed, and the end of the text a draw like others.

    chains: how many are drawn; each has its share of the nodes, and those that begin alike are merged.
    """

    interprets_as = "alignments"
    samples_drafts = True
    topology: Topology = CTC_TOPOLOGY

    def __init__(self, chains: int) -> None:
        self.chains = checked_chains(chains, "drafter.paths")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: DraftSampling,
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        chains, depth = chains_and_depth(self.chains, min(depth, len(log_probs_TC)), nodes)
        blank = log_probs_TC.shape[-1] - 1
        if listening is None:
            sampler = PrefixBatch.empty(log_probs_TC.double().exp(), blank, chains, self.topology)
            return sample_tree(root, sampler, chains, depth, stops, sampling)
        labels = PrefixBatch.empty(conditioned_probs(listening)[0], blank, chains, self.topology)
        return sample_tree(root, ConditionedChainSampler(labels, listening), chains, depth, stops, sampling)


@dataclass(frozen=True)
class ConditionedChainSampler:
    """Labels whose frames listen to them: a correction composed with the exact law."""

    labels: PrefixBatch
    conditioned: ConditionedFrames

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        return self.labels.next_distribution()

    def extend(self, tokens_K: Tensor) -> Self:
        rows_K = torch.arange(len(tokens_K), device=tokens_K.device)
        if len(self.conditioned.memory_KR) == 1:  # the empty text, which all chains begin from
            rows_K = torch.zeros_like(rows_K)
        conditioned = self.conditioned.extend(tokens_K, rows_K)
        return type(self)(self.labels.extend(tokens_K, conditioned_probs(conditioned)), conditioned)


def conditioned_probs(conditioned: ConditionedFrames) -> Tensor:
    """What K texts make of the frames: probabilities_KTC, the blank last."""
    factor_KV, scale_KT = conditioned.factors()
    token_probs_KTV = conditioned.token_probs_TV * factor_KV[:, None] * scale_KT[..., None]
    blank_KT = conditioned.log_probs_TC[:, -1].exp() * scale_KT
    return torch.cat([token_probs_KTV, blank_KT[..., None]], dim=-1)


class SampledTokens:
    """Chains of the frames' own words, one a frame, for heads that are read directly."""

    interprets_as = "words"
    samples_drafts = True

    def __init__(self, chains: int) -> None:
        self.chains = checked_chains(chains, "drafter.paths")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: DraftSampling,
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        chains, depth = chains_and_depth(self.chains, min(depth, len(log_probs_TC)), nodes)
        sampler = StepwiseChainSampler(PerFrameStepFunction(log_probs_TC, listening), root, chains)
        return sample_tree(root, sampler, chains, depth, stops, sampling)
