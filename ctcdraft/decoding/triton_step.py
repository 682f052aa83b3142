"""The kernels of `step_operations.py`, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.fused import block

ROWS_AT_ONCE = 256  # of a mask
MOST_ELEMENTS = 4096  # of cache rows moved at once by one program


def padded_tree(
    root_1: Tensor, tokens_R: Tensor, parents_R: Tensor, scores_R: Tensor, least: float, first: int, nodes: int,
    height: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    tokens_N, parents_N, depths_N = (root_1.new_empty(nodes) for _ in range(3))
    ancestors_NN = root_1.new_empty(nodes, nodes, dtype=torch.bool)
    out = tokens_N, parents_N, depths_N, ancestors_NN
    drafted = tokens_R, parents_R, scores_R, len(tokens_R)
    tree_kernel[(1,)](root_1, *drafted, *out, nodes, max(height, 1), first, least=least, N=block(nodes))
    return out


@triton.jit
def tree_kernel(
    root_1, tokens_R, parents_R, scores_R, drafted, tokens_N, parents_N, depths_N, ancestors_NN, nodes, height, first,
    least: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    node_N = tl.arange(0, N)
    in_tree_N = node_N < nodes
    given_N = (node_N > 0) & (node_N <= drafted)
    score_N = tl.load(scores_R + node_N - 1, mask=given_N, other=0).to(tl.float64)
    real_N = given_N & (score_N > least)
    token_N = tl.where(real_N, tl.load(tokens_R + node_N - 1, mask=given_N, other=0), -1)
    parent_N = tl.where(real_N, tl.load(parents_R + node_N - 1, mask=given_N, other=0) + 1 - first, 0)
    tl.store(tokens_N + node_N, tl.where(node_N == 0, tl.load(root_1), token_N), mask=in_tree_N)
    tl.store(parents_N + node_N, tl.where(node_N == 0, -1, parent_N), mask=in_tree_N)
    for row in range(nodes):
        tl.store(ancestors_NN + row * nodes + node_N, node_N == row, mask=in_tree_N)
    tl.debug_barrier()  # the rows below are written by other threads
    depth_N = tl.zeros([N], tl.int64)
    at_N = tl.load(parents_N + node_N, mask=in_tree_N, other=-1)
    for _ in range(height):
        above_N = at_N >= 0
        tl.store(ancestors_NN + node_N * nodes + at_N, above_N, mask=above_N)
        depth_N += above_N.to(tl.int64)
        at_N = tl.load(parents_N + at_N, mask=above_N, other=-1)
    tl.store(depths_N + node_N, depth_N, mask=in_tree_N)


def tree_rows(length_1: Tensor, depths_K: Tensor, seen_KR: Tensor, visible: int, positions: int) -> tuple[Tensor, ...]:
    return new_rows(length_1, seen_KR, None, depths_K, 0, visible, positions)[:3]


def level_rows(
    length_1: Tensor, above_XR: Tensor, parents_K: Tensor, depth: int, visible: int, positions: int
) -> tuple[Tensor, ...]:
    return new_rows(length_1, above_XR, parents_K, None, depth - 1, visible, positions)


def new_rows(
    length_1: Tensor, seen_XR: Tensor, parents_K: Tensor | None, depths_K: Tensor | None, depth: int, visible: int,
    positions: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write the rows of a tree, or those of a level below parents_K."""
    count, above = (len(seen_XR), 0) if parents_K is None else (len(parents_K), seen_XR.shape[1])
    rows_K, position_ids_K = length_1.new_empty(count), length_1.new_empty(count)
    mask_KM = length_1.new_empty(count, visible, dtype=torch.bool)
    seen_KR = seen_XR if parents_K is None else seen_XR.new_empty(count, above + count)
    level_kernel[(count,)](
        length_1, seen_XR, parents_K, depths_K, rows_K, position_ids_K, mask_KM, seen_KR,
        seen_XR.shape[1], seen_KR.shape[1], seen_KR.shape[1] - count, depth, visible, positions,
        is_level=parents_K is not None, M=ROWS_AT_ONCE,
    )  # fmt: skip
    return rows_K, position_ids_K, mask_KM, seen_KR


