"""The dynamic tree of EAGLE-2: the most probable draft texts under a node budget, found level by level."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.level_operations import best_children, best_nodes
from ctcdraft.drafters.trees.request import StepFunction, TreeRequest
from ctcdraft.errors import check_int


class DynamicTree:
    """EAGLE-2's dynamic tree (Li et al. 2024). With width and children None it holds exactly the most probable texts.

    Width 1 is a chain whose nodes have siblings, width 1 with one child is a chain.

    Args:
        width: nodes of a level that are continued; None for as many as the tree may have.
        children: of one node; None for as many as the tree may have.
    """

    fixed_shapes = True

    def __init__(self, width: int | None, children: int | None) -> None:
        self.width = check_int(width, "drafter.tree.width", null=True)
        self.children = check_int(children, "drafter.tree.children", null=True)

    def __call__(self, step_function: StepFunction, request: TreeRequest) -> TokenTree:
        width, children = self.width or request.nodes, self.children or request.nodes
        return build_dynamic_tree(step_function, request, width, children)


def build_dynamic_tree(step_function: StepFunction, request: TreeRequest, width: int, children: int) -> TokenTree:
    """Keep the nodes - 1 most probable nodes of every level, continue `width` of them; then keep the best of all.

    A text is never more probable than its prefix, so no node is kept without its parent, and the n best of each level
    suffice. Below a stop token nothing is drafted, and tokens of probability zero are left out.

        p(a) = .6  p(b) = .4        p(c | a) = .5  p(d | a) = .5       p(e | b) = .9
        4 draft tokens:  a .6   b .4   e .36   c .3      (b e is better than a d; of equals the first)

    On a CPU, unless padded, a node is not continued once nodes - 1 others are at least as probable. The tree is the
    same, from fewer forward passes with fewer rows.
    """
    root, count = request.root, request.nodes - 1
    if request.depth < 1 or count < 1:
        return TokenTree.only_root(root)
    prune = root.is_cpu and not request.padded  # elsewhere the host would wait for every level
    stops_S = request.stop_ids_S()
    tokens_K, rows_K = root.reshape(1), torch.zeros_like(root.reshape(1))
    nodes_K, log_probs_K = rows_K, torch.zeros(1, device=root.device)  # node 0 is the root, of probability 1
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    best_N, first = log_probs_K[:0], 1
    choose = best_children if request.padded else best_children.definition
    for _ in range(request.depth):
        log_probs_KV = step_function(tokens_K, rows_K)
        best = log_probs_KV.topk(min(children, count, log_probs_KV.shape[1]), dim=1)
        level = choose(*best, log_probs_K, nodes_K, stops_S, first, count, width)
        levels.append(level[:3])
        tokens_K, rows_K, nodes_K, log_probs_K = level[3:]
        first, joint_N = first + len(level[0]), level[2]
        if prune:
            best_N = torch.cat([best_N, joint_N]).topk(min(count, len(best_N) + len(joint_N))).values
            least = best_N[-1] if len(best_N) == count else -torch.inf
            live = int((log_probs_K > least).sum())  # sorted: the live texts come first
            if not live:
                break
            tokens_K, rows_K, nodes_K, log_probs_K = (column_K[:live] for column_K in level[3:])
    return top_nodes_tree(root, levels, count, request.padded)


def top_nodes_tree(
    root: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]], count: int, padded: bool = False
) -> TokenTree:
    """Return the tree of the `count` most probable candidates. padded: impossible ones are padding.

    Args:
        levels: per level tokens_R, parents_R and joint log-probabilities_R. Candidates are numbered from 1 across
            levels, parent 0 is the root; a parent comes before its children.
    """
    candidates = (torch.cat(parts) for parts in zip(*levels, strict=True))
    tokens_N, parents_N, joint_N = (best_nodes if padded else best_nodes.definition)(*candidates, count)
    if padded:
        return TokenTree.padded(root, tokens_N, parents_N, joint_N, count + 1, len(levels), least=-torch.inf)
    real = int((joint_N > -torch.inf).sum())  # these come first
    tokens_N = torch.cat([root.reshape(1), tokens_N[:real]])
    parents_N = torch.cat([torch.full_like(root.reshape(1), -1), parents_N[:real]])
    path_probs_N = F.pad(joint_N[:real].exp(), (1, 0), value=1.0)
    return TokenTree(tokens_N, parents_N, height=len(levels), path_probs_N=path_probs_N)
