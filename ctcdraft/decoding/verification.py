"""Verification of token trees: exact matching with sampled base tokens, and Medusa's typical acceptance (LOSSY)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.errors import InputError, check_float

# (tree, the base's log-probabilities_NV after each node, noise, position of the root). Without noise the distribution
# is one-hot: only the argmax of each row counts, and rows need not be normalised.
Verifier = Callable[[TokenTree, Tensor, GumbelNoise | None, int], VerifyResult]


def match(tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int) -> VerifyResult:
    """Sample the base's token at every node; descend while a child has that token; the first other is the bonus.

        root the          base after `the`: cat     cat is a child: accepted
        |- cat            base after `cat`: sat     no child is sat: bonus sat
        |   |- is
        |- dog            commits: cat sat

    Exact for any deterministic tree and any distribution, greedy or sampled, without draft probabilities: all
    committed tokens are the base's own samples. As the noise is keyed by position, they are the very samples that
    autoregression draws. (A sampled chain may be verified this way too; `rejection` accepts more of it.)
    """
    base_tokens_N = sample_base_tokens(log_probs_NV, noise, root_position, tree)
    if len(tree) == 1:  # autoregression: the rest would cost it ten operations per step
        return VerifyResult(tree.depths_N, base_tokens_N.new_ones(()), base_tokens_N[0])
    agrees_N = tree.tokens_N == base_tokens_N[tree.parents_N]
    agrees_N[0] = True
    last = (tree.depths_N * connected_to_root(tree, agrees_N)).argmax()
    return VerifyResult(path_to(tree, last), tree.depths_N[last] + 1, base_tokens_N[last])


def connected_to_root(tree: TokenTree, accepted_alone_N: Tensor) -> Tensor:
    """Return true_N where the node and all its ancestors are accepted."""
    return (tree.ancestors_NN <= accepted_alone_N).all(dim=1)  # <= of truth values is "implies"


def sample_base_tokens(log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int, tree: TokenTree) -> Tensor:
    """Return the base's token_N after each node by Gumbel-max with noise keyed by position; without noise the argmax.

    Siblings share one row of noise.
    """
    if noise is None:
        return log_probs_NV.argmax(dim=-1)
    first = root_position + 1
    positions_R = torch.arange(first, first + tree.height + 1, device=log_probs_NV.device)
    gumbel_RV = noise.gumbel(positions_R, log_probs_NV.shape[-1])
    return (log_probs_NV + gumbel_RV[tree.depths_N]).argmax(dim=-1)


def path_to(tree: TokenTree, node: Tensor) -> Tensor:
    """Return the nodes from the root to `node` as path_K (K = height + 1), -1 in unused slots."""
    slots_N = torch.where(tree.ancestors_NN[node], tree.depths_N, tree.height + 1)
    path = torch.full((tree.height + 2,), -1, dtype=torch.int64, device=slots_N.device)
    return path.scatter_(0, slots_N, torch.arange(len(tree), device=slots_N.device))[:-1]


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accept a draft token x if p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the base's distribution p.

    Cai et al. 2024 (Medusa), section 3.3.1. Of the longest accepted paths the base's most probable one is taken; the
    bonus is a sample of the base. The decision does not depend on a random number, so the output does not follow the
    base's distribution: probable draft tokens come too often. At temperature 0 only the base's argmax is accepted.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_float(self.epsilon, "decoding.verify.epsilon")
        check_float(self.delta, "decoding.verify.delta")
        if not (0 < self.epsilon < 1 and self.delta > 0):
            raise InputError(
                f"decoding.verify.epsilon must be in (0, 1) and decoding.verify.delta > 0, got epsilon={self.epsilon} "
                f"and delta={self.delta}"
            )

    def __call__(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        if noise is None:
            return match(tree, log_probs_NV, noise, root_position)
        probs_NV = log_probs_NV.exp()
        entropy_N = -(probs_NV * log_probs_NV).nan_to_num(0.0).sum(-1)  # 0 log 0 is 0
        threshold_N = (self.delta * (-entropy_N).exp()).clamp(max=self.epsilon)
        draft_log_probs_N = log_probs_NV[tree.parents_N, tree.tokens_N]
        draft_log_probs_N[0] = 0.0
        accepted_alone_N = draft_log_probs_N.exp() > threshold_N[tree.parents_N]
        accepted_alone_N[0] = True
        accepted_N = connected_to_root(tree, accepted_alone_N)
        deepest_N = accepted_N & (tree.depths_N == (tree.depths_N * accepted_N).max())
        likelihood_N = draft_log_probs_N.masked_fill(~accepted_N, 0.0) @ tree.ancestors_NN.T.to(draft_log_probs_N.dtype)
        last = likelihood_N.masked_fill(~deepest_N, -float("inf")).argmax()
        base_tokens_N = sample_base_tokens(log_probs_NV, noise, root_position, tree)
        return VerifyResult(path_to(tree, last), tree.depths_N[last] + 1, base_tokens_N[last])
