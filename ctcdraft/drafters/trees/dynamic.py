"""The dynamic tree of EAGLE-2: the most probable draft texts under a node budget, found level by level."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.decoding.tree import TokenTree
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


def build_dynamic_tree(
    step_function: StepFunction, request: TreeRequest, width: int, children: int, prune: bool = False
) -> TokenTree:
    """Keep the nodes - 1 most probable nodes of every level, continue `width` of them; then keep the best of all.

    A text is never more probable than its prefix, so no node is kept without its parent, and the n best of each level
    suffice. Below a stop token nothing is drafted, and tokens of probability zero are left out.

        p(a) = .6  p(b) = .4        p(c | a) = .5  p(d | a) = .5       p(e | b) = .9
        4 draft tokens:  a .6   b .4   e .36   c .3      (b e is better than a d; of equals the first)

    Args:
        prune: do not continue texts that cannot be in the tree, on a CPU. The tree is the same but for exact ties; it
            pays where every prefix costs logits over the whole vocabulary.
    """
    root, count = request.root, request.nodes - 1
    if request.depth < 1 or count < 1:
        return TokenTree.only_root(root)
    prune = prune and root.is_cpu and not request.padded  # elsewhere asking would stall every level
    stop_ids = request.stop_ids_S()
    tokens_K, rows_K = root.reshape(1), torch.zeros_like(root.reshape(1))
    nodes_K, log_probs_K = rows_K, torch.zeros(1, device=root.device)  # node 0 is the root, of probability 1
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    best_N, first = log_probs_K[:0], 1
    for _ in range(request.depth):
        # Rounding may leave a log-probability above 0; a child must never be more probable than its parent.
        joint_KV = log_probs_K[:, None] + step_function(tokens_K, rows_K).clamp(max=0)
        best_KW, tokens_KW = joint_KV.topk(min(children, count, joint_KV.shape[1]), dim=1)
        joint_N, chosen_N = best_KW.flatten().topk(min(count, best_KW.numel()))
        tokens_N = tokens_KW.flatten()[chosen_N]
        rows_N = chosen_N // tokens_KW.shape[1]
        levels.append((tokens_N, nodes_K[rows_N], joint_N))
        extendable_N = joint_N.masked_fill(torch.isin(tokens_N, stop_ids), -torch.inf)
        log_probs_K, continued_K = extendable_N.topk(min(width, len(extendable_N)))
        if prune:
            best_N = torch.cat([best_N, joint_N]).topk(min(count, len(best_N) + len(joint_N))).values
            if len(best_N) == count:
                live = int((log_probs_K > best_N[-1]).sum())  # sorted: the live texts come first
                log_probs_K, continued_K = log_probs_K[:live], continued_K[:live]
                if not live:
                    break
        # Fewer than `width` nodes may be extendable; the others are continued with probability zero.
        tokens_K, rows_K, nodes_K = tokens_N[continued_K], rows_N[continued_K], first + continued_K
        first += len(tokens_N)
    return top_nodes_tree(root, levels, count, request.padded)


def top_nodes_tree(
    root: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]], count: int, padded: bool = False
) -> TokenTree:
    """Return the tree of the `count` most probable candidates. padded: impossible ones are padding.

    Args:
        levels: per level tokens_R, parents_R and joint log-probabilities_R. Candidates are numbered from 1 across
            levels, parent 0 is the root; a parent comes before its children.
    """
    tokens_R, parents_R, joint_R = (torch.cat(parts) for parts in zip(*levels, strict=True))
    best_N = joint_R.argsort(descending=True, stable=True)[:count]  # stable: of equals the parent before its child
    if not padded:
        best_N = best_N[joint_R[best_N] > -torch.inf]
    node_R = tokens_R.new_zeros(len(tokens_R) + 1)
    node_R[best_N + 1] = torch.arange(1, len(best_N) + 1, device=best_N.device)
    if padded:
        real_N = joint_R[best_N] > -torch.inf
        return TokenTree.padded(root, tokens_R[best_N], node_R[parents_R[best_N]], real_N, count + 1, len(levels))
    tokens_N = torch.cat([root.reshape(1), tokens_R[best_N]])
    parents_N = torch.cat([torch.full_like(root.reshape(1), -1), node_R[parents_R[best_N]]])
    path_probs_N = F.pad(joint_R[best_N].exp(), (1, 0), value=1.0)
    return TokenTree(tokens_N, parents_N, height=len(levels), path_probs_N=path_probs_N)
