"""Trees from frames in which frame k is draft token k: no blank, nothing to collapse (Medusa, blockwise decoding)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.dynamic import DynamicTree, top_nodes_tree
from ctcdraft.drafters.trees.request import StepTreeBuilder, TreeRequest
from ctcdraft.drafters.trees.static import Choice, StaticTree, cheapest
from ctcdraft.errors import InputError


class PerFrameTree:
    """The most probable texts, best first: a text's probability is the product of its tokens' in their frames.

    The probability of a frame's blank is shared out to the tokens.

    Args:
        words: children of one node; None for no limit, 1 for a chain.
    """

    interprets_as = "words"

    def __init__(self, words: int | None) -> None:
        self.step_tree: StepTreeBuilder = DynamicTree(None, words)
        self.exact = words is None

    def __call__(
        self, log_probs_TC: Tensor, request: TreeRequest, conditioned: ConditionedFrames | None = None
    ) -> TokenTree:
        request = request.limit_depth(len(log_probs_TC))
        if conditioned is not None and self.exact:
            return conditioned_product_tree(conditioned, request)
        return self.step_tree(PerFrameStepFunction(log_probs_TC, conditioned), request)


class StaticPerFrameTree(PerFrameTree):
    """Medusa's tree (Cai et al. 2024, section 2.3.3): a fixed list of choices, see StaticTree."""

    has_nested_trees = StaticTree.has_nested_trees

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.step_tree = StaticTree(choices)
        self.exact = False


def conditioned_product_tree(conditioned: ConditionedFrames, request: TreeRequest) -> TokenTree:
    """Return the tree of `build_dynamic_tree` without limits, and stop continuing texts that cannot be in it.

    Here every prefix costs logits over the whole vocabulary, which are shared between prefixes otherwise.
    """
    root, count = request.root, request.nodes - 1
    if request.depth < 1 or count < 1:
        return TokenTree.only_root(root)
    stop_ids = request.stop_ids_S()
    nodes_K, log_probs_K = torch.zeros_like(root.reshape(1)), torch.zeros(1, device=root.device)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    best_N, first = log_probs_K[:0], 1
    for frame in range(request.depth):
        joint_KV = log_probs_K[:, None] + conditioned.token_log_probs(frame).clamp(max=0)
        joint_N, chosen_N = joint_KV.flatten().topk(min(count, joint_KV.numel()))
        tokens_N, rows_N = chosen_N % joint_KV.shape[1], chosen_N // joint_KV.shape[1]
        levels.append((tokens_N, nodes_K[rows_N], joint_N))
        best_N = torch.cat([best_N, joint_N]).topk(min(count, len(best_N) + len(joint_N))).values
        if frame + 1 == request.depth:
            break
        nodes_N = torch.arange(first, first + len(tokens_N), device=root.device)
        first += len(tokens_N)
        log_probs_N = joint_N.masked_fill(torch.isin(tokens_N, stop_ids), -torch.inf)
        if root.is_cpu and len(best_N) == count:  # on a GPU this check would be a host synchronisation per level
            live_N = log_probs_N > best_N[-1]
            if not live_N.any():
                break
            tokens_N, rows_N, nodes_N, log_probs_N = (x[live_N] for x in (tokens_N, rows_N, nodes_N, log_probs_N))
        conditioned, nodes_K, log_probs_K = conditioned.extend(tokens_N, rows_N), nodes_N, log_probs_N
    return top_nodes_tree(root, levels, count)


class PerFrameStepFunction:
    """Frames as a step function: level k is the distribution of frame k, conditioned on the prefix if there is a
    logit correction and the same for all prefixes if there is none."""

    def __init__(self, log_probs_TC: Tensor, conditioned: ConditionedFrames | None) -> None:
        self.token_log_probs_TV = log_probs_TC[:, :-1].log_softmax(dim=-1)
        self.conditioned = conditioned
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
