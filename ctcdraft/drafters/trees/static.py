"""Fixed trees: which ranks to guess is settled beforehand, as in Medusa and EAGLE-1. It knows laws and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.dynamic import StepFunction
from ctcdraft.errors import InputError

Choice = tuple[int, ...]


class StaticTree:
    """choices: paths of ranks, the most promising first; [0, 2] is the third best word after the best one.

    Every node asks the law behind its own text. Of the choices that are not too deep the first ones stay, as many as
    there are nodes for; a word of probability zero and whatever would hang below a stop are left out.
    """

    has_nested_trees = (
        False  # what is left out is not made up for, so a larger tree may have more of the same first choices
    )

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.choices = tuple(tuple(choice) for choice in choices)
        known: set[Choice] = {()}
        for choice in self.choices:
            if not choice or min(choice) < 0:
                raise InputError(f"choices holds {list(choice)}, which is none; a choice holds ranks from 0")
            if choice[:-1] not in known or self.conditioning_path(choice[:-1]) not in known:
                raise InputError(f"choices holds {list(choice)} before what it hangs from; list that first")
            known.add(choice)

    def conditioning_path(self, parent: Choice) -> Choice:
        """Behind whose text the children of a node are asked for."""
        return parent

    def __call__(
        self,
        step_function: StepFunction,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
    ) -> TokenTree:
        choices = tuple(choice for choice in self.choices if len(choice) <= depth)[: nodes - 1]
        conditioning_paths = tuple(self.conditioning_path(choice[:-1]) for choice in choices)
        stop_words = torch.tensor(stops, dtype=root.dtype, device=root.device)
        tokens_N = root.repeat(len(choices) + 1)
        parents_N, levels = plan_levels(choices, conditioning_paths, root.device)
        real_N = torch.ones_like(tokens_N, dtype=torch.bool)
        for level in levels:
            log_probs_KV = step_function(tokens_N[level.query_nodes_K], level.rows_K)
            best_KR, tokens_KR = log_probs_KV.topk(min(level.ranks, log_probs_KV.shape[1]), dim=1)
            in_range_J = level.ranks_J < best_KR.shape[1]
            at = level.query_rows_J, level.ranks_J.clamp(max=best_KR.shape[1] - 1)
            above_J = parents_N[level.nodes_J]
            extendable_J = real_N[above_J] & ((above_J == 0) | ~torch.isin(tokens_N[above_J], stop_words))
            tokens_N[level.nodes_J] = tokens_KR[at]
            real_N[level.nodes_J] = in_range_J & extendable_J & (best_KR[at] > -torch.inf)
        return keep_real_nodes(tokens_N, parents_N, real_N, len(levels))


class GreedyPathTree(StaticTree):
    """As the CTC paper's released code drafts: one greedy chain is followed, and all nodes of a depth take their
    words from the law behind it, whatever their own parents say. It asks for one row a level."""

    def conditioning_path(self, parent: Choice) -> Choice:
        return (0,) * len(parent)


@dataclass(frozen=True)
class TreeLevel:
    """asked_K: nodes whose law is asked; rows_K: what they continue in the previous call. The new nodes_J take rank
    ranks_J of row from_J; ranks: how many ranks are needed at most."""

    query_nodes_K: Tensor
    rows_K: Tensor
    nodes_J: Tensor
    query_rows_J: Tensor
    ranks_J: Tensor
    ranks: int


@lru_cache(maxsize=64)
def plan_levels(
    choices: tuple[Choice, ...], conditioning_paths: tuple[Choice, ...], device: torch.device
) -> tuple[Tensor, list[TreeLevel]]:
    """parents_N of the tree, and level by level who is asked for what. Node n + 1 is choice n."""
    node = {(): 0} | {choice: n + 1 for n, choice in enumerate(choices)}
    parents_N = torch.tensor([-1, *(node[choice[:-1]] for choice in choices)], device=device)
    levels: list[TreeLevel] = []
    before: list[Choice] = [()]
    for depth in range(max(map(len, choices), default=0)):
        new = [n for n, choice in enumerate(choices) if len(choice) == depth + 1]
        queried = sorted({conditioning_paths[n] for n in new}, key=node.__getitem__)
        columns = (
            [node[choice] for choice in queried],
            [before.index(choice[:-1]) if choice else 0 for choice in queried],
            [n + 1 for n in new],
            [queried.index(conditioning_paths[n]) for n in new],
            [choices[n][-1] for n in new],
        )
        asked_K, rows_K, nodes_J, from_J, ranks_J = (torch.tensor(one, device=device) for one in columns)
        levels.append(TreeLevel(asked_K, rows_K, nodes_J, from_J, ranks_J, max(columns[-1]) + 1))
        before = queried
    return parents_N, levels


def keep_real_nodes(tokens_N: Tensor, parents_N: Tensor, real_N: Tensor, height: int) -> TokenTree:
    """The tree without the nodes that are not real; what hangs from one of those is none either."""
    new_index_N = real_N.cumsum(0) - 1
    parents_N = torch.where(parents_N < 0, -1, new_index_N[parents_N.clamp(min=0)])
    return TokenTree(tokens_N[real_N], parents_N[real_N], height)
