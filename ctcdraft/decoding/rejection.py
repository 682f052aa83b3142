"""Which *drawn* guesses stand. It knows the law they were drawn from and the base's; not who drew them.

A drawn guess x stands with probability min(1, p(x) / q(x)); what the base says instead is drawn from what is left
of p, so that the word that comes out has the law p exactly (Leviathan et al. 2023; Chen et al. 2023). It holds only
if q is the law that x was really drawn from. q may sum to less than 1, the rest being the probability that the draft
says nothing: that is a draw which never stands, no other case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree, VerifyResult
from ctcdraft.decoding.verification import match, path_to

# (the base's law_NV, the draft's law_NV, the words_NK drawn at each place in order: STOP for none, -1 in free slots;
# coins_NK) -> the draw_N that stands, -1 for none, and the law_NV of the base's own word if none does
AcceptanceRule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rejection:
    """Walk down while a drawn guess stands; the base's own word then comes from the rule's rest.

    Coins and draws are keyed by position, as the noise of `match` is, and each position is decided in one pass
    only. A tree that carries no law was not drawn and is read by `match`, and so is every tree at temperature 0:
    a one-hot law needs no coins.
    """

    rule: AcceptanceRule

    def __call__(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        if noise is None or tree.draft_probs_NV is None:
            return match(tree, log_probs_NV, noise, root_position)
        draws_NK = sampling_order(tree)
        tokens_NK = torch.where(draws_NK >= 0, tree.tokens_N[draws_NK.clamp(min=0)], draws_NK)
        positions_N = root_position + 1 + tree.depths_N
        uniform_NK = noise.uniform(positions_N, draws_NK.shape[1], after=log_probs_NV.shape[-1])
        accepted_draw_N, residual_NV = self.rule(
            log_probs_NV.double().exp(), tree.draft_probs_NV.double(), tokens_NK, uniform_NK
        )

        chosen_N = torch.where(
            accepted_draw_N >= 0, draws_NK.gather(1, accepted_draw_N.clamp(min=0)[:, None])[:, 0], -1
        )
        here_N = chosen_N[tree.parents_N] == torch.arange(len(tree), device=chosen_N.device)
        here_N[0] = True
        accepted_N = (here_N | ~tree.ancestors_NN).all(dim=1)
        last = (tree.depths_N * accepted_N).argmax()
        gumbel_V = noise.gumbel(positions_N[last][None], log_probs_NV.shape[-1])[0]
        return VerifyResult(path_to(tree, last), tree.depths_N[last] + 1, (residual_NV[last].log() + gumbel_V).argmax())


def sampling_order(tree: TokenTree) -> Tensor:
    """The tree's draws_NK; where it has none, one draw a node: its child, or STOP for a law without a child."""
    if tree.sampled_nodes_NK is not None:
        return tree.sampled_nodes_NK
    assert tree.draft_probs_NV is not None
    draws_N1 = torch.where(tree.draft_probs_NV.sum(-1, keepdim=True) > 0, NO_TOKEN, -1)
    nodes = torch.arange(1, len(tree), device=draws_N1.device)
    return draws_N1.scatter(0, tree.parents_N[1:, None], nodes[:, None])


