"""Trees from frames in which frame k is draft token k: no blank, nothing to collapse (Medusa, blockwise decoding)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.dynamic import DynamicTree, build_dynamic_tree
from ctcdraft.drafters.trees.request import Conditioned, StepTreeBuilder, TreeRequest
from ctcdraft.drafters.trees.static import Choice, StaticTree, cheapest
from ctcdraft.errors import InputError


class PerFrameTree:
    """The most probable texts, best first: a text's probability is the product of its tokens' in their frames.

    The probability of a frame's blank is shared out to the tokens. children: those of one node; None for no limit, 1
    for a chain.
    """

    fixed_shapes = True
    interprets_as = "tokens"
    exact = False  # whether the tree holds exactly the most probable texts

    def __init__(self, children: int | None) -> None:
        self.step_tree: StepTreeBuilder = DynamicTree(None, children)
        self.exact = children is None

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree:
        request = request.limit_depth(len(log_probs_TC))
        step_function = PerFrameStepFunction(log_probs_TC, conditioned)
        if self.exact:
            return build_dynamic_tree(step_function, request, request.nodes, request.nodes, prune=True)
        return self.step_tree(step_function, request)


class StaticPerFrameTree(PerFrameTree):
    """Medusa's tree (Cai et al. 2024, section 2.3.3): a fixed list of choices, see StaticTree."""

    has_nested_trees = StaticTree.has_nested_trees

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.step_tree = StaticTree(choices)


class PerFrameStepFunction:
    """Frames as a step function: level k is the distribution of frame k."""

    def __init__(self, log_probs_TC: Tensor, conditioned: Conditioned) -> None:
        self.conditioned = conditioned
        if conditioned is None:  # conditioned frames are normalised after every prefix instead
            self.token_log_probs_TV = log_probs_TC[:, :-1].log_softmax(dim=-1)
        self.frame = -1

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        self.frame += 1
        if self.conditioned is None:
            return self.token_log_probs_TV[self.frame].expand(len(tokens_K), -1)
        if self.frame > 0:  # the first call has the root, which is in the correction's initial state
            self.conditioned = self.conditioned.extend(tokens_K, rows_K)
        return self.conditioned.token_log_probs(self.frame)


def likely_choices(
    count: int, frames: int, ranks: int, first: float, rank_decay: float, frame_decay: float
) -> list[list[int]]:
    """Return the `count` choices of greatest probability, best first, a choice after the one it continues.

    The probability that rank r of frame t (both from 0) is right is taken as first * rank_decay^r * frame_decay^t.

    first 0.6, rank_decay 0.35, frame_decay 0.9:   [0] .6   [0, 0] .324   [1] .21   [0, 0, 0] .157   [0, 1] .113
    """
    if not (0 < first < 1 and 0 < rank_decay <= 1 and 0 < frame_decay <= 1):
        raise InputError(
            "drafter.tree.choices must have 0 < first < 1, 0 < rank_decay <= 1 and 0 < frame_decay <= 1, got "
            f"first={first}, rank_decay={rank_decay} and frame_decay={frame_decay}"
        )

    def cost(choice: Choice) -> float:
        return -sum(log(first) + rank * log(rank_decay) + frame * log(frame_decay) for frame, rank in enumerate(choice))

    def successors(choice: Choice) -> Iterator[Choice]:
        if choice[-1] + 1 < ranks:
            yield (*choice[:-1], choice[-1] + 1)
        if len(choice) < frames:
            yield (*choice, 0)

    return [list(choice) for choice in cheapest((0,), cost, successors, count)]
