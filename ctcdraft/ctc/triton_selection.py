"""The kernels that select the best children of a level of the search over label-conditioned frames, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.ctc.prefix_search import MAX_CHILDREN
from ctcdraft.ctc.triton_conditioned import (
    RANK_AT_ONCE,
    TOKENS,
    as_factor,
    block_count,
    factors,
    shapes,
    sizes,
    token_probs,
)
from ctcdraft.ctc.triton_prefix import LOW_BITS, rounded
from ctcdraft.fused import block

# The bounds are float32: of blocks that all but tie for the last place a few more are searched.
SPARE_PAIRS = 8
RANKED_AT_ONCE = 8192  # candidates that one is compared with


def select_children(
    log_probs_TC: Tensor, memory_KR: Tensor, out_VR: Tensor, tokens_K: Tensor, mass_K: Tensor, masses_3KT: Tensor,
    is_empty: bool, merges: bool, tokens_N: Tensor, parents_N: Tensor, masses_N: Tensor,
) -> None:  # fmt: skip
    rows, nodes, blocks = len(memory_KR), len(tokens_N), block_count(log_probs_TC)
    merges = merges and not is_empty
    if max(log_probs_TC.shape[1], nodes * blocks) > MAX_CHILDREN:
        raise ValueError(
            f"{nodes} nodes and {log_probs_TC.shape[1]} classes are more than the kernels can rank, which is "
            f"{MAX_CHILDREN} classes and as many blocks of {TOKENS} of them after all nodes; lower nodes"
        )
    bounds_KB = log_probs_TC.new_empty((rows, blocks), dtype=torch.float32)
    given, shared = (log_probs_TC, memory_KR, out_VR, tokens_K), (*sizes(log_probs_TC, out_VR, rows), blocks)
    bound_kernel[(blocks,)](*given, masses_3KT, bounds_KB, *shared, merges=merges, **shapes(log_probs_TC, rows))
    pairs = min(nodes + SPARE_PAIRS, bounds_KB.numel())
    chosen_P = bounds_KB.view(-1).topk(pairs).indices
    keys_PV = log_probs_TC.new_empty((pairs, TOKENS), dtype=torch.int64)
    masses_PV = log_probs_TC.new_empty((pairs, TOKENS), dtype=torch.float64)
    mass_kernel[(pairs,)](
        *given, mass_K, masses_3KT, chosen_P, keys_PV, masses_PV, *shared,
        is_empty=is_empty, merges=merges, V=TOKENS, R=RANK_AT_ONCE,
    )  # fmt: skip
    found = chosen_P, keys_PV, masses_PV, tokens_N, parents_N, masses_N
    candidates = min(block(pairs * TOKENS), RANKED_AT_ONCE)
    select_kernel[(pairs,)](*found, pairs, blocks, nodes, N=block(nodes), V=TOKENS, R=candidates, num_warps=8)


def select_levels(tokens_LN: Tensor, parents_LN: Tensor, masses_LN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    depth, nodes = tokens_LN.shape
    ranked = tokens_LN.new_empty(nodes), tokens_LN.new_empty(nodes), masses_LN.new_empty(nodes)
    size = depth * nodes
    levels_kernel[(size,)](tokens_LN, parents_LN, masses_LN, *ranked, size, nodes, R=block(size))
    return ranked


@triton.jit
def bound_kernel(
    log_probs_TC, memory_KR, out_VR, tokens_K, masses_3KT, bounds_KB, row_stride, token_stride, rank_stride, frames,
    vocabulary, rank, rows, blocks, merges: tl.constexpr, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    token_V, row_K, frame_T = block * V + tl.arange(0, V), tl.arange(0, K), tl.arange(0, T)
    factor_KV = factors(memory_KR, out_VR, token_V, row_K, token_stride, rank_stride, vocabulary, rank, rows, K, V, R)
    probs_TV = token_probs(log_probs_TC, token_V, frame_T, row_stride, frames, vocabulary)
    real_KT = (row_K[:, None] < rows) & (frame_T[None, :] < frames)
    place_KT = masses_3KT + row_K[:, None] * frames + frame_T[None, :]
    scale_KT = tl.load(place_KT + 2 * rows * frames, mask=real_KT, other=0)
    either_KT = tl.load(place_KT + rows * frames, mask=real_KT, other=0)
    bound_KV = tl.dot((either_KT * scale_KT).to(tl.float32), probs_TV, input_precision="ieee")
    if merges:
        in_blank_KT = tl.load(place_KT, mask=real_KT, other=0)
        repeat_KV = tl.dot((in_blank_KT * scale_KT).to(tl.float32), probs_TV, input_precision="ieee")
        last_K = tl.load(tokens_K + row_K, mask=row_K < rows, other=-1)
        bound_KV = tl.where(last_K[:, None] == token_V[None, :], repeat_KV, bound_KV)
    tl.store(bounds_KB + row_K * blocks + block, tl.max(bound_KV * factor_KV, 1), mask=row_K < rows)


@triton.jit
def mass_kernel(
    log_probs_TC, memory_KR, out_VR, tokens_K, mass_K, masses_3KT, chosen_P, keys_PV, masses_PV, row_stride,
    token_stride, rank_stride, frames, vocabulary, rank, rows, blocks, is_empty: tl.constexpr, merges: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    pair, index_V = tl.program_id(0), tl.arange(0, V)
    chosen = tl.load(chosen_P + pair)
    row, token_V = chosen // blocks, chosen % blocks * V + index_V
    real_V = token_V < vocabulary
    logits_V = tl.zeros([V], tl.float32)
    for start in range(0, rank, R):
        index_R = start + tl.arange(0, R)
        memory_R = tl.load(memory_KR + row * rank + index_R, mask=index_R < rank, other=0).to(tl.float32)
        place_VR = token_V[:, None] * token_stride + index_R[None, :] * rank_stride
        out = tl.load(out_VR + place_VR, mask=real_V[:, None] & (index_R[None, :] < rank), other=0).to(tl.float32)
        logits_V += tl.sum(out * memory_R[None, :], 1)
    factor_V = as_factor(logits_V).to(tl.float64)
    last = tl.full((), -1, tl.int64)
    max_mass = tl.full((), 1.0, tl.float64)
    if not is_empty:
        last, max_mass = tl.load(tokens_K + row), tl.load(mass_K + row)
    mass_V = tl.zeros([V], tl.float64)
    for frame in range(frames):
        place = masses_3KT + row * frames + frame
        before_V = tl.zeros([V], tl.float64) + tl.load(place + rows * frames)
        if merges:
            before_V = tl.where(token_V == last, tl.load(place), before_V)
        prob_V = tl.load(log_probs_TC + frame * row_stride + token_V, mask=real_V, other=-float("inf")).to(tl.float64)
        mass_V += before_V * tl.exp(prob_V) * (factor_V * tl.load(place + 2 * rows * frames))
    # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
    mass_V = tl.minimum(mass_V, max_mass)
    key_V = tl.where(real_V & (mass_V > 0), rounded(mass_V) | (token_V ^ LOW_BITS), 0)
    tl.store(keys_PV + pair * V + index_V, key_V)
    tl.store(masses_PV + pair * V + index_V, mass_V)


@triton.jit
def select_kernel(
    chosen_P, keys_PV, masses_PV, tokens_N, rows_N, masses_N, pairs, blocks, nodes, N: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """One program per pair. The rank of a candidate is the number of those before it, so that no program waits for
    another; of a pair's own, the best come first, until one is not among the nodes.

    Equal masses: by the parent's row and the block of tokens, then (within a pair) by token id.
    """
    pair, index_V, index_R = tl.program_id(0), tl.arange(0, V), tl.arange(0, R)
    chosen, key_V, size = tl.load(chosen_P + pair), tl.load(keys_PV + pair * V + index_V), pairs * V
    key, rank, exist = tl.max(key_V, 0), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (key > 0) & (rank < nodes):
        mass, token = key & ~LOW_BITS, (key & LOW_BITS) ^ LOW_BITS
        rank = tl.full((), 0, tl.int32)
        for start in range(0, size, R):
            other_R = start + index_R
            other_mass_R = tl.load(keys_PV + other_R, mask=other_R < size, other=0) & ~LOW_BITS
            other_chosen_R = tl.load(chosen_P + other_R // V, mask=other_R < size, other=0)
            comes_first_R = (other_chosen_R < chosen) | ((other_chosen_R == chosen) & (other_R % V < token % V))
            is_before_R = (other_mass_R > mass) | ((other_mass_R == mass) & comes_first_R)
            rank += tl.sum(is_before_R.to(tl.int32), 0)
        is_node = rank < nodes
        tl.store(tokens_N + rank, token, mask=is_node)
        tl.store(rows_N + rank, chosen // blocks, mask=is_node)
        tl.store(masses_N + rank, tl.load(masses_PV + pair * V + token % V), mask=is_node)
        key = tl.max(tl.where(key_V < key, key_V, 0), 0)
    if pair == 0:  # nodes that there are not
        for start in range(0, size, R):
            key_R = tl.load(keys_PV + start + index_R, mask=start + index_R < size, other=0)
            exist += tl.sum((key_R > 0).to(tl.int32), 0)
        node_N = tl.arange(0, N)
        is_none_N = (node_N >= exist) & (node_N < nodes)
        tl.store(tokens_N + node_N, tl.zeros([N], tl.int64), mask=is_none_N)
        tl.store(rows_N + node_N, tl.zeros([N], tl.int64), mask=is_none_N)
        tl.store(masses_N + node_N, tl.zeros([N], tl.float64), mask=is_none_N)


@triton.jit
def levels_kernel(
    tokens_R, parents_R, masses_R, tokens_N, parents_N, masses_N, size, nodes, R: tl.constexpr,
):  # fmt: skip
    """One program per node of a level; of equal masses the first is first, so that parents precede children."""
    index, index_R = tl.program_id(0), tl.arange(0, R)
    key_R = order_key(tl.load(masses_R + index_R, mask=index_R < size, other=0), index_R)
    key_R = tl.where(index_R < size, key_R, -1)
    mass = tl.load(masses_R + index)
    rank = tl.sum((key_R > order_key(mass, index)).to(tl.int32), 0)
    # The parent is in the level above; the first level's is the empty prefix.
    has_parent = index >= nodes
    above = tl.where(has_parent, (index // nodes - 1) * nodes + tl.load(parents_R + index), 0)
    above_rank = tl.sum((key_R > order_key(tl.load(masses_R + above), above)).to(tl.int32), 0)
    is_node = rank < nodes
    tl.store(tokens_N + rank, tl.load(tokens_R + index), mask=is_node)
    tl.store(parents_N + rank, tl.where(has_parent, above_rank, -1), mask=is_node)
    tl.store(masses_N + rank, mass, mask=is_node)


@triton.jit
def order_key(mass, index):
    return rounded(mass) | (index.to(tl.int64) ^ LOW_BITS)
