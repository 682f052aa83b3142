"""Verification of token trees that keeps the base's distribution: exact matching, and rejection sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.step_operations import deepest_match
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree, VerifyResult

# (tree, the base's log-probabilities_NV after each node, noise, position of the root). Without noise the distribution
# is one-hot: only the argmax of each row counts, and rows need not be normalised.
Position = Any  # int, or a tensor [1] where only the device knows it
Verifier = Callable[[TokenTree, Tensor, GumbelNoise | None, Position], VerifyResult]
# (base probabilities p_NV, draft probabilities q_NV, the tokens_NK sampled after each node in order: NO_TOKEN for a
# stop, -1 in unused slots; uniform_NK) -> (index_N of the accepted sample, -1 for none; the distribution_NV of the
# base's token if none is accepted)
AcceptanceRule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain_function(function: Any) -> Any:
    """Return the function of a partial without arguments, as configs give one, whose every call is checked anew."""
    is_bare = isinstance(function, partial) and not function.args and not function.keywords
    return function.func if is_bare else function


def match(tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: Position) -> VerifyResult:
    """Sample the base's token at every node; descend while a child has that token; the first other is the bonus.

        root the          base after `the`: cat     cat is a child: accepted
        |- cat            base after `cat`: sat     no child is sat: bonus sat
        |   |- is
        |- dog            commits: cat sat

    Exact for any deterministic tree and any distribution, greedy or sampled, without draft probabilities: all
    committed tokens are the base's own samples. As the noise is keyed by position, they are the very samples that
    autoregression takes. (A sampled chain may be verified this way too; `Rejection` accepts more of it.)
    """
    if len(tree) == 1:  # autoregression: the rest would cost it ten operations per step
        base_tokens_1 = sample_base_tokens(log_probs_NV, noise, root_position, tree)
        return VerifyResult(tree.depths_N, base_tokens_1.new_ones(()), base_tokens_1[0])
    if log_probs_NV.is_cpu and isinstance(root_position, int):
        return match_on_host(tree, log_probs_NV, noise, root_position)
    return match_on_device(tree, log_probs_NV, noise, root_position)


def match_on_device(
    tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: Position
) -> VerifyResult:
    """Do `match` for all nodes at once, without host synchronisation."""
    base_tokens_N = sample_base_tokens(log_probs_NV, noise, root_position, tree)
    last_1 = deepest_match(tree.tokens_N, tree.parents_N, tree.depths_N, tree.ancestors_NN, base_tokens_N)
    length_1 = tree.depths_N.gather(0, last_1) + 1
    return VerifyResult(path_to(tree, last_1), length_1[0], base_tokens_N.gather(0, last_1)[0])


def match_on_host(tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int) -> VerifyResult:
    """Do `match` from node to node: on a CPU the argmax of all rows would take longer than all else."""
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.host_parents, tree.tokens_N.tolist(), strict=True)):
        children.setdefault((parent, token), node)
    path, node = [], 0
    while node >= 0:
        path.append(node)
        scores_V = log_probs_NV[node]
        if noise is not None:
            scores_V = scores_V + noise.gumbel(torch.tensor([root_position + len(path)]), len(scores_V))[0]
        bonus = scores_V.argmax()
        node = children.get((node, int(bonus)), -1)
    unused = [-1] * (tree.height + 1 - len(path))
    return VerifyResult(torch.tensor([*path, *unused]), torch.tensor(len(path)), bonus)


def connected_to_root(tree: TokenTree, accepted_alone_N: Tensor) -> Tensor:
    """Return true_N where the node and all its ancestors are accepted."""
    return (tree.ancestors_NN <= accepted_alone_N).all(dim=1)  # <= of truth values is "implies"


def sample_base_tokens(log_probs_NV: Tensor, noise: Any, root_position: Position, tree: TokenTree) -> Tensor:
    """Return the base's token_N after each node, by Gumbel-max; without noise the argmax."""
    if noise is None:
        return log_probs_NV.argmax(dim=-1)
    # One row of noise per depth: nodes of one depth are at one position.
    positions_R = torch.arange(1, tree.height + 2, device=log_probs_NV.device) + root_position
    gumbel_RV = noise.gumbel(positions_R, log_probs_NV.shape[-1])
    return (log_probs_NV + gumbel_RV[tree.depths_N]).argmax(dim=-1)