@triton.jit
def level_kernel(
    length_1, seen_XR, parents_K, depths_K, rows_K, position_ids_K, mask_KM, seen_KR, above, drafted, before, depth,
    visible, positions, is_level: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Numbers of drafted rows: above, those that seen_XR knows; before, those before the new ones; drafted, all."""
    new, length = tl.program_id(0), tl.load(length_1)
    seen = new
    if is_level:
        seen = tl.load(parents_K + new)
    else:
        depth = tl.load(depths_K + new)
    tl.store(rows_K + new, length + before + new)
    tl.store(position_ids_K + new, tl.minimum(length + depth, positions - 1))
    for start in range(0, visible, M):
        row_M = start + tl.arange(0, M)
        drafted_M = row_M - length
        is_drafted_M = (drafted_M >= 0) & (drafted_M < drafted)
        sees_M = tl.load(seen_XR + seen * above + drafted_M, mask=is_drafted_M & (drafted_M < above), other=0) != 0
        if is_level:
            sees_M = sees_M | (drafted_M == before + new)
        tl.store(mask_KM + new * visible + row_M, (row_M < length) | (is_drafted_M & sees_M), mask=row_M < visible)
    if is_level:
        for start in range(0, drafted, M):
            row_M = start + tl.arange(0, M)
            sees_M = tl.load(seen_XR + seen * above + row_M, mask=row_M < above, other=0) != 0
            tl.store(seen_KR + new * drafted + row_M, sees_M | (row_M == before + new), mask=row_M < drafted)


def text_rows(
    length_1: Tensor, real_1: Tensor, text: int, drafted: int, causal: bool, visible: int, capacity: int, positions: int
) -> tuple[Tensor, ...]:
    rows_N, position_ids_N = (length_1.new_empty(text + drafted) for _ in range(2))
    mask_NM = length_1.new_empty(text + drafted, visible, dtype=torch.bool)
    sizes = text, drafted, visible, capacity, positions
    text_kernel[(text + drafted,)](
        length_1, real_1, rows_N, position_ids_N, mask_NM, *sizes, causal=causal, M=ROWS_AT_ONCE
    )
    return rows_N, position_ids_N, mask_NM


@triton.jit
def text_kernel(
    length_1, real_1, rows_N, position_ids_N, mask_NM, text, drafted, visible, capacity, positions,
    causal: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    new, length, real = tl.program_id(0), tl.load(length_1), tl.load(real_1)
    is_text = new < text
    position = length + tl.where(is_text, new, real + new - text)
    last = position
    if not causal:
        last = tl.where(is_text, position, length + real + drafted - 1)
    tl.store(rows_N + new, tl.where(is_text & (new >= real), capacity - 1, position))
    tl.store(position_ids_N + new, tl.minimum(position, positions - 1))
    for start in range(0, visible, M):
        row_M = start + tl.arange(0, M)
        tl.store(mask_NM + new * visible + row_M, row_M <= last, mask=row_M < visible)


def commit_matches(
    tokens_N: Tensor, parents_N: Tensor, depths_N: Tensor, ancestors_NN: Tensor, base_tokens_N: Tensor,
    root_1: Tensor, new_tokens_P: Tensor, count_1: Tensor, last_1: Tensor, report_R: Tensor, length_1: Tensor,
    height: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = [tokens_N.new_empty(height + 1) for _ in range(3)]
    tree = tokens_N, parents_N, depths_N, ancestors_NN, base_tokens_N
    written = root_1, new_tokens_P, count_1, last_1, report_R, length_1
    commit_kernel[(1,)](*tree, *written, *out, len(tokens_N), height, N=block(len(tokens_N)), K=block(height + 1))
    return tuple(out)


@triton.jit
def commit_kernel(
    tokens_N, parents_N, depths_N, ancestors_NN, base_tokens_N, root_1, new_tokens_P, count_1, last_1, report_R,
    length_1, path_K, source_K, target_K, nodes, height, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    node_N, slot_K = tl.arange(0, N), tl.arange(0, K)
    in_tree_N = node_N < nodes
    token_N = tl.load(tokens_N + node_N, mask=in_tree_N, other=-1)
    parent_N = tl.load(parents_N + node_N, mask=in_tree_N, other=-1)
    depth_N = tl.load(depths_N + node_N, mask=in_tree_N, other=0)
    base_N = tl.load(base_tokens_N + parent_N, mask=in_tree_N & (parent_N >= 0), other=-2)
    agrees_N = (node_N == 0) | (base_N == token_N)
    seen_NN = tl.load(
        ancestors_NN + node_N[:, None] * nodes + node_N[None, :], mask=in_tree_N[:, None] & in_tree_N[None, :], other=0
    )
    wrong_N = tl.sum(((seen_NN != 0) & (agrees_N == 0)[None, :]).to(tl.int32), 1)
    accepted_N = in_tree_N & (wrong_N == 0)
    # The first of the deepest ones.
    rank_N = tl.where(accepted_N, depth_N * N + (N - 1 - node_N), -1)
    node = N - 1 - tl.max(rank_N, 0) % N
    depth, bonus, length = tl.load(depths_N + node), tl.load(base_tokens_N + node), tl.load(length_1)
    on_path_N = in_tree_N & (tl.load(ancestors_NN + node * nodes + node_N, mask=in_tree_N, other=0) != 0)
    is_slot_KN = (depth_N[None, :] == slot_K[:, None]) & on_path_N[None, :]
    at_K = tl.sum(tl.where(is_slot_KN, node_N[None, :], 0), 1).to(tl.int64)
    in_path_K = slot_K <= height
    tl.store(path_K + slot_K, at_K, mask=in_path_K)
    tl.store(source_K + slot_K, length + at_K, mask=in_path_K)
    tl.store(target_K + slot_K, length + slot_K, mask=in_path_K)
    next_KN = (depth_N[None, :] == slot_K[:, None] + 1) & on_path_N[None, :]
    new_K = tl.sum(tl.where(next_KN, token_N[None, :], 0), 1)
    new_K = tl.where(slot_K == depth, bonus, tl.where(slot_K < depth, new_K, tl.load(tokens_N)))
    new_K = tl.where(slot_K == height, tl.where(depth == height, bonus, 0), new_K)
    real_N = in_tree_N & (token_N >= 0)
    has_child = tl.max(((parent_N == node) & real_N).to(tl.int64), 0)
    tl.debug_barrier()  # the length is written after all threads have read it
    tl.store(new_tokens_P + slot_K, new_K, mask=in_path_K)
    tl.store(report_R + 4 + slot_K, new_K, mask=in_path_K)
    tl.store(report_R, depth + 1)
    tl.store(report_R + 1, has_child)
    tl.store(report_R + 2, tl.max(tl.where(real_N, depth_N, 0), 0))
    tl.store(report_R + 3, tl.sum(real_N.to(tl.int64), 0))
    tl.store(root_1, bonus)
    tl.store(count_1, depth + 1)
    tl.store(last_1, depth)
    tl.store(length_1, length + depth + 1)


def move_rows(keys: Tensor, values: Tensor, source_K: Tensor, target_K: Tensor) -> None:
    heads, (rows, width) = keys[..., 0, 0].numel(), keys.shape[-2:]
    count = block(len(source_K))
    D = min(block(width), max(16, block(MOST_ELEMENTS // count)))
    for_all = len(source_K), rows, width, heads
    move_kernel[(2 * heads, triton.cdiv(width, D))](keys, values, source_K, target_K, *for_all, K=count, D=D)


@triton.jit
def move_kernel(
    keys, values, source_K, target_K, count, rows, width, heads, K: tl.constexpr, D: tl.constexpr
):  # one program per buffer, head of a layer, and columns
    head = tl.program_id(0).to(tl.int64)
    slot_K, column_D = tl.arange(0, K), tl.program_id(1) * D + tl.arange(0, D)
    source = tl.load(source_K + slot_K, mask=slot_K < count, other=0)
    target = tl.load(target_K + slot_K, mask=slot_K < count, other=0)
    real_KD = (slot_K < count)[:, None] & (column_D < width)[None, :]
    buffer = tl.where(head < heads, 0, 1)
    start = (head - buffer * heads) * rows * width
    if buffer == 0:
        moved = tl.load(keys + start + source[:, None] * width + column_D[None, :], mask=real_KD, other=0)
        tl.debug_barrier()  # rows are read before others are written over them
        tl.store(keys + start + target[:, None] * width + column_D[None, :], moved, mask=real_KD)
    else:
        moved = tl.load(values + start + source[:, None] * width + column_D[None, :], mask=real_KD, other=0)
        tl.debug_barrier()
        tl.store(values + start + target[:, None] * width + column_D[None, :], moved, mask=real_KD)
