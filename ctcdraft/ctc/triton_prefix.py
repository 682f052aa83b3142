"""The prefix search as one Triton kernel: one program takes the prefixes one at a time, the most probable first.

The algorithm of `search_kernels.py`, for few and wide vector operations: the children of a prefix are computed once, as
sortable integers, and of every prefix only the best child not yet taken competes for the next node.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.ctc.prefix_search import MAX_CHILDREN, check_blank
from ctcdraft.fused import block

LOW_BITS = tl.constexpr(MAX_CHILDREN - 1)  # of a float64, replaced by what decides between equal masses


def fused_prefix_search(
    log_probs_TC: Tensor, blank: int, nodes: int, tokens_per_frame: int, stops_S: Tensor, depth: int, min_mass: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Search by one kernel after a topk."""
    check_blank(log_probs_TC, blank)
    frames, classes = log_probs_TC.shape
    if tokens_per_frame < 1:
        raise ValueError(f"tokens_per_frame must be >= 1, got {tokens_per_frame}")
    few = min(tokens_per_frame, classes - 1)
    rows, width = block(nodes + 1), block(frames * few)
    if max(classes, rows * block(depth + 1)) > MAX_CHILDREN:
        raise ValueError(
            f"{classes} classes or {nodes} nodes of {depth} levels are more than {MAX_CHILDREN}, the most the kernel "
            "can rank; lower nodes"
        )
    best_TR = log_probs_TC.topk(few + 1, dim=1).indices
    reals = partial(log_probs_TC.new_empty, dtype=torch.float64)
    ids = partial(log_probs_TC.new_empty, dtype=torch.int64)
    ranked = ids(nodes), ids(nodes), reals(nodes)
    scratch = reals(frames, width), *(reals(nodes + 1, frames) for _ in range(2))
    prefix_search_kernel[(1,)](
        log_probs_TC, best_TR, stops_S, *scratch, ids(nodes + 1, width), *ranked,
        log_probs_TC.stride(0), few, few + 1, len(stops_S), blank, nodes, depth, min_mass=min_mass,
        F=frames, T=block(frames, 4), W=width, S=block(len(stops_S)), R=rows, num_warps=warps(width),
    )  # fmt: skip
    return ranked


def warps(width: int) -> int:
    """Return the warps of the program: few, as every choice of a node waits for all of them."""
    return 1 if width <= 256 else 4 if width <= 1024 else 8


