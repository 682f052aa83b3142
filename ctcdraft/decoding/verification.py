"""Which guesses stand. It knows a tree and the base's law at every node; not how the guesses were made.

Guesses that the base finds typical enough (Cai et al. 2024, Medusa, section 3.3.1). It changes the text: LOSSY.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.errors import InputError, check_float

# (tree, the base's log-probabilities_NV after each node, noise, position of the root). Without noise the law is
# one-hot: only the best word of each row counts, and rows need not be normalised.
Verifier = Callable[[TokenTree, Tensor, GumbelNoise | None, int], VerifyResult]


def match(tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int) -> VerifyResult:
    """Let the base speak at every node; walk on while a child says the same; the first other word is the bonus.

        root the          base after `the`: cat     cat is a child: accepted
        |- cat            base after `cat`: sat     no child says sat: bonus sat
        |   |- is
        |- dog            commits: cat sat

    Exact for any deterministic tree and any law, greedy or sampled, and needs no draft probabilities: the
    words that come out are the base's own draws, whatever was guessed. Where noise is keyed by position they
    are the very draws autoregression makes. (A drawn chain is read the same way, at a lower acceptance than
    `rejection` gives it.)
    """
    base_tokens_N = sample_base_tokens(log_probs_NV, noise, root_position, tree)
    if len(tree) == 1:  # nothing to walk along; what follows would cost autoregression ten operations a pass
        return VerifyResult(tree.depths_N, base_tokens_N.new_ones(()), base_tokens_N[0])
    agrees_N = tree.tokens_N == base_tokens_N[tree.parents_N]
    agrees_N[0] = True
    accepted_N = (tree.ancestors_NN <= agrees_N).all(dim=1)  # <= of truths is "implies": who is above it, agrees
    last = (tree.depths_N * accepted_N).argmax()
    return VerifyResult(path_to(tree, last), tree.depths_N[last] + 1, base_tokens_N[last])


def sample_base_tokens(log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int, tree: TokenTree) -> Tensor:
    """The base's word after each node, by Gumbel-max with noise keyed by the word's position; without noise the
    most probable one. Siblings share one row of noise."""
    if noise is None:
        return log_probs_NV.argmax(dim=-1)
    first = root_position + 1
    positions_R = torch.arange(first, first + tree.height + 1, device=log_probs_NV.device)
    gumbel_RV = noise.gumbel(positions_R, log_probs_NV.shape[-1])
    return (log_probs_NV + gumbel_RV[tree.depths_N]).argmax(dim=-1)


def path_to(tree: TokenTree, node: Tensor) -> Tensor:
    """The nodes from the root to `node` as path_K (K = height + 1), -1 in free slots."""
    size = len(tree)
    slots_N = torch.where(tree.ancestors_NN[node], tree.depths_N, tree.height + 1)
    path = torch.full((tree.height + 2,), -1, dtype=torch.int64, device=slots_N.device)
    return path.scatter_(0, slots_N, torch.arange(size, device=slots_N.device))[:-1]


@dataclass(frozen=True)
class TypicalAcceptance:
    """A guess x stands where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the base's law p there.

    Of the longest paths that stand the one is taken which the base finds most probable; the bonus is its own
    draw. No random number decides about a guess, so what comes out has not the base's law: likely guesses stand
    too often, and what is nobody's guess comes too seldom. At temperature 0 only the base's own word stands.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_float(self.epsilon, "decoding.verify.epsilon")
        check_float(self.delta, "decoding.verify.delta")
        if not (0 < self.epsilon < 1 and self.delta > 0):
            raise InputError(
                f"decoding.verify.epsilon={self.epsilon} and delta={self.delta}: epsilon lies between 0 and 1, delta "
                "above 0"
            )

    def __call__(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        if noise is None:
            return match(tree, log_probs_NV, noise, root_position)
        probs_NV = log_probs_NV.exp()
        entropy_N = -(probs_NV * log_probs_NV).nan_to_num(0.0).sum(-1)  # 0 log 0 is nothing
        threshold_N = (self.delta * (-entropy_N).exp()).clamp(max=self.epsilon)
        draft_log_probs_N = log_probs_NV[tree.parents_N, tree.tokens_N]
        draft_log_probs_N[0] = 0.0
        accepted_alone_N = draft_log_probs_N.exp() > threshold_N[tree.parents_N]
        accepted_alone_N[0] = True
        accepted_N = (accepted_alone_N | ~tree.ancestors_NN).all(dim=1)
        deepest_N = accepted_N & (tree.depths_N == (tree.depths_N * accepted_N).max())
        likelihood_N = draft_log_probs_N.masked_fill(~accepted_N, 0.0) @ tree.ancestors_NN.T.to(draft_log_probs_N.dtype)
        last = likelihood_N.masked_fill(~deepest_N, -float("inf")).argmax()
        base_tokens_N = sample_base_tokens(log_probs_NV, noise, root_position, tree)
        return VerifyResult(path_to(tree, last), tree.depths_N[last] + 1, base_tokens_N[last])
