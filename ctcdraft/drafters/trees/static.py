"""Static trees: which ranks are drafted is fixed beforehand, as in Medusa and EAGLE-1."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.level_operations import place_level
from ctcdraft.drafters.trees.request import StepFunction, TreeRequest
from ctcdraft.errors import InputError

Choice = tuple[int, ...]


class StaticTree:
    """A fixed list of choices: paths of ranks, [0, 2] being the third most probable token after the most probable.

    The children of a node are ranked by the distribution behind its own text. The choices are listed with the most
    promising first, each after the one it continues; of those within the depth the first ones are kept, as many as
    there are nodes for. Tokens of probability zero and descendants of a stop token are left out.
    """

    fixed_shapes = True
    # What is left out is not replaced, so a larger tree may lose other choices and keep fewer of the first ones.
    has_nested_trees = False

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.choices = tuple(tuple(choice) for choice in choices)
        known: set[Choice] = {()}
        for choice in self.choices:
            if not choice or min(choice) < 0:
                raise InputError(f"choices must be lists of ranks >= 0, got {list(choice)}")
            if choice[:-1] not in known or self.conditioning_path(choice[:-1]) not in known:
                raise InputError(f"choices has {list(choice)} before the choice that it continues; list that first")
            known.add(choice)

    def conditioning_path(self, parent: Choice) -> Choice:
        """Return the path whose next-token distribution ranks the children of a node."""
        return parent

    def __call__(self, step_function: StepFunction, request: TreeRequest) -> TokenTree:
        root = request.root
        choices = tuple(choice for choice in self.choices if len(choice) <= request.depth)[: request.nodes - 1]
        conditioning_paths = tuple(self.conditioning_path(choice[:-1]) for choice in choices)
        parents_N, levels = plan_levels(choices, conditioning_paths, root.device)
        stops_S, tokens_N = request.stop_ids_S(), root.repeat(len(choices) + 1)
        place = place_level if request.padded else place_level.definition
        # All nodes are kept until the end: shapes that depended on the tokens would be host synchronisations.
        real_N = torch.ones_like(tokens_N, dtype=torch.bool)
        path_log_probs_N = torch.zeros_like(tokens_N, dtype=torch.float32)
        tokens_K = tokens_N[:1]
        for number, level in enumerate(levels):
            log_probs_KV = step_function(tokens_K, level.rows_K)
            best = log_probs_KV.topk(min(level.ranks, log_probs_KV.shape[1]), dim=1)
            new, queried = (level.nodes_J, level.query_rows_J, level.ranks_J), levels[number + 1 : number + 2]
            next_K = queried[0].query_nodes_K if queried else parents_N[:0]
            tokens_K = place(*best, parents_N, *new, next_K, stops_S, tokens_N, real_N, path_log_probs_N)
        if request.padded:
            return TokenTree.padded(root, tokens_N[1:], parents_N[1:], real_N[1:], len(tokens_N), len(levels))
        return keep_real_nodes(tokens_N, parents_N, real_N, len(levels), path_log_probs_N.exp())


class GreedyPathTree(StaticTree):
    """The tree of the CTC paper's released code: all nodes of a level are ranked by one distribution, the one behind
    the greedy path, whatever their own parents are."""

    def conditioning_path(self, parent: Choice) -> Choice:
        return (0,) * len(parent)


def cheapest(
    start: Choice, cost: Callable[[Choice], float], successors: Callable[[Choice], Iterable[Choice]], count: int
) -> list[Choice]:
    """Return the `count` rank sequences of least cost, best first; a successor must not cost less than its origin."""
    heap, seen = [(cost(start), start)], {start}
    chosen: list[Choice] = []
    while heap and len(chosen) < count:
        chosen.append(heapq.heappop(heap)[1])
        for other in successors(chosen[-1]):
            if other not in seen:
                seen.add(other)
                heapq.heappush(heap, (cost(other), other))
    return chosen


@dataclass(frozen=True)
class TreeLevel:
    """One call of the step function and the new nodes it gives."""

    query_nodes_K: Tensor  # nodes whose next-token distributions are computed
    rows_K: Tensor  # rows of the previous call that these continue
    nodes_J: Tensor  # the new nodes; node j has rank ranks_J[j] in row query_rows_J[j]
    query_rows_J: Tensor
    ranks_J: Tensor
    ranks: int  # how many are needed


@cache  # built in Python and copied to the device, where captured graphs go on reading them
def plan_levels(
    choices: tuple[Choice, ...], conditioning_paths: tuple[Choice, ...], device: torch.device
) -> tuple[Tensor, list[TreeLevel]]:
    """Return parents_N of the whole tree and its levels. Node n + 1 is choice n."""
    node = {(): 0} | {choice: n + 1 for n, choice in enumerate(choices)}
    parents_N = torch.tensor([-1, *(node[choice[:-1]] for choice in choices)], device=device)
    levels: list[TreeLevel] = []
    previous: list[Choice] = [()]
    for depth in range(max(map(len, choices), default=0)):
        new = [n for n, choice in enumerate(choices) if len(choice) == depth + 1]
        queried = sorted({conditioning_paths[n] for n in new}, key=node.__getitem__)
        columns = (
            [node[choice] for choice in queried],
            [previous.index(choice[:-1]) if choice else 0 for choice in queried],
            [n + 1 for n in new],
            [queried.index(conditioning_paths[n]) for n in new],
            [choices[n][-1] for n in new],
        )
        queries_K, rows_K, nodes_J, query_rows_J, ranks_J = (torch.tensor(one, device=device) for one in columns)
        levels.append(TreeLevel(queries_K, rows_K, nodes_J, query_rows_J, ranks_J, max(columns[-1]) + 1))
        previous = queried
    return parents_N, levels


def keep_real_nodes(
    tokens_N: Tensor, parents_N: Tensor, real_N: Tensor, height: int, path_probs_N: Tensor
) -> TokenTree:
    """Return the tree without the nodes that are not real; descendants of such a node must not be real either."""
    # Masking waits for the number of nodes that are left: a host synchronisation, but one per tree.
    new_index_N = real_N.cumsum(0) - 1
    parents_N = torch.where(parents_N < 0, -1, new_index_N[parents_N.clamp(min=0)])
    return TokenTree(tokens_N[real_N], parents_N[real_N], height, path_probs_N=path_probs_N[real_N])
