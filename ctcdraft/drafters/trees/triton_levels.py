"""The kernels of `level_operations.py`, in Triton: one program each, as a tree has few nodes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.fused import block


def best_children(
    best_KW: Tensor, tokens_KW: Tensor, log_probs_K: Tensor, nodes_K: Tensor, stops_S: Tensor, first: int, count: int,
    width: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    children = tokens_KW.shape[1]
    count = min(count, tokens_KW.numel())
    width = min(width, count)
    tokens_N, parents_N, joint_N = nodes_K.new_empty(count), nodes_K.new_empty(count), best_KW.new_empty(count)
    following = *(nodes_K.new_empty(width) for _ in range(3)), best_KW.new_empty(width)
    given = best_KW.contiguous(), tokens_KW.contiguous(), log_probs_K, nodes_K, stops_S, tokens_N, parents_N, joint_N
    sizes = first, count, width, tokens_KW.numel(), children, len(stops_S)
    blocks = {"R": block(tokens_KW.numel()), "N": block(count), "S": block(len(stops_S))}
    children_kernel[(1,)](*given, *following, *sizes, **blocks, num_warps=4)
    return tokens_N, parents_N, joint_N, *following


@triton.jit
def first_best(score_R, alive_R, index_R, size):
    """Return the first index of the largest score that is alive."""
    best = tl.max(tl.where(alive_R, score_R, -float("inf")), 0)
    return tl.min(tl.where(alive_R & (score_R == best), index_R, size), 0)


@triton.jit
def children_kernel(
    best_R, tokens_R, log_probs_K, nodes_K, stops_S, tokens_N, parents_N, joint_N, next_tokens_K, next_rows_K,
    next_nodes_K, next_log_probs_K, first, count, width, size, children, stop_count, R: tl.constexpr, N: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    index_R, index_N = tl.arange(0, R), tl.arange(0, N)
    stop_S = tl.load(stops_S + tl.arange(0, S), mask=tl.arange(0, S) < stop_count, other=-2)
    own_R = tl.load(best_R + index_R, mask=index_R < size, other=0)
    own_R = tl.where(own_R == own_R, own_R, -float("inf"))  # NaN
    joint_R = tl.load(log_probs_K + index_R // children, mask=index_R < size, other=0) + tl.minimum(own_R, 0.0)
    alive_R = index_R < size
    extendable_N = tl.full([N], -float("inf"), joint_R.dtype)
    token_N, row_N = tl.zeros([N], tl.int64), tl.zeros([N], tl.int64)
    for place in range(count):
        chosen = first_best(joint_R, alive_R, index_R, size)
        alive_R = alive_R & (index_R != chosen)
        token, row = tl.load(tokens_R + chosen), chosen // children
        joint = tl.max(tl.where(index_R == chosen, joint_R, -float("inf")), 0)
        tl.store(tokens_N + place, token)
        tl.store(parents_N + place, tl.load(nodes_K + row))
        tl.store(joint_N + place, joint)
        is_stop = tl.max((stop_S == token).to(tl.int32), 0) > 0
        extendable_N = tl.where((index_N == place) & (is_stop == 0), joint, extendable_N)
        token_N = tl.where(index_N == place, token, token_N)
        row_N = tl.where(index_N == place, row, row_N)
    alive_N = index_N < count
    for place in range(width):
        chosen = first_best(extendable_N, alive_N, index_N, count)
        alive_N = alive_N & (index_N != chosen)
        tl.store(next_tokens_K + place, tl.sum(tl.where(index_N == chosen, token_N, 0), 0))
        tl.store(next_rows_K + place, tl.sum(tl.where(index_N == chosen, row_N, 0), 0))
        tl.store(next_nodes_K + place, first + chosen)
        tl.store(next_log_probs_K + place, tl.max(tl.where(index_N == chosen, extendable_N, -float("inf")), 0))


def best_nodes(tokens_R: Tensor, parents_R: Tensor, joint_R: Tensor, count: int) -> tuple[Tensor, ...]:
    size = len(tokens_R)
    count = min(count, size)
    out = tokens_R.new_empty(count), tokens_R.new_empty(count), joint_R.new_empty(count)
    nodes_kernel[(1,)](tokens_R, parents_R, joint_R, *out, count, size, R=block(size))
    return out


@triton.jit
def nodes_kernel(tokens_R, parents_R, joint_R, tokens_N, parents_N, joint_N, count, size, R: tl.constexpr):
    index_R = tl.arange(0, R)
    alive_R = index_R < size
    score_R = tl.load(joint_R + index_R, mask=alive_R, other=0)
    node_R = tl.zeros([R], tl.int64)  # of the candidates chosen so far; a parent is chosen before its children
    for place in range(count):
        chosen = first_best(score_R, alive_R, index_R, size)
        alive_R = alive_R & (index_R != chosen)
        parent = tl.load(parents_R + chosen)
        tl.store(tokens_N + place, tl.load(tokens_R + chosen))
        tl.store(parents_N + place, tl.sum(tl.where(index_R == parent - 1, node_R, 0), 0))
        tl.store(joint_N + place, tl.load(joint_R + chosen))
        node_R = tl.where(index_R == chosen, place + 1, node_R)


def place_level(
    best_KR: Tensor, tokens_KR: Tensor, parents_N: Tensor, nodes_J: Tensor, query_rows_J: Tensor, ranks_J: Tensor,
    next_nodes_K: Tensor, stops_S: Tensor, tokens_N: Tensor, real_N: Tensor, log_probs_N: Tensor,
) -> Tensor:  # fmt: skip
    next_tokens_K = tokens_N.new_empty(len(next_nodes_K))
    level = best_KR.contiguous(), tokens_KR.contiguous(), parents_N, nodes_J, query_rows_J, ranks_J, next_nodes_K
    sizes = len(nodes_J), len(next_nodes_K), best_KR.shape[1], len(stops_S)
    place_kernel[(1,)](
        *level, stops_S, tokens_N, real_N, log_probs_N, next_tokens_K, *sizes,
        J=block(len(nodes_J)), K=block(len(next_nodes_K)), S=block(len(stops_S)),
    )  # fmt: skip
    return next_tokens_K


@triton.jit
def place_kernel(
    best_KR, tokens_KR, parents_N, nodes_J, query_rows_J, ranks_J, next_nodes_K, stops_S, tokens_N, real_N,
    log_probs_N, next_tokens_K, new, following, ranks, stop_count, J: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    index_J, index_K = tl.arange(0, J), tl.arange(0, K)
    given_J = index_J < new
    stop_S = tl.load(stops_S + tl.arange(0, S), mask=tl.arange(0, S) < stop_count, other=-2)
    node_J, rank_J = tl.load(nodes_J + index_J, mask=given_J), tl.load(ranks_J + index_J, mask=given_J, other=0)
    entry_J = tl.load(query_rows_J + index_J, mask=given_J, other=0) * ranks + tl.minimum(rank_J, ranks - 1)
    parent_J = tl.load(parents_N + node_J, mask=given_J, other=0)
    above_J = tl.load(tokens_N + parent_J, mask=given_J, other=-1)
    is_stop_J = tl.max((above_J[:, None] == stop_S[None, :]).to(tl.int32), 1) > 0
    extendable_J = (tl.load(real_N + parent_J, mask=given_J, other=0) != 0) & ((parent_J == 0) | (is_stop_J == 0))
    best_J = tl.load(best_KR + entry_J, mask=given_J, other=0).to(tl.float32)
    joint_J = tl.load(log_probs_N + parent_J, mask=given_J, other=0) + best_J
    tl.store(tokens_N + node_J, tl.load(tokens_KR + entry_J, mask=given_J, other=0), mask=given_J)
    tl.store(log_probs_N + node_J, joint_J, mask=given_J)
    tl.store(real_N + node_J, (rank_J < ranks) & extendable_J & (best_J > -float("inf")), mask=given_J)
    tl.debug_barrier()  # other threads have written the tokens read now
    next_K = tl.load(next_nodes_K + index_K, mask=index_K < following, other=0)
    next_token_K = tl.load(tokens_N + next_K, mask=index_K < following, other=0)
    tl.store(next_tokens_K + index_K, next_token_K, mask=index_K < following)
