"""Chains of guesses that are *drawn*, with the law of every word. What is drawn can be rejected exactly.

The dynamic tree names the likeliest texts; here chance names them, and what it draws from goes along in the tree, so
that `decoding.rejection` gives the base's own law at any temperature and accepts more than `match` would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.drafters.trees.draft_sampling import DraftSampling
from ctcdraft.drafters.trees.dynamic import StepFunction
from ctcdraft.errors import check_int


class ChainSampler(Protocol):
    """K texts being said: the joint law of the next word and of saying nothing, and one word more on each."""

    def next_distribution(self) -> tuple[Tensor, Tensor]: ...

    def extend(self, tokens_K: Tensor) -> Self: ...


class StepwiseChainSampler:
    """Laws that are asked level by level, as `grow` asks them, for a fixed number of chains. They never stop."""

    def __init__(self, step_function: StepFunction, root: Tensor, chains: int) -> None:
        self.step_function = step_function
        self.chains = chains
        self.tokens_K = root.reshape(1)
        self.rows_K = torch.zeros_like(self.tokens_K)

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        # Normalised again in float64: what is drawn from must be what is handed on.
        probs_KV = self.step_function(self.tokens_K, self.rows_K).double().softmax(dim=-1).expand(self.chains, -1)
        return probs_KV, probs_KV.new_zeros(self.chains)

    def extend(self, tokens_K: Tensor) -> Self:
        one_row = len(self.tokens_K) == 1  # the root's, or the only chain's
        self.rows_K = torch.zeros_like(tokens_K) if one_row else torch.arange(self.chains, device=tokens_K.device)
        self.tokens_K = tokens_K
        return self


class SampledChains:
    """A growth: chains drawn from a drafter's own laws. With a small model it is speculative sampling (Leviathan et
    al. 2023; Chen et al. 2023), with several chains SpecInfer's way of drawing (Miao et al. 2024)."""

    samples_drafts = True

    def __init__(self, chains: int) -> None:
        self.chains = checked_chains(chains, "drafter.growth")

    def __call__(
        self,
        step_function: StepFunction,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: DraftSampling,
    ) -> TokenTree:
        chains, depth = chains_and_depth(self.chains, depth, nodes)
        return sample_tree(root, StepwiseChainSampler(step_function, root, chains), chains, depth, stops, sampling)


def checked_chains(chains: int, where: str) -> int:
    return check_int(chains, f"{where}.chains")


def chains_and_depth(chains: int, depth: int, nodes: int) -> tuple[int, int]:
    """How many chains and how deep, so that they fit even where no two begin alike.   3 chains, 12 nodes  ->  3, 3"""
    chains = max(min(chains, nodes - 1), 1)
    return chains, min(depth, (nodes - 1) // chains)


def sample_tree(
    root: Tensor, sampler: ChainSampler, chains: int, depth: int, stops: Sequence[int], sampling: DraftSampling
) -> TokenTree:
    """`chains` chains of up to `depth` words, each word drawn from the law behind those before it; then merged.

    A chain ends where nothing is drawn, and below a stop word nothing is asked. How much is drawn must not depend on
    what is drawn in any other way: a chain that were cut because another is long would not follow its law.
    """
    if depth < 1:
        return TokenTree.only_root(root)
    ends = torch.tensor(stops, dtype=torch.int64, device=root.device)
    alive_K = torch.ones(chains, dtype=torch.bool, device=root.device)
    tokens, probs, active = [], [], []
    for level in range(depth):
        probs_KV, stop_K = sampler.next_distribution()
        probs_KV = sampling.warp_probs(probs_KV)
        sampled_K = sample_by_exponential_race(torch.cat([probs_KV, stop_K[:, None]], dim=1), sampling.rng)
        has_token_K = alive_K & (sampled_K < probs_KV.shape[1])
        tokens.append(torch.where(has_token_K, sampled_K, NO_TOKEN))
        probs.append(probs_KV)
        active.append(alive_K)
        alive_K = has_token_K & ~torch.isin(sampled_K, ends)
        if level + 1 < depth:
            sampler = sampler.extend(tokens[-1].clamp(min=0))
    return merge_chains(root, torch.stack(tokens, 1), torch.stack(probs, 1), torch.stack(active, 1))


def sample_by_exponential_race(probs_KX: Tensor, rng: torch.Generator) -> Tensor:
    """One draw a row: the first of exponential clocks that run at the rate of the probabilities. float64: in float32
    what is drawn would not have the law that is handed on."""
    clocks_KX = torch.empty_like(probs_KX).exponential_(generator=rng)
    return (probs_KX / clocks_KX).argmax(dim=1)


def merge_chains(root: Tensor, tokens_KD: Tensor, probs_KDV: Tensor, active_KD: Tensor) -> TokenTree:
    """Chains that begin alike share nodes; which chain drew what, and from which law, stays on record.

        chains  a b   ->   root - a - b      draws after the root: a a c, in the order of the chains
                a stop          \\- c         after a: b STOP

    tokens_KD: STOP where nothing was drawn, anything where asked_KD is not.
    """
    chains, depth = tokens_KD.shape
    has_token_KD = active_KD & (tokens_KD >= 0)
    tree = TokenTree.from_paths(root, tokens_KD, has_token_KD.sum(1), limit=chains * depth + 1)
    size = len(tree)
    probs_NV = probs_KDV.new_zeros(size, probs_KDV.shape[-1])
    draws_NK = torch.full((size, chains), -1, dtype=torch.int64, device=root.device)
    rows_K = torch.arange(chains, device=root.device)
    node_K = torch.zeros_like(rows_K)
    for level in range(depth):
        here_KN = (tree.parents_N == node_K[:, None]) & (tree.tokens_N == tokens_KD[:, level, None])
        child_K = torch.where(has_token_KD[:, level], here_KN.int().argmax(1), NO_TOKEN)
        asked_K = active_KD[:, level]
        probs_NV[node_K[asked_K]] = probs_KDV[asked_K, level]
        draws_NK[node_K[asked_K], rows_K[asked_K]] = child_K[asked_K]
        node_K = torch.where(has_token_KD[:, level], child_K, node_K)
    return TokenTree(tree.tokens_N, tree.parents_N, tree.height, probs_NV, draws_NK)
