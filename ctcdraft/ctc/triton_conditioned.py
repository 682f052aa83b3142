"""The kernels that expand a level of the search over label-conditioned frames, in Triton.

The correction's factors of all K prefixes and V tokens are computed twice, for the normalisers and for the bounds,
because a product of this rank costs less than the traffic of a K x V matrix. Bounds are float32, masses float64.
Products of float32 have its full precision: with that of tensor cores the bounds on the masses would be too coarse to
rank by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.ctc.triton_prefix import next_frame
from ctcdraft.fused import block
from ctcdraft.triton_parts import add_product

TOKENS = 64  # of a block; memory traffic of the bounds grows with fewer, the masses computed with more
RANK_AT_ONCE = 32
BLOCKS_AT_ONCE = 128


def expand_level(
    log_probs_TC: Tensor, memory_KR: Tensor, out_VR: Tensor, tokens_K: Tensor, parents_K: Tensor, mass_K: Tensor,
    above_tokens_X: Tensor, above_memory_XR: Tensor, above_masses_3XT: Tensor, stops_S: Tensor, level: int,
    merges: bool,
) -> Tensor:  # fmt: skip
    rows, frames, blocks = len(memory_KR), len(log_probs_TC), block_count(log_probs_TC)
    partial_BKT = log_probs_TC.new_empty((blocks, rows, frames), dtype=torch.float32)
    shared = sizes(log_probs_TC, out_VR, rows)
    normaliser_kernel[(blocks,)](log_probs_TC, memory_KR, out_VR, partial_BKT, *shared, **shapes(log_probs_TC, rows))
    masses_3KT = log_probs_TC.new_empty((3, rows, frames), dtype=torch.float64)
    prefixes = tokens_K, parents_K, mass_K, memory_KR, out_VR, partial_BKT
    expand_kernel[(rows,)](
        log_probs_TC, stops_S, *prefixes, above_tokens_X, above_memory_XR, above_masses_3XT, masses_3KT,
        *shared, len(above_memory_XR), blocks, len(stops_S), is_empty=level == 0, follows_empty=level == 1,
        merges=merges, F=frames, T=block(frames, 4), S=block(len(stops_S)), B=BLOCKS_AT_ONCE, R=RANK_AT_ONCE,
        num_warps=1,
    )  # fmt: skip
    return masses_3KT


def block_count(log_probs_TC: Tensor) -> int:
    return -(-(log_probs_TC.shape[1] - 1) // TOKENS)


def sizes(log_probs_TC: Tensor, out_VR: Tensor, rows: int) -> tuple[int, ...]:
    """Return what every kernel takes after its tensors."""
    frames, classes = log_probs_TC.shape
    return log_probs_TC.stride(0), *out_VR.stride(), frames, classes - 1, out_VR.shape[1], rows


def shapes(log_probs_TC: Tensor, rows: int) -> dict[str, int]:
    return {"T": block(len(log_probs_TC)), "K": block(rows), "V": TOKENS, "R": RANK_AT_ONCE}


@triton.jit
def normaliser_kernel(
    log_probs_TC, memory_KR, out_VR, partial_BKT, row_stride, token_stride, rank_stride, frames, vocabulary, rank,
    rows, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    token_V, row_K, frame_T = block * V + tl.arange(0, V), tl.arange(0, K), tl.arange(0, T)
    factor_KV = factors(memory_KR, out_VR, token_V, row_K, token_stride, rank_stride, vocabulary, rank, rows, K, V, R)
    probs_VT = tl.trans(token_probs(log_probs_TC, token_V, frame_T, row_stride, frames, vocabulary))
    sums_KT = tl.dot(factor_KV, probs_VT, input_precision="ieee")
    place_KT = (block * rows + row_K[:, None]) * frames + frame_T[None, :]
    tl.store(partial_BKT + place_KT, sums_KT, mask=(row_K[:, None] < rows) & (frame_T[None, :] < frames))


@triton.jit
def expand_kernel(
    log_probs_TC, stops_S, tokens_K, parents_K, mass_K, memory_KR, out_VR, partial_BKT, above_tokens_K,
    above_memory_KR, above_masses_3KT, masses_3KT, row_stride, token_stride, rank_stride, frames, vocabulary, rank,
    rows, above_rows, blocks, stop_count, is_empty: tl.constexpr, follows_empty: tl.constexpr, merges: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, S: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
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
        token, parent = tl.load(tokens_K + row), tl.load(parents_K + row)
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
    in_blank_T, either_T = tl.zeros([T], tl.float64), tl.zeros([T], tl.float64)
    in_blank, in_label = tl.full((), 1.0 if is_empty else 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for frame in tl.static_range(F):
        in_blank_T, either_T, in_blank, in_label = next_frame(
            frame, frame_T, in_blank_T, either_T, in_blank, in_label, begins_T, repeats_T, blank_T * scale_T
        )
    place_T = masses_3KT + row * frames + frame_T
    tl.store(place_T, in_blank_T, mask=real_T)
    tl.store(place_T + rows * frames, either_T, mask=real_T)
    tl.store(place_T + 2 * rows * frames, scale_T, mask=real_T)


@triton.jit
def factors(
    memory_KR, out_VR, token_V, row_K, token_stride, rank_stride, vocabulary, rank, rows, K: tl.constexpr, V:
    tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Return what the correction multiplies the tokens with, 0 for rows and tokens that are none."""
    logits_KV = tl.zeros([K, V], tl.float32)
    for start in range(0, rank, R):
        index_R = start + tl.arange(0, R)
        real_KR = (row_K[:, None] < rows) & (index_R[None, :] < rank)
        real_RV = (index_R[:, None] < rank) & (token_V[None, :] < vocabulary)
        memory = tl.load(memory_KR + row_K[:, None] * rank + index_R[None, :], mask=real_KR, other=0)
        place_RV = index_R[:, None] * rank_stride + token_V[None, :] * token_stride
        out = tl.load(out_VR + place_RV, mask=real_RV, other=0)
        logits_KV = add_product(memory, out, logits_KV)
    return as_factor(logits_KV)


@triton.jit
def as_factor(logits):
    """Return the exponential, within the range of `fused_conditioned.LOGIT_RANGE`."""
    return tl.exp(tl.minimum(tl.maximum(logits, -80.0), 80.0))


@triton.jit
def factor_of_one(memory_R, out_VR, token, token_stride, rank_stride, rank, R: tl.constexpr):
    """Return what the correction after one prefix multiplies one token with."""
    logit_R = tl.zeros([R], tl.float32)
    for start in range(0, rank, R):
        index_R = start + tl.arange(0, R)
        memory = tl.load(memory_R + index_R, mask=index_R < rank, other=0).to(tl.float32)
        out = tl.load(out_VR + token * token_stride + index_R * rank_stride, mask=index_R < rank, other=0)
        logit_R += memory * out.to(tl.float32)
    return as_factor(tl.sum(logit_R, 0)).to(tl.float64)


@triton.jit
def token_probs(log_probs_TC, token_V, frame_T, row_stride, frames, vocabulary):
    place_TV = frame_T[:, None] * row_stride + token_V[None, :]
    real_TV = (frame_T[:, None] < frames) & (token_V[None, :] < vocabulary)
    return tl.exp(tl.load(log_probs_TC + place_TV, mask=real_TV, other=-float("inf")).to(tl.float32))