def multi_round(p_NV: Tensor, q_NV: Tensor, tokens_NK: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Draw after draw, each against what the ones before have left of p (SpecInfer, Miao et al. 2024).

    p = 1/2 1/2 0, q = 1/4 1/4 1/2, drawn: c, a

        c   p(c) / q(c) = 0: never stands;    what is left   (p - q)+ = 1/4 1/4 0   ->   1/2 1/2 0
        a   min(1, 1/2 / 1/4) = 1: stands

    With one draw it is the plain rule of Leviathan and Chen.
    """
    accepted_draw_N = torch.full_like(tokens_NK[:, 0], -1)
    for number, (tokens_N, uniform_N) in enumerate(zip(tokens_NK.T, uniform_NK.T, strict=True)):
        index_N1 = tokens_N.clamp(min=0)[:, None]
        accepts_N = uniform_N * q_NV.gather(1, index_N1)[:, 0] < p_NV.gather(1, index_N1)[:, 0]
        open_N = accepted_draw_N < 0
        accepted_draw_N = torch.where(open_N & accepts_N & (tokens_N >= 0), number, accepted_draw_N)
        refused_N = (accepted_draw_N < 0) & (tokens_N != -1)
        p_NV = torch.where(refused_N[:, None], residual_distribution(p_NV, p_NV - q_NV), p_NV)
    return accepted_draw_N, p_NV


def k_sequential(p_NV: Tensor, q_NV: Tensor, tokens_NK: Tensor, uniform_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The first of k draws that stands with min(1, p(x) / (rho q(x))), all against one p (SpecTr, Sun et al. 2023).

    With b = sum of min(q, p / rho) one draw stands with probability b, one of k with s = 1 - (1 - b)^k, and the
    word then has the law min(q, p / rho) / b. The base's own word makes up what is missing of p:

        p - min(q, p / rho) s / b,      nowhere below 0 as long as s <= rho b

    rho is the smallest that is so. p = q = 1/2 1/2 and two draws: rho = 1, b = 1, the first draw always stands.
    """
    k_N1 = (tokens_NK != -1).sum(1, keepdim=True)
    rho_N1 = smallest_rho(p_NV, q_NV, k_N1, tokens_NK.shape[1])
    common_NV = torch.minimum(q_NV, p_NV / rho_N1)
    b_N1 = common_NV.sum(1, keepdim=True).clamp(max=1.0)
    index_NK = tokens_NK.clamp(min=0)
    accepts_NK = (uniform_NK * rho_N1 * q_NV.gather(1, index_NK) < p_NV.gather(1, index_NK)) & (tokens_NK >= 0)
    accepted_draw_N = torch.where(accepts_NK.any(1), accepts_NK.int().argmax(1), -1)
    share_N1 = torch.where(b_N1 > 0, (1 - (1 - b_N1) ** k_N1) / b_N1, 0.0)
    return accepted_draw_N, residual_distribution(p_NV, p_NV - common_NV * share_N1)


def smallest_rho(p_NV: Tensor, q_NV: Tensor, k_N1: Tensor, samples_drafts: int, halvings: int = 20) -> Tensor:
    """The smallest rho from 1 to k with 1 - (1 - b)^k <= rho b, b = sum of min(q, p / rho); by bisection, from above.

    It is so at k (Bernoulli), and 1 - (1 - b)^k - rho b never grows with rho: one end of the search always holds,
    and any rho that holds is exact, so that a few halvings will do. draws: the largest k.
    """
    low_N1 = torch.ones_like(p_NV[:, :1])
    high_N1 = k_N1.clamp(min=1).to(p_NV.dtype)
    holds_at_1 = satisfies_rho(p_NV, q_NV, k_N1, low_N1)
    for _ in range(halvings if samples_drafts > 1 else 0):
        middle_N1 = (low_N1 + high_N1) / 2
        enough_N1 = satisfies_rho(p_NV, q_NV, k_N1, middle_N1)
        low_N1, high_N1 = torch.where(enough_N1, low_N1, middle_N1), torch.where(enough_N1, middle_N1, high_N1)
    return torch.where(holds_at_1, 1.0, high_N1)


def satisfies_rho(p_NV: Tensor, q_NV: Tensor, k_N1: Tensor, rho_N1: Tensor) -> Tensor:
    b_N1 = torch.minimum(q_NV, p_NV / rho_N1).sum(1, keepdim=True).clamp(max=1.0)
    return 1 - (1 - b_N1) ** k_N1 <= rho_N1 * b_N1


def residual_distribution(p_NV: Tensor, left_NV: Tensor) -> Tensor:
    """What is left of p, as a law; p itself where rounding leaves nothing, which no draw then asks for."""
    left_NV = left_NV.clamp(min=0)
    total_N1 = left_NV.sum(1, keepdim=True)
    return torch.where(total_N1 > 0, left_NV / total_N1, p_NV)
