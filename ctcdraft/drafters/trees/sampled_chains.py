"""Chains of sampled draft tokens, each with the distribution it was sampled from, for exact rejection sampling.

A dynamic tree holds the most probable texts. Here the draft tokens are random, and the distributions go along in the
tree: `Rejection` then returns samples of the base's distribution at any temperature and accepts more draft tokens than
`match`, which must reject whatever differs from its own sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.drafters.trees.request import StepFunction, TreeRequest
from ctcdraft.errors import check_int


class ChainSampler(Protocol):
    """Distributions of K chains: next_distribution is the joint one of the next token_KV and of the end_K of the
    draft; `extend` appends one token to each chain."""

    def next_distribution(self) -> tuple[Tensor, Tensor]: ...

    def extend(self, tokens_K: Tensor) -> Self: ...


class StepwiseChainSampler:
    """A step function with a fixed number of chains; the probability that the draft ends is 0."""

    def __init__(self, step_function: StepFunction, root: Tensor, chains: int) -> None:
        self.step_function = step_function
        self.chains = chains
        self.tokens_K = root.reshape(1)
        self.rows_K = torch.zeros_like(self.tokens_K)

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        # Normalised again in float64: rejection sampling needs the very distribution that was sampled from.
        probs_KV = self.step_function(self.tokens_K, self.rows_K).double().softmax(dim=-1).expand(self.chains, -1)
        return probs_KV, probs_KV.new_zeros(self.chains)

    def extend(self, tokens_K: Tensor) -> Self:
        one_row = len(self.tokens_K) == 1  # the root, or the only chain
        self.rows_K = torch.zeros_like(tokens_K) if one_row else torch.arange(self.chains, device=tokens_K.device)
        self.tokens_K = tokens_K
        return self


class SampledChains:
    """Chains sampled from a drafter's own distributions, step by step.

    With a draft model this is speculative sampling (Leviathan et al. 2023; Chen et al. 2023), with several chains the
    sampling of SpecInfer (Miao et al. 2024).
    """

    samples_drafts = True

    def __init__(self, chains: int) -> None:
        self.chains = check_int(chains, "drafter.tree.chains")

    def __call__(self, step_function: StepFunction, request: TreeRequest) -> TokenTree:
        return sample_tree(
            lambda chains: StepwiseChainSampler(step_function, request.root, chains), self.chains, request
        )


def chains_and_depth(chains: int, depth: int, nodes: int) -> tuple[int, int]:
    """Return how many chains of which depth fit even if no two share a prefix.   3 chains, 12 nodes  ->  3, 3"""
    chains = max(min(chains, nodes - 1), 1)
    return chains, min(depth, (nodes - 1) // chains)


def sample_tree(make_sampler: Callable[[int], ChainSampler], chains: int, request: TreeRequest) -> TokenTree:
    """Sample up to `chains` chains, each token from the distribution behind its prefix, and merge equal prefixes.

    A chain ends where the end of the draft is sampled and below a stop token. Its length must not depend on other
    chains: a chain that is cut because another one is long would not follow the distribution.

    Args:
        make_sampler: the sampler of a number of chains, which may be less than `chains` where nodes are few.
    """
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
        has_token_K = alive_K & (sampled_K < probs_KV.shape[1])
        tokens.append(torch.where(has_token_K, sampled_K, NO_TOKEN))
        probs.append(probs_KV)
        active.append(alive_K)
        alive_K = has_token_K & ~torch.isin(sampled_K, stop_ids)
        if level + 1 < depth:
            sampler = sampler.extend(tokens[-1].clamp(min=0))
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
    size = len(tree)
    probs_NV = probs_KDV.new_zeros(size, probs_KDV.shape[-1])
    sampled_nodes_NK = torch.full((size, chains), -1, dtype=torch.int64, device=root.device)
    rows_K = torch.arange(chains, device=root.device)
    node_K = torch.zeros_like(rows_K)
    for level in range(depth):
        is_child_KN = (tree.parents_N == node_K[:, None]) & (tree.tokens_N == tokens_KD[:, level, None])
        child_K = torch.where(has_token_KD[:, level], is_child_KN.int().argmax(1), NO_TOKEN)
        active_K = active_KD[:, level]
        probs_NV[node_K[active_K]] = probs_KDV[active_K, level]
        sampled_nodes_NK[node_K[active_K], rows_K[active_K]] = child_K[active_K]
        node_K = torch.where(has_token_KD[:, level], child_K, node_K)
    return TokenTree(tree.tokens_N, tree.parents_N, tree.height, probs_NV, sampled_nodes_NK)
