"""From frames to a tree where frame k says word k: no blank, nothing to collapse. It knows words and probabilities."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.dynamic import build_dynamic_tree, top_nodes_tree
from ctcdraft.drafters.trees.static import StaticTree
from ctcdraft.errors import InputError, check_int


class PerFrameTree:
    """The n most probable texts, best first: a text's probability is the product of its words' in their frames.

    The blank's share of a frame goes to the words. words: how many children a text may have, null for no limit;
    1 is a chain.
    """

    interprets_as = "words"

    def __init__(self, words: int | None) -> None:
        self.words = None if words is None else check_int(words, "drafter.paths.words")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        depth = min(depth, len(log_probs_TC))
        if listening is not None and self.words is None:
            return conditioned_product_tree(listening, root, depth, nodes - 1, stops)
        step_function = PerFrameStepFunction(log_probs_TC, listening)
        return build_dynamic_tree(
            step_function, root, depth, nodes, width=nodes, words=self.words or nodes, stops=stops
        )


def conditioned_product_tree(
    conditioned: ConditionedFrames, root: Tensor, depth: int, count: int, stops: Sequence[int]
) -> TokenTree:
    """What `grow` finds, for laws that cost a pass over all words each: only of texts that can still matter."""
    if depth < 1 or count < 1:
        return TokenTree.only_root(root)
    stop_words = torch.tensor(stops, dtype=root.dtype, device=root.device)
    nodes_K, log_probs_K = torch.zeros_like(root.reshape(1)), torch.zeros(1, device=root.device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    best_N, first = log_probs_K[:0], 1
    for frame in range(depth):
        joint_KV = log_probs_K[:, None] + conditioned.token_log_probs(frame).clamp(max=0)
        joint_N, chosen_N = joint_KV.flatten().topk(min(count, joint_KV.numel()))
        tokens_N, rows_N = chosen_N % joint_KV.shape[1], chosen_N // joint_KV.shape[1]
        found.append((tokens_N, nodes_K[rows_N], joint_N))
        best_N = torch.cat([best_N, joint_N]).topk(min(count, len(best_N) + len(joint_N))).values
        if frame + 1 == depth:
            break
        nodes_N = torch.arange(first, first + len(tokens_N), device=root.device)
        first += len(tokens_N)
        log_probs_N = joint_N.masked_fill(torch.isin(tokens_N, stop_words), -torch.inf)
        if root.is_cpu and len(best_N) == count:  # asking is free here, on a GPU it would stall every level
            live_N = log_probs_N > best_N[-1]
            if not live_N.any():
                break
            tokens_N, rows_N, nodes_N, log_probs_N = (x[live_N] for x in (tokens_N, rows_N, nodes_N, log_probs_N))
        conditioned, nodes_K, log_probs_K = conditioned.extend(tokens_N, rows_N), nodes_N, log_probs_N
    tokens_R, parents_R, joint_R = (torch.cat(parts) for parts in zip(*found, strict=True))
    return top_nodes_tree(root, tokens_R, parents_R, joint_R, count, depth)


class PerFrameStepFunction:
    """The laws `grow` asks for, level by level: one frame each. The same for every text, unless
    the frames listen."""

    def __init__(self, log_probs_TC: Tensor, conditioned: ConditionedFrames | None) -> None:
        self.token_log_probs_TV = log_probs_TC[:, :-1].log_softmax(dim=-1)
        self.conditioned = conditioned
        self.frame = -1

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        self.frame += 1
        if self.conditioned is None:
            return self.token_log_probs_TV[self.frame].expand(len(tokens_K), -1)
        if self.frame > 0:  # the first call hands over the root, which the memory has heard
            self.conditioned = self.conditioned.extend(tokens_K, rows_K)
        return self.conditioned.token_log_probs(self.frame)


class StaticPerFrameTree:
    """Medusa's tree (Cai et al. 2024, section 2.3.3): a fixed list of choices, whatever the frames say."""

    interprets_as = "words"
    has_nested_trees = StaticTree.has_nested_trees

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.growth = StaticTree(choices)

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        return self.growth(
            PerFrameStepFunction(log_probs_TC, listening), root, min(depth, len(log_probs_TC)), nodes, stops
        )


def likely_choices(count: int, frames: int, ranks: int, first: float, rank_decay: float, frame_decay: float) -> Any:
    """The `count` choices of greatest product, best first, where rank r of frame t (from 0) is right with
    probability first * rank_decay^r * frame_decay^t. A choice comes after the one it continues.

    first 0.6, rank_decay 0.35, frame_decay 0.9:   [0] .6   [0, 0] .324   [1] .21   [0, 0, 0] .157   [0, 1] .113
    """
    if not (0 < first < 1 and 0 < rank_decay <= 1 and 0 < frame_decay <= 1):
        raise InputError(
            f"drafter.paths.choices: first={first}, rank_decay={rank_decay} and frame_decay={frame_decay} are no "
            "probabilities; first lies between 0 and 1, the others lie above 0 and reach to 1"
        )

    def cost(choice: tuple[int, ...]) -> float:
        log_probs = (
            log(first) + rank * log(rank_decay) + frame * log(frame_decay) for frame, rank in enumerate(choice)
        )
        return -sum(log_probs)

    start: tuple[int, ...] = (0,)
    heap = [(cost(start), start)]
    chosen: list[list[int]] = []
    while heap and len(chosen) < count:
        _, choice = heapq.heappop(heap)
        chosen.append(list(choice))
        sibling, child = (*choice[:-1], choice[-1] + 1), (*choice, 0)
        if sibling[-1] < ranks:
            heapq.heappush(heap, (cost(sibling), sibling))
        if len(child) <= frames:
            heapq.heappush(heap, (cost(child), child))
    return chosen