def path_to(tree: TokenTree, node_1: Tensor) -> Tensor:
    """Return the nodes from the root to a node as path_K (K = height + 1), -1 in unused slots."""
    slots_N = torch.where(tree.ancestors_NN.index_select(0, node_1)[0], tree.depths_N, tree.height + 1)
    path = torch.full((tree.height + 2,), -1, dtype=torch.int64, device=slots_N.device)
    return path.scatter_(0, slots_N, torch.arange(len(tree), device=slots_N.device))[:-1]


@dataclass(frozen=True)
class Rejection:
    """Rejection sampling of *sampled* draft tokens, with one draft or several (SpecInfer, SpecTr).

    A sampled draft token x is accepted with probability min(1, p(x) / q(x)); on rejection the base's token is sampled
    from what is left of p, so that the token that comes out follows p exactly (Leviathan et al. 2023; Chen et al.
    2023). This holds only if q is the distribution that x was really sampled from. q may sum to less than 1, the rest
    being the probability that the draft stops: a stop is a sample that is never accepted, and needs no further rule.
    Random numbers are keyed by seed and position.
    """

    rule: AcceptanceRule

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", plain_function(self.rule))

    def __call__(self, tree: TokenTree, log_probs_NV: Tensor, noise: Any, root_position: int) -> VerifyResult:
        if noise is None or tree.draft_probs_NV is None:  # temperature 0, or a tree that was not sampled
            return match(tree, log_probs_NV, noise, root_position)
        samples_NK = sampling_order(tree)
        tokens_NK = torch.where(samples_NK >= 0, tree.tokens_N[samples_NK.clamp(min=0)], samples_NK)
        positions_N = root_position + 1 + tree.depths_N
        # Numbers after=V are not used by the Gumbel noise: a shared one would bias the token after a rejection.
        uniform_NK = noise.uniform(positions_N, samples_NK.shape[1], after=log_probs_NV.shape[-1])
        p_NV, q_NV = log_probs_NV.double().exp(), tree.draft_probs_NV.double()
        index_N, residual_NV = self.rule(p_NV, q_NV, tokens_NK, uniform_NK)

        accepted_child_N = torch.where(index_N >= 0, samples_NK.gather(1, index_N.clamp(min=0)[:, None])[:, 0], -1)
        accepted_alone_N = accepted_child_N[tree.parents_N] == torch.arange(len(tree), device=index_N.device)
        accepted_alone_N[:1].fill_(True)
        # Not accepted_alone_N[0] = True, nor an index without dimensions: they would wait for the device.
        last = (tree.depths_N * connected_to_root(tree, accepted_alone_N)).argmax(dim=0, keepdim=True)
        gumbel_1V = noise.gumbel(positions_N[last], log_probs_NV.shape[-1])
        bonus = (residual_NV[last].log() + gumbel_1V).argmax()
        return VerifyResult(path_to(tree, last), tree.depths_N[last][0] + 1, bonus)


def sampling_order(tree: TokenTree) -> Tensor:
    """Return sampled_nodes_NK; if the tree has none, one sample per node: its child, or a stop for a childless row."""
    if tree.sampled_nodes_NK is not None:
        return tree.sampled_nodes_NK
    assert tree.draft_probs_NV is not None
    samples_N1 = torch.where(tree.draft_probs_NV.sum(-1, keepdim=True) > 0, NO_TOKEN, -1)
    nodes = torch.arange(1, len(tree), device=samples_N1.device)
    return samples_N1.scatter(0, tree.parents_N[1:, None], nodes[:, None])