@triton.jit
def prefix_search_kernel(
    log_probs_TC, best_TR, stops_S, probs_TW, in_blank_RT, either_RT, keys_RW, tokens_N, parents_N, masses_N,
    row_stride, few, best_width, stop_count, blank, nodes, depth, min_mass: tl.constexpr, F: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write tokens_N, parents_N and masses_N by rank. F: frames. T, W, S, R: powers of two that hold the frames, the
    candidate tokens, the stop tokens, and the nodes with the empty prefix.

    Args:
        best_TR: the best classes of every frame, few + 1 or all of them.
        probs_TW: scratch, like all up to keys_RW: token probabilities.
        in_blank_RT, either_RT: masses of the expanded prefixes before every frame, ending in a blank and either.
        keys_RW: masses and tokens of the children of every expanded prefix, as integers that sort by both.
    """
    tokens_W, real_W = candidates(log_probs_TC, best_TR, probs_TW, row_stride, F, few, best_width, blank, W)
    frame_T, row_R, index_W = tl.arange(0, T), tl.arange(0, R), tl.arange(0, W)
    real_T = frame_T < F
    stop_S = tl.load(stops_S + tl.arange(0, S), mask=tl.arange(0, S) < stop_count, other=-2)
    log_blank_T = tl.load(log_probs_TC + frame_T * row_stride + blank, mask=real_T, other=-float("inf"))
    blank_T = tl.exp(log_blank_T.to(tl.float64))
    # Of the prefix taken last: the mass with which a frame begins its token, and the token's probability.
    begins_T, repeats_T = tl.zeros([T], tl.float64), tl.zeros([T], tl.float64)
    best_key_R, level_R = tl.zeros([R], tl.int64), tl.zeros([R], tl.int64)  # of the best child not taken, of the prefix
    row = tl.full((), 0, tl.int64)
    token, level = row - 1, row
    mass = tl.full((), 1.0, tl.float64)
    more = nodes > 0
    while more:
        in_blank_T, either_T, mass_W = child_masses(
            probs_TW, begins_T, repeats_T, blank_T, tokens_W, row, token, mass, F, T, W
        )
        tl.store(in_blank_RT + row * F + frame_T, in_blank_T, mask=real_T)
        tl.store(either_RT + row * F + frame_T, either_T, mask=real_T)
        is_stop = tl.max((stop_S == token).to(tl.int32), 0) > 0
        possible_W = real_W & (mass_W > 0) & (level < depth) & (is_stop == 0)
        key_W = tl.where(possible_W, rounded(mass_W) | (tokens_W ^ LOW_BITS), 0)
        tl.store(keys_RW + row * W + index_W, key_W)
        best_key_R = tl.where(row_R == row, tl.max(key_W, 0), best_key_R)
        level_R = tl.where(row_R == row, level, level_R)

        # Equal masses: by depth, then by the rank of the parent, then (within a row) by token id. In the low bits
        # `^` is a subtraction: what comes first is largest.
        rank_R = (best_key_R & ~LOW_BITS) | ((level_R * R + row_R) ^ LOW_BITS)
        best_rank = tl.max(tl.where(best_key_R > 0, rank_R, 0), 0)
        place = (best_rank & LOW_BITS) ^ LOW_BITS
        parent = place % R
        key = tl.max(tl.where(row_R == parent, best_key_R, 0), 0)
        more = (best_rank > 0) & (row < nodes)
        if more:
            tl.debug_barrier()  # what other threads have stored is loaded
            parent_token = tl.load(tokens_N + parent - 1, mask=parent > 0, other=-1)
            parent_mass = tl.load(masses_N + parent - 1, mask=parent > 0, other=1.0)
            token, level, row = (key & LOW_BITS) ^ LOW_BITS, place // R + 1, row + 1
            rest_W = tl.load(keys_RW + parent * W + index_W)
            best_key_R = tl.where(row_R == parent, tl.max(tl.where(rest_W < key, rest_W, 0), 0), best_key_R)
            in_blank_T = tl.load(in_blank_RT + parent * F + frame_T, mask=real_T, other=0)
            either_T = tl.load(either_RT + parent * F + frame_T, mask=real_T, other=0)
            before_T = tl.where(token == parent_token, in_blank_T, either_T)
            log_prob_T = tl.load(log_probs_TC + frame_T * row_stride + token, mask=real_T, other=-float("inf"))
            prob_T = tl.exp(log_prob_T.to(tl.float64))
            mass = tl.minimum(tl.sum(before_T * prob_T, 0), parent_mass)
            more = mass >= min_mass
            if more:
                begins_T, repeats_T = before_T * prob_T, prob_T
                store_node(tokens_N, parents_N, masses_N, row - 1, token, parent - 1, mass, more)
            else:
                row -= 1
    none_R = tl.zeros([R], tl.int64)
    is_padding_R = (row_R >= row) & (row_R < nodes)
    store_node(tokens_N, parents_N, masses_N, row_R, none_R, none_R - 1, none_R.to(tl.float64), is_padding_R)


@triton.jit
def store_node(tokens_N, parents_N, masses_N, node, token, parent, mass, mask):
    tl.store(tokens_N + node, token, mask=mask)
    tl.store(parents_N + node, parent, mask=mask)
    tl.store(masses_N + node, mass, mask=mask)


@triton.jit
def child_masses(
    probs_TW, begins_T, repeats_T, blank_T, tokens_W, row, token, mass, F: tl.constexpr, T: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Return the masses of the prefix taken last before every frame, ending in a blank and either, and those of its
    children.

    Nothing is stored here: a load behind a store would wait for memory in every frame.
    """
    index_W, frame_T = tl.arange(0, W), tl.arange(0, T)
    in_blank = tl.where(row == 0, 1.0, 0.0).to(tl.float64)
    in_label = tl.full((), 0.0, tl.float64)
    in_blank_T, either_T = tl.zeros([T], tl.float64), tl.zeros([T], tl.float64)
    either_W, in_blank_W = tl.zeros([W], tl.float64), tl.zeros([W], tl.float64)
    for frame in tl.static_range(F):
        probs_W = tl.load(probs_TW + frame * W + index_W)
        either_W += (in_blank + in_label) * probs_W
        in_blank_W += in_blank * probs_W
        in_blank_T, either_T, in_blank, in_label = next_frame(
            frame, frame_T, in_blank_T, either_T, in_blank, in_label, begins_T, repeats_T, blank_T
        )
    # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
    return in_blank_T, either_T, tl.minimum(tl.where(tokens_W == token, in_blank_W, either_W), mass)


@triton.jit
def next_frame(frame, frame_T, in_blank_T, either_T, in_blank, in_label, begins_T, repeats_T, blank_T):
    """Enter the masses before a frame, ending in a blank and either, and return them with those behind it."""
    either = in_blank + in_label
    in_blank_T = tl.where(frame_T == frame, in_blank, in_blank_T)
    either_T = tl.where(frame_T == frame, either, either_T)
    in_label = at_frame(begins_T, frame, frame_T) + in_label * at_frame(repeats_T, frame, frame_T)
    return in_blank_T, either_T, either * at_frame(blank_T, frame, frame_T), in_label


@triton.jit
def at_frame(x_T, frame, frame_T):
    return tl.sum(tl.where(frame_T == frame, x_T, 0.0), 0)


@triton.jit
def candidates(log_probs_TC, best_TR, probs_TW, row_stride, frames, few, best_width, blank, W: tl.constexpr):
    """Return every frame's best tokens and which of the block they are; write their probabilities.

    A token that several frames choose occurs several times, with equal keys, of which the search takes one.
    """
    index_W = tl.arange(0, W)
    real_W = index_W < frames * few
    best_W = best_TR + index_W // few * best_width
    class_W = tl.load(best_W + index_W % few, mask=real_W, other=-3)
    # Where the blank is among the best classes, one more class replaces it.
    tokens_W = tl.where(class_W == blank, tl.load(best_W + few, mask=real_W, other=-3), class_W)
    for frame in range(frames):
        log_prob_W = tl.load(log_probs_TC + frame * row_stride + tokens_W, mask=real_W, other=-float("inf"))
        tl.store(probs_TW + frame * W + index_W, tl.exp(log_prob_W.to(tl.float64)))
    return tokens_W, real_W


@triton.jit
def rounded(mass):
    """Return the bits of a mass, rounded as `top_masses` does."""
    half = (LOW_BITS + 1) // 2
    return (mass.to(tl.int64, bitcast=True) + half) & ~LOW_BITS
