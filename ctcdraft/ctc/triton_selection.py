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
    select_kernel[(1,)](*found, pairs, blocks, nodes, P=block(pairs), V=TOKENS, num_warps=8)


def select_levels(tokens_LN: Tensor, parents_LN: Tensor, masses_LN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    depth, nodes = tokens_LN.shape
    ranked = tokens_LN.new_empty(nodes), tokens_LN.new_empty(nodes), masses_LN.new_empty(nodes)
    levels_kernel[(1,)](tokens_LN, parents_LN, masses_LN, *ranked, depth * nodes, nodes, R=block(depth * nodes))
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
    chosen_P, keys_PV, masses_PV, tokens_N, rows_N, masses_N, pairs, blocks, nodes, P: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    pair_P, index_V = tl.arange(0, P), tl.arange(0, V)
    chosen_index_P = tl.load(chosen_P + pair_P, mask=pair_P < pairs, other=0)
    place_PV = pair_P[:, None] * V + index_V[None, :]
    best_key_P = tl.max(tl.load(keys_PV + place_PV, mask=pair_P[:, None] < pairs, other=0), 1)
    for node in range(nodes):
        # Equal masses: by the parent's row and the block of tokens, then (within a pair) by token id.
        rank_P = tl.where(best_key_P > 0, (best_key_P & ~LOW_BITS) | (chosen_index_P ^ LOW_BITS), 0)
        best_rank = tl.max(rank_P, 0)
        chosen = (best_rank & LOW_BITS) ^ LOW_BITS
        is_pair_P = (best_rank > 0) & (rank_P == best_rank)
        pair = tl.max(tl.where(is_pair_P, pair_P, 0), 0)
        key = tl.max(tl.where(is_pair_P, best_key_P, 0), 0)
        token = (key & LOW_BITS) ^ LOW_BITS
        keys_V = tl.load(keys_PV + pair * V + index_V)
        best_key_P = tl.where(is_pair_P, tl.max(tl.where(keys_V < key, keys_V, 0), 0), best_key_P)
        mass = tl.load(masses_PV + pair * V + token % V, mask=best_rank > 0, other=0)
        tl.store(tokens_N + node, tl.where(best_rank > 0, token, 0))
        tl.store(rows_N + node, tl.where(best_rank > 0, chosen // blocks, 0))
        tl.store(masses_N + node, mass)


@triton.jit
def levels_kernel(
    tokens_R, parents_R, masses_R, tokens_N, parents_N, masses_N, size, nodes, R: tl.constexpr,
):  # fmt: skip
    index_R = tl.arange(0, R)
    real_R = index_R < size
    mass_R = tl.load(masses_R + index_R, mask=real_R, other=0)
    key_R = tl.where(real_R, rounded(mass_R) | (index_R.to(tl.int64) ^ LOW_BITS), -1)
    node_R = tl.full([R], -1, tl.int64)  # of the prefixes taken so far, which come before their children
    for node in range(nodes):
        key = tl.max(key_R, 0)
        chosen = (key & LOW_BITS) ^ LOW_BITS
        key_R = tl.where(key_R == key, -1, key_R)
        # Its parent is in the level above; the first level's is the empty prefix.
        above = tl.where(chosen < nodes, -1, (chosen // nodes - 1) * nodes + tl.load(parents_R + chosen))
        tl.store(tokens_N + node, tl.load(tokens_R + chosen))
        tl.store(parents_N + node, tl.max(tl.where(index_R == above, node_R, -1), 0))
        tl.store(masses_N + node, tl.load(masses_R + chosen))
        node_R = tl.where(index_R == chosen, node, node_R)
