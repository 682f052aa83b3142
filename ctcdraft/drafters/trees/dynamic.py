"""The dynamic tree: the n most probable texts under a node budget, from laws that are asked level by level.

It knows conditional probabilities; not the model they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.draft_sampling import DraftSampling
from ctcdraft.errors import check_int


class StepFunction(Protocol):
    """What comes after a text, for a few texts at once. It is asked level by level and remembers the last one.

    tokens_K: the words just chosen; rows_K: the rows of the previous call that they continue (the first call
    hands over the root alone). Returns log_probs_KV of the next word.
    """

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor: ...


class TreeBuilder(Protocol):
    """(laws, root, greatest depth, nodes with the root, words that end a text, what to draw with)."""

    def __call__(
        self,
        step_function: StepFunction,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: DraftSampling,
    ) -> TokenTree: ...


class DynamicTree:
    """EAGLE-2's dynamic tree (Li et al. 2024), with the width and the words of a level as values.

    width: how many nodes of a level are continued; words: how many children each of them may have. null is as
    many as the tree has nodes: then the tree is exactly the n most probable texts. width 1 is a chain with
    siblings; width 1 and words 1 is a chain.
    """

    def __init__(self, width: int | None, words: int | None) -> None:
        self.width = None if width is None else check_int(width, "drafter.growth.width")
        self.words = None if words is None else check_int(words, "drafter.growth.words")

    def __call__(
        self,
        step_function: StepFunction,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
    ) -> TokenTree:
        return build_dynamic_tree(step_function, root, depth, nodes, self.width or nodes, self.words or nodes, stops)


def build_dynamic_tree(
    step_function: StepFunction, root: Tensor, depth: int, nodes: int, width: int, words: int, stops: Sequence[int]
) -> TokenTree:
    """Keep the nodes - 1 most probable nodes of every depth, continue `width` of them; then the best of all.

    A text is never more probable than its beginning, so no node is among the best without its parent, and a
    depth's n best are enough. Nothing hangs below a stop, and what has probability zero is no node.

        p(a) = .6  p(b) = .4        p(c | a) = .5  p(d | a) = .5       p(e | b) = .9
        4 guesses:  a .6   b .4   e .36   c .3      (b - e is better than a - d; equals: the earlier one)
    """
    count = nodes - 1
    if depth < 1 or count < 1:
        return TokenTree.only_root(root)
    stop_token_ids = torch.tensor(stops, dtype=root.dtype, device=root.device)
    tokens_K, rows_K = root.reshape(1), torch.zeros_like(root.reshape(1))
    nodes_K, log_probs_K = rows_K, torch.zeros(1, device=root.device)  # place 0 is the root, surely there
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    first = 1
    for _ in range(depth):
        # Rounding may leave a log-probability above 0; a child must never pass its parent.
        joint_KV = log_probs_K[:, None] + step_function(tokens_K, rows_K).clamp(max=0)
        best_KW, tokens_KW = joint_KV.topk(min(words, count, joint_KV.shape[1]), dim=1)
        joint_N, chosen_N = best_KW.flatten().topk(min(count, best_KW.numel()))
        tokens_N = tokens_KW.flatten()[chosen_N]
        rows_N = chosen_N // tokens_KW.shape[1]
        found.append((tokens_N, nodes_K[rows_N], joint_N))
        extendable_N = joint_N.masked_fill(torch.isin(tokens_N, stop_token_ids), -torch.inf)
        log_probs_K, go_on_K = extendable_N.topk(min(width, len(extendable_N)))
        # The next call continues rows of this one; a row that may not go on has probability zero from here.
        tokens_K, rows_K, nodes_K = tokens_N[go_on_K], rows_N[go_on_K], first + go_on_K
        first += len(tokens_N)
    tokens_R, parents_R, joint_R = (torch.cat(parts) for parts in zip(*found, strict=True))
    return top_nodes_tree(root, tokens_R, parents_R, joint_R, count, depth)


def top_nodes_tree(
    root: Tensor, tokens_R: Tensor, parents_R: Tensor, joint_R: Tensor, count: int, height: int
) -> TokenTree:
    """The tree of the `count` most probable rows. parents_R: 0 is the root, r + 1 is row r; a parent comes first."""
    best_N = joint_R.argsort(descending=True, stable=True)[:count]
    best_N = best_N[joint_R[best_N] > -torch.inf]
    node_R = tokens_R.new_zeros(len(tokens_R) + 1)
    node_R[best_N + 1] = torch.arange(1, len(best_N) + 1, device=best_N.device)
    tokens_N = torch.cat([root.reshape(1), tokens_R[best_N]])
    parents_N = torch.cat([torch.full_like(root.reshape(1), -1), node_R[parents_R[best_N]]])
    return TokenTree(tokens_N, parents_N, height)
