"""One level of a token tree that is built from next-token distributions. The kernels are in `triton_levels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ctcdraft.fused import fused

KERNELS = "ctcdraft.drafters.trees.triton_levels"


@fused(KERNELS, launches=1)
def best_children(
    best_KW: Tensor, tokens_KW: Tensor, log_probs_K: Tensor, nodes_K: Tensor, stops_S: Tensor, first: int, count: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the `count` most probable children of a level's nodes, best first, and the `width` to continue.

    Of equals the first come first. Below a stop token nothing is continued.

    Args:
        best_KW: log-probabilities of W tokens after each of K nodes, tokens_KW.
        log_probs_K, nodes_K: the nodes' own joint log-probabilities and numbers.
        first: number of the first child.

    Returns:
        tokens_N, parents_N and joint log-probabilities_N of the children; of those that are continued the tokens, the
        rows of their parents, their own numbers and joint log-probabilities, -inf where nothing may follow.
    """
    # Rounding may leave a log-probability above 0; a child must never be more probable than its parent. NaN, of an
    # overflow in half precision, would come before all others.
    joint_R = (log_probs_K[:, None] + best_KW.clamp(max=0)).flatten().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    joint_R, order_R = joint_R.sort(descending=True, stable=True)
    joint_N, chosen_N = joint_R[:count], order_R[:count]
    tokens_N, rows_N = tokens_KW.flatten()[chosen_N], chosen_N // tokens_KW.shape[1]
    extendable_N = joint_N.masked_fill(torch.isin(tokens_N, stops_S), -torch.inf)
    extendable_N, order_N = extendable_N.sort(descending=True, stable=True)
    continued_K = order_N[:width]
    following = tokens_N[continued_K], rows_N[continued_K], continued_K + first, extendable_N[:width].clone()
    return tokens_N, nodes_K[rows_N], joint_N.clone(), *following


@fused(KERNELS, launches=1)
def best_nodes(tokens_R: Tensor, parents_R: Tensor, joint_R: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` most probable of all candidates, best first: tokens_N, parents_N, joint log-probabilities_N.

    parents_R: candidates, numbered from 1, a parent before its children; 0 is the root. parents_N: the same numbers of
    the nodes returned.
    """
    best_N = joint_R.argsort(descending=True, stable=True)[:count]  # stable: of equals the parent before its child
    node_R = tokens_R.new_zeros(len(tokens_R) + 1)
    node_R[best_N + 1] = torch.arange(1, len(best_N) + 1, device=best_N.device)
    return tokens_R[best_N], node_R[parents_R[best_N]], joint_R[best_N]


@fused(KERNELS, launches=1, writes=("tokens_N", "real_N", "log_probs_N"))
def place_level(
    best_KR: Tensor, tokens_KR: Tensor, parents_N: Tensor, nodes_J: Tensor, query_rows_J: Tensor, ranks_J: Tensor,
    next_nodes_K: Tensor, stops_S: Tensor, tokens_N: Tensor, real_N: Tensor, log_probs_N: Tensor,
) -> Tensor:  # fmt: skip
    """Write a level of a static tree: node nodes_J[j] has rank ranks_J[j] in row query_rows_J[j] of the best tokens.

    Return the tokens of the nodes whose next-token distributions are needed next.
    """
    in_range_J = ranks_J < best_KR.shape[1]
    entry = query_rows_J, ranks_J.clamp(max=best_KR.shape[1] - 1)
    parents_J = parents_N[nodes_J]
    extendable_J = real_N[parents_J] & ((parents_J == 0) | ~torch.isin(tokens_N[parents_J], stops_S))
    tokens_N[nodes_J] = tokens_KR[entry]
    best_J = best_KR[entry].float()
    log_probs_N[nodes_J] = log_probs_N[parents_J] + best_J
    real_N[nodes_J] = in_range_J & extendable_J & (best_J > -torch.inf)
    return tokens_N[next_nodes_K]
