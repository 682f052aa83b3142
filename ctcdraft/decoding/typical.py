"""Guesses that the base finds typical enough (Cai et al. 2024, Medusa, section 3.3.1). It changes the text: LOSSY."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ctcdraft.decoding.sampling import Noise
from ctcdraft.decoding.tree import TokenTree, Verdict
from ctcdraft.decoding.verify import draw, match, path_to
from ctcdraft.errors import InputError, number


@dataclass(frozen=True)
class Typical:
    """A guess x stands where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the base's law p there.

    Of the longest paths that stand the one is taken which the base finds most probable; the bonus is its own
    draw. No random number decides about a guess, so what comes out has not the base's law: likely guesses stand
    too often, and what is nobody's guess comes too seldom. At temperature 0 only the base's own word stands.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        number(self.epsilon, "decoding.verify.epsilon")
        number(self.delta, "decoding.verify.delta")
        if not (0 < self.epsilon < 1 and self.delta > 0):
            raise InputError(
                f"decoding.verify.epsilon={self.epsilon} and delta={self.delta}: epsilon lies between 0 and 1, delta "
                "above 0"
            )

    def __call__(self, tree: TokenTree, log_probs_NV: Tensor, noise: Noise | None, root_position: int) -> Verdict:
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
        base_tokens_N = draw(log_probs_NV, noise, root_position, tree)
        return Verdict(path_to(tree, last), tree.depths_N[last] + 1, base_tokens_N[last])
