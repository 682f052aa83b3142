"""Chains of sampled draft tokens, each with the distribution it was sampled from, for exact rejection sampling.

A dynamic tree holds the most probable texts. Here the draft tokens are random, and the distributions go along in the
tree: `Rejection` then returns samples of the base's distribution at any temperature and accepts more draft tokens than
`match`, which must reject whatever differs from its own sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY, Topology
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.drafters.trees.request import Conditioned, ConditionedFrames, StepFunction, TreeRequest
from ctcdraft.errors import check_int


class ChainSampler(Protocol):
    """Distributions of K chains: next_distribution is the joint one of the next token_KV and of the end_K of the
    draft; `extend` appends one token to each chain."""

    def next_distribution(self) -> tuple[Tensor, Tensor]: ...

    def extend(self, tokens_K: Tensor) -> Self: ...


class SampledChains:
    """Chains sampled from a drafter's own distributions, step by step; equal prefixes are merged.

    With a draft model this is speculative sampling (Leviathan et al. 2023; Chen et al. 2023), with several chains the
    sampling of SpecInfer (Miao et al. 2024). The chains share the nodes evenly.
    """

    samples_drafts = True

    def __init__(self, chains: int) -> None:
        self.chains = check_int(chains, "drafter.tree.chains")

    def __call__(self, step_function: StepFunction, request: TreeRequest) -> TokenTree:
        root_1 = request.root.reshape(1)
        first_row_1 = torch.zeros_like(root_1)
        return sample_tree(lambda chains: StepSampler(step_function, chains, root_1, first_row_1), self.chains, request)


class SampledLabels:
    """Chains of labels sampled from the exact CTC distribution, in which the end of the text is one outcome."""

    interprets_as = "alignments"
    samples_drafts = True
    topology: Topology = CTC_TOPOLOGY

    def __init__(self, chains: int) -> None:
        self.chains = check_int(chains, "drafter.tree.chains")

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree:
        def sampler(chains: int) -> ChainSampler:
            probs_TC = log_probs_TC.double().exp() if conditioned is None else conditioned.probs()[0]
            labels = PrefixBatch.empty(probs_TC, probs_TC.shape[-1] - 1, chains, self.topology)
            return labels if conditioned is None else ConditionedSampler(labels, conditioned)

        return sample_tree(sampler, self.chains, request.limit_depth(len(log_probs_TC)))


class SampledTransductions(SampledLabels):
    """Chains sampled from the exact next-token distribution of a transducer, summed over all alignments."""

    interprets_as = "transductions"
    topology = TRANSDUCER_TOPOLOGY


class SampledTokens(PerFrameTree):
    """Chains of one token per frame, for heads whose frame k is draft token k."""

    samples_drafts = True
    fixed_shapes = False

    def __init__(self, chains: int) -> None:
        self.step_tree = SampledChains(chains)


@dataclass(frozen=True)
class StepSampler:
    """A step function with a fixed number of chains; the probability that the draft ends is 0."""

    step_function: StepFunction
    chains: int
    tokens_K: Tensor  # the root, then one token per chain
    rows_K: Tensor

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        # Normalised again in float64: rejection sampling needs the very distribution that was sampled from.
        probs_KV = self.step_function(self.tokens_K, self.rows_K).double().softmax(dim=-1).expand(self.chains, -1)
        return probs_KV, probs_KV.new_zeros(self.chains)

    def extend(self, tokens_K: Tensor) -> Self:
        one_row = len(self.tokens_K) == 1  # the root, or the only chain
        rows_K = torch.zeros_like(tokens_K) if one_row else torch.arange(self.chains, device=tokens_K.device)
        return replace(self, tokens_K=tokens_K, rows_K=rows_K)


@dataclass(frozen=True)
class ConditionedSampler:
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
        return type(self)(self.labels.extend(tokens_K, conditioned.probs()), conditioned)


def chains_and_depth(chains: int, depth: int, nodes: int) -> tuple[int, int]:
    """Return how many chains of which depth fit even if no two share a prefix.   3 chains, 12 nodes  ->  3, 3"""
    chains = max(min(chains, nodes - 1), 1)
    return chains, min(depth, (nodes - 1) // chains)


def sample_tree(make_sampler: Callable[[int], ChainSampler], chains: int, request: TreeRequest) -> TokenTree:
    """Sample up to `chains` chains, each token from the distribution behind its prefix, and merge equal prefixes.

    A chain ends where the end of the draft is sampled and below a stop token. make_sampler takes the number of chains,
    which may be less than `chains` where nodes are few.
    """
    # Of a fixed depth: a chain that is cut because another one is long would not follow the distribution.
    chains, depth = chains_and_depth(chains, request.depth, request.nodes)
    if depth < 1:
        return TokenTree.only_root(request.root)
    assert request.sampling is not None, "sampled trees need the random numbers of the draft"
    stop_ids, sampler = request.stop_ids_S(), make_sampler(chains)
    alive_K = torch.ones(chains, dtype=torch.bool, device=request.root.device)
    tokens, probs, active = [], [], []
    for level in range(depth):
        probs_KV, end_K = sampler.next_distribution()
        probs_KV = request.sampling.warp_probs(probs_KV)
        sampled_K = sample_by_exponential_race(torch.cat([probs_KV, end_K[:, None]], dim=1), request.sampling.rng)
        has_token_K = alive_K & (sampled_K < probs_KV.shape[1])  # the last column is the end of the draft
        tokens.append(torch.where(has_token_K, sampled_K, NO_TOKEN))
        probs.append(probs_KV)
        active.append(alive_K)
        alive_K = has_token_K & ~torch.isin(sampled_K, stop_ids)
        if level + 1 < depth:
            sampler = sampler.extend(tokens[-1].clamp(min=0))  # ended chains go on with token 0 and are ignored
    return merge_chains(request.root, torch.stack(tokens, 1), torch.stack(probs, 1), torch.stack(active, 1))


def sample_by_exponential_race(probs_KX: Tensor, rng: torch.Generator) -> Tensor:
    """Return one sample per row: the first of exponential clocks whose rates are the probabilities.

    probs_KX are float64: rounding to float32 would sample from another distribution than the one in the tree.
    """
    clocks_KX = torch.empty_like(probs_KX).exponential_(generator=rng)
    return (probs_KX / clocks_KX).argmax(dim=1)


def merge_chains(root: Tensor, tokens_KD: Tensor, probs_KDV: Tensor, active_KD: Tensor) -> TokenTree:
    """Return the tree of K chains with equal prefixes merged, and per node the samples and their distribution.

        chains  a b   ->   root - a - b      samples after the root: a a c, in the order of the chains
                a end           \\- c         after a: b, end
                c ...

    Args:
        tokens_KD: NO_TOKEN where the end was sampled, anything where the chain was not active.
        active_KD: whether the chain still sampled at this level.
    """
    chains, depth = tokens_KD.shape
    has_token_KD = active_KD & (tokens_KD >= 0)
    tree = TokenTree.from_paths(root, tokens_KD, has_token_KD.sum(1), limit=chains * depth + 1)
    probs_NV = probs_KDV.new_zeros(len(tree), probs_KDV.shape[-1])
    sampled_nodes_NK = torch.full((len(tree), chains), -1, dtype=torch.int64, device=root.device)
    rows_K = torch.arange(chains, device=root.device)
    node_K = torch.zeros_like(rows_K)
    for level in range(depth):
        is_child_KN = (tree.parents_N == node_K[:, None]) & (tree.tokens_N == tokens_KD[:, level, None])
        child_K = torch.where(has_token_KD[:, level], is_child_KN.int().argmax(1), NO_TOKEN)
        active_K = active_KD[:, level]
        # Chains at the same node write the same row: their prefixes, hence their distributions, are equal.
        probs_NV[node_K[active_K]] = probs_KDV[active_K, level]
        sampled_nodes_NK[node_K[active_K], rows_K[active_K]] = child_K[active_K]
        node_K = torch.where(has_token_KD[:, level], child_K, node_K)
    return TokenTree(tree.tokens_N, tree.parents_N, tree.height, probs_NV, sampled_nodes_NK)
