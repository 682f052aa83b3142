"""The kernels of `fused_conditioned.py`, in Triton: one level of the search over label-conditioned frames.

The correction's factors of all K prefixes and V tokens are computed twice, for the normalisers and for the bounds,
because a product of this rank costs less than the traffic of a K x V matrix. Bounds are float32, masses float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ctcdraft.ctc.triton_factors import as_factor, factor_of_one, factors, token_probs
from ctcdraft.ctc.triton_prefix import LOW_BITS, rounded


@triton.jit
def normaliser_kernel(
    log_probs_TC,
    memory_KR,
    out_VR,
    partial_BKT,  # result: the sum over the tokens of each block
    row_stride,
    token_stride,
    rank_stride,
    frames,
    vocabulary,
    rank,
    rows,
    T: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,  # tokens of a block
    R: tl.constexpr,  # rank multiplied at once
):
    block = tl.program_id(0)
    token_V, row_K, frame_T = block * V + tl.arange(0, V), tl.arange(0, K), tl.arange(0, T)
    factor_KV = factors(memory_KR, out_VR, token_V, row_K, token_stride, rank_stride, vocabulary, rank, rows, K, V, R)
    probs_VT = tl.trans(token_probs(log_probs_TC, token_V, frame_T, row_stride, frames, vocabulary))
    sums_KT = tl.dot(factor_KV, probs_VT, input_precision="ieee")
    place_KT = (block * rows + row_K[:, None]) * frames + frame_T[None, :]
    tl.store(partial_BKT + place_KT, sums_KT, mask=(row_K[:, None] < rows) & (frame_T[None, :] < frames))


@triton.jit
def expand_kernel(
    log_probs_TC,
    stops_S,
    tokens_K,  # the prefixes of this level: last token,
    parents_K,  # row in the level above plus first_row,
    mass_K,
    memory_KR,
    out_VR,
    partial_BKT,
    above_tokens_K,  # the level above
    above_memory_KR,
    above_masses_3KT,
    masses_3KT,  # result: before every frame, ending in a blank and either; then the scale of the frames
    steps_K3T,  # scratch
    row_stride,
    token_stride,
    rank_stride,
    frames,
    vocabulary,
    rank,
    rows,
    above_rows,
    first_row,
    blocks,
    stop_count,
    is_empty: tl.constexpr,  # the level of the empty prefix
    follows_empty: tl.constexpr,  # the level below it
    merges: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    B: tl.constexpr,  # blocks summed at once
    R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    frame_T = tl.arange(0, T)
    real_T = frame_T < frames
    total_T = tl.zeros([T], tl.float64)
    for start in range(0, blocks, B):
        block_B = start + tl.arange(0, B)
        place_BT = (block_B[:, None] * rows + row) * frames + frame_T[None, :]
        partial_BT = tl.load(partial_BKT + place_BT, mask=(block_B[:, None] < blocks) & real_T[None, :], other=0)
        total_T += tl.sum(partial_BT.to(tl.float64), 0)
    blank_T = tl.load(log_probs_TC + frame_T * row_stride + vocabulary, mask=real_T, other=0).to(tl.float64)
    blank_T = tl.exp(blank_T)
    scale_T = 1 / (total_T + blank_T)
    begins_T, repeats_T = tl.zeros([T], tl.float64), tl.zeros([T], tl.float64)
    if not is_empty:
        token, parent = tl.load(tokens_K + row), tl.load(parents_K + row) - first_row
        log_prob_T = tl.load(log_probs_TC + frame_T * row_stride + token, mask=real_T, other=-float("inf"))
        prob_T = tl.exp(log_prob_T.to(tl.float64))
        place_T = parent * frames + frame_T
        before_T = tl.load(above_masses_3KT + above_rows * frames + place_T, mask=real_T, other=0)
        if merges and not follows_empty:
            in_blank_T = tl.load(above_masses_3KT + place_T, mask=real_T, other=0)
            before_T = tl.where(tl.load(above_tokens_K + parent) == token, in_blank_T, before_T)
        above_scale_T = tl.load(above_masses_3KT + 2 * above_rows * frames + place_T, mask=real_T, other=0)
        above_factor = factor_of_one(above_memory_KR + parent * rank, out_VR, token, token_stride, rank_stride, rank, R)
        stop_S = tl.load(stops_S + tl.arange(0, S), mask=tl.arange(0, S) < stop_count, other=-2)
        is_stop = tl.max((stop_S == token).to(tl.int32), 0) > 0
        continues = (is_stop == 0) & (tl.load(mass_K + row) > 0)  # nothing follows a stop token
        begins_T = tl.where(continues, before_T * prob_T * (above_factor * above_scale_T), 0.0)
        if merges:
            factor = factor_of_one(memory_KR + row * rank, out_VR, token, token_stride, rank_stride, rank, R)
            repeats_T = prob_T * factor * scale_T
    steps_3T = steps_K3T + row * 3 * frames
    tl.store(steps_3T + frame_T, begins_T, mask=real_T)
    tl.store(steps_3T + frames + frame_T, repeats_T, mask=real_T)
    tl.store(steps_3T + 2 * frames + frame_T, blank_T * scale_T, mask=real_T)
    tl.store(masses_3KT + (2 * rows + row) * frames + frame_T, scale_T, mask=real_T)
    tl.debug_barrier()
    in_blank, in_label = tl.full((), 1.0 if is_empty else 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for frame in range(frames):
        either = in_blank + in_label
        tl.store(masses_3KT + row * frames + frame, in_blank)
        tl.store(masses_3KT + (rows + row) * frames + frame, either)
        in_label = tl.load(steps_3T + frame) + in_label * tl.load(steps_3T + frames + frame)
        in_blank = either * tl.load(steps_3T + 2 * frames + frame)


@triton.jit
def bound_kernel(
    log_probs_TC,
    memory_KR,
    out_VR,
    tokens_K,
    masses_3KT,
    bounds_KB,  # result: the largest mass of a child in each block of tokens
    row_stride,
    token_stride,
    rank_stride,
    frames,
    vocabulary,
    rank,
    rows,
    blocks,
    merges: tl.constexpr,  # and this is not the level of the empty prefix
    T: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
):
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
    log_probs_TC,
    memory_KR,
    out_VR,
    tokens_K,
    mass_K,
    masses_3KT,
    chosen_P,  # pairs of a prefix and a block of tokens: row * blocks + block
    keys_PV,  # result: what ranks the children, 0 for the impossible, and their masses
    masses_PV,
    row_stride,
    token_stride,
    rank_stride,
    frames,
    vocabulary,
    rank,
    rows,
    blocks,
    is_empty: tl.constexpr,
    merges: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
):
    pair, word_V = tl.program_id(0), tl.arange(0, V)
    chosen = tl.load(chosen_P + pair)
    row, token_V = chosen // blocks, chosen % blocks * V + word_V
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
    tl.store(keys_PV + pair * V + word_V, key_V)
    tl.store(masses_PV + pair * V + word_V, mass_V)


@triton.jit
def select_kernel(
    chosen_P,
    keys_PV,
    masses_PV,
    tokens_N,  # result: the best children, their parents' rows plus first_row, and their masses; mass 0 where none is
    rows_N,
    masses_N,
    pairs,
    blocks,
    nodes,
    first_row,
    P: tl.constexpr,
    V: tl.constexpr,
):
    pair_P, word_V = tl.arange(0, P), tl.arange(0, V)
    chosen_index_P = tl.load(chosen_P + pair_P, mask=pair_P < pairs, other=0)
    place_PV = pair_P[:, None] * V + word_V[None, :]
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
        keys_V = tl.load(keys_PV + pair * V + word_V)
        best_key_P = tl.where(is_pair_P, tl.max(tl.where(keys_V < key, keys_V, 0), 0), best_key_P)
        mass = tl.load(masses_PV + pair * V + token % V, mask=best_rank > 0, other=0)
        tl.store(tokens_N + node, tl.where(best_rank > 0, token, 0))
        tl.store(rows_N + node, tl.where(best_rank > 0, chosen // blocks, 0) + first_row)
        tl.store(masses_N + node, mass)