def multi_round(p_NV: Tensor, q_NV: Tensor, tokens_NK: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Try sample after sample, each against what the earlier ones left of p (SpecInfer, Miao et al. 2024).

    p = 1/2 1/2 0, q = 1/4 1/4 1/2, sampled: c, a

        c   p(c) / q(c) = 0: never accepted;    what is left   (p - q)+ = 1/4 1/4 0   ->   1/2 1/2 0
        a   min(1, 1/2 / 1/4) = 1: accepted

    With one sample this is the rule of Leviathan et al. and Chen et al.
    """
    accepted_N = torch.full_like(tokens_NK[:, 0], -1)
    for number, (tokens_N, uniform_N) in enumerate(zip(tokens_NK.T, uniform_NK.T, strict=True)):
        index_N1 = tokens_N.clamp(min=0)[:, None]
        accepts_N = uniform_N * q_NV.gather(1, index_N1)[:, 0] < p_NV.gather(1, index_N1)[:, 0]
        accepted_N = torch.where((accepted_N < 0) & accepts_N & (tokens_N >= 0), number, accepted_N)
        rejected_N = (accepted_N < 0) & (tokens_N != -1)
        p_NV = torch.where(rejected_N[:, None], residual_distribution(p_NV, p_NV - q_NV), p_NV)
    return accepted_N, p_NV


def k_sequential(p_NV: Tensor, q_NV: Tensor, tokens_NK: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the first of k samples with min(1, p(x) / (rho q(x))), all against one p (SpecTr, Sun et al. 2023).

    With b = sum of min(q, p / rho) one sample is accepted with probability b, one of k with s = 1 - (1 - b)^k, and
    the token then has the distribution min(q, p / rho) / b. The base's token makes up what is missing of p:

        p - min(q, p / rho) s / b,      never below 0 as long as s <= rho b

    rho is the smallest for which this holds. p = q = 1/2 1/2, two samples: rho = 1, b = 1, the first is accepted.
    """
    k_N1 = (tokens_NK != -1).sum(1, keepdim=True)
    rho_N1 = smallest_rho(p_NV, q_NV, k_N1, tokens_NK.shape[1])
    common_NV = torch.minimum(q_NV, p_NV / rho_N1)
    b_N1 = common_NV.sum(1, keepdim=True).clamp(max=1.0)
    index_NK = tokens_NK.clamp(min=0)
    accepts_NK = (uniform_NK * rho_N1 * q_NV.gather(1, index_NK) < p_NV.gather(1, index_NK)) & (tokens_NK >= 0)
    accepted_N = torch.where(accepts_NK.any(1), accepts_NK.int().argmax(1), -1)
    share_N1 = torch.where(b_N1 > 0, (1 - (1 - b_N1) ** k_N1) / b_N1, 0.0)
    return accepted_N, residual_distribution(p_NV, p_NV - common_NV * share_N1)


def smallest_rho(p_NV: Tensor, q_NV: Tensor, k_N1: Tensor, max_samples: int, halvings: int = 20) -> Tensor:
    """Return the smallest rho_N1 in [1, k] with 1 - (1 - b)^k <= rho b, b = sum of min(q, p / rho), by bisection.

    The condition holds at rho = k (Bernoulli), and 1 - (1 - b)^k - rho b never grows with rho.
    """

    def holds(rho_N1: Tensor) -> Tensor:
        b_N1 = torch.minimum(q_NV, p_NV / rho_N1).sum(1, keepdim=True).clamp(max=1.0)
        return 1 - (1 - b_N1) ** k_N1 <= rho_N1 * b_N1

    low_N1, high_N1 = torch.ones_like(p_NV[:, :1]), k_N1.clamp(min=1).to(p_NV.dtype)
    holds_at_1 = holds(low_N1)
    # The condition always holds at the upper end, and any such rho is exact, so a few halvings suffice.
    for _ in range(halvings if max_samples > 1 else 0):
        middle_N1 = (low_N1 + high_N1) / 2
        enough_N1 = holds(middle_N1)
        low_N1, high_N1 = torch.where(enough_N1, low_N1, middle_N1), torch.where(enough_N1, middle_N1, high_N1)
    return torch.where(holds_at_1, 1.0, high_N1)


def residual_distribution(p_NV: Tensor, left_NV: Tensor) -> Tensor:
    left_NV = left_NV.clamp(min=0)
    total_N1 = left_NV.sum(1, keepdim=True)
    # Where rounding leaves nothing, p itself stands in; it is then never sampled from.
    return torch.where(total_N1 > 0, left_NV / total_N1, p_NV)
