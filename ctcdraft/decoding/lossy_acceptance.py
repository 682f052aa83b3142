"""LOSSY verification: draft tokens are accepted that the base would not have produced.

A rule decides on each draft token alone, without a random number. Of the longest paths of accepted tokens the one that
is most probable under the base is committed, and the bonus token is the base's own.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.decoding.verification import Position, connected_to_root, match, path_to, sample_base_tokens
from ctcdraft.errors import check_float, check_int


class LossyAcceptance:
    """A verifier with a rule `accepts` for single draft tokens."""

    exact_when_greedy = True  # whether at temperature 0 the base's argmax alone is accepted

    @abstractmethod
    def accepts(self, log_probs_RV: Tensor, draft_log_probs_R: Tensor) -> Tensor:
        """Return true_R where a draft token is accepted, given the base's distribution and the token's own value."""

    def __call__(self, tree: TokenTree, log_probs_NV: Tensor, noise: Any, root_position: Position) -> VerifyResult:
        if len(tree) == 1 or (noise is None and self.exact_when_greedy):
            return match(tree, log_probs_NV, noise, root_position)
        bonus_N = sample_base_tokens(log_probs_NV, noise, root_position, tree)
        if noise is None:  # at temperature 0 verifiers are given the logits
            log_probs_NV = log_probs_NV.float().log_softmax(dim=-1)
        draft_log_probs_N = log_probs_NV[tree.parents_N, tree.tokens_N]
        draft_log_probs_N[:1].zero_()  # of the root; an assignment would copy a number from the host
        accepted_N = self.accepts(log_probs_NV[tree.parents_N], draft_log_probs_N)
        accepted_N[:1].fill_(True)
        accepted_N = connected_to_root(tree, accepted_N)
        deepest_N = accepted_N & (tree.depths_N == (tree.depths_N * accepted_N).max())
        likelihood_N = draft_log_probs_N.masked_fill(~accepted_N, 0.0) @ tree.ancestors_NN.T.to(draft_log_probs_N.dtype)
        last = likelihood_N.masked_fill(~deepest_N, -float("inf")).argmax(dim=0, keepdim=True)
        return VerifyResult(path_to(tree, last), tree.depths_N[last][0] + 1, bonus_N[last][0])


@dataclass(frozen=True)
class TypicalAcceptance(LossyAcceptance):
    """Accept a draft token x if p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the base's distribution p.

    Cai et al. 2024 (Medusa), section 3.3.1. The output does not follow the base's distribution: probable draft tokens
    come too often. At temperature 0 only the base's argmax is accepted.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_float(self.epsilon, "decoding.verify.epsilon", above=0, below=1)
        check_float(self.delta, "decoding.verify.delta", above=0)

    def accepts(self, log_probs_RV: Tensor, draft_log_probs_R: Tensor) -> Tensor:
        entropy_R = -(log_probs_RV.exp() * log_probs_RV).nan_to_num(0.0).sum(-1)  # 0 log 0 is 0
        return draft_log_probs_R.exp() > (self.delta * (-entropy_R).exp()).clamp(max=self.epsilon)


@dataclass(frozen=True)
class RelaxedAcceptance(LossyAcceptance):
    """Accept a draft token that is among the base's `beta` most probable tokens and at most `tau` below the best.

    Xia et al. 2023 (SpecDec); the distance is one of log-probabilities. The output differs from the base's
    at temperature 0, too, unless beta is 1 or tau 0.

        p = .5 .3 .15 .05      tau 1: log .5 - log .3 = 0.51, log .5 - log .15 = 1.20      ->   the first two tokens
    """

    beta: int
    tau: float

    exact_when_greedy = False

    def __post_init__(self) -> None:
        check_int(self.beta, "decoding.verify.beta")
        check_float(self.tau, "decoding.verify.tau", least=0)

    def accepts(self, log_probs_RV: Tensor, draft_log_probs_R: Tensor) -> Tensor:
        best_RK = log_probs_RV.topk(min(self.beta, log_probs_RV.shape[1]), dim=-1).values
        # A token that ties with the last of the best is accepted with it.
        return (draft_log_probs_R >= best_RK[:, -1]) & (best_RK[:, 0] - draft_log_probs_R <= self.tau)
