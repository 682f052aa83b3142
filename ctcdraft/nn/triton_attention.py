"""The kernels of `tree_attention.py`, in Triton: the text is divided among programs, whose sums are then combined."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.fused import block
from ctcdraft.triton_parts import add_product

QUERIES = 64  # rows of a program: the nodes of all heads that share keys
ROWS = 64  # of the text that a program reads at once
PROGRAMS = 264  # of all heads: two for each multiprocessor of an H200, or one if each has QUERIES rows
MAX_PARTS = 64  # of the text
LOG2_E = tl.constexpr(1.4426950408889634)


def tree_attention(query: Tensor, keys: Tensor, values: Tensor, mask_NM: Tensor, scale: float) -> Tensor:
    _, heads, nodes, width = query.shape
    groups, rows = keys.shape[1:3]
    queries = heads // groups * nodes
    size = min(QUERIES, block(queries))
    blocks, reads = triton.cdiv(queries, size), triton.cdiv(rows, ROWS)
    programs = PROGRAMS // 2 if size == QUERIES else PROGRAMS
    parts = min(max(programs // (groups * blocks), 2), reads, MAX_PARTS)
    share = triton.cdiv(reads, parts) * ROWS
    parts = triton.cdiv(rows, share)
    out = query.new_empty(1, nodes, heads, width)
    mixed = query.new_empty(parts, heads * nodes, width, dtype=torch.float32)
    sums = query.new_empty(parts, 2, heads * nodes, dtype=torch.float32)
    strides = *query.stride()[1:3], *keys.stride()[1:3], *values.stride()[1:3], mask_NM.stride(0)
    attention_kernel[(groups, parts, blocks)](
        query, keys, values, mask_NM, mixed, sums, *strides, nodes, heads, queries, rows, share, scale * LOG2_E.value,
        D=width, B=size, R=ROWS,
    )  # fmt: skip
    combine_kernel[(heads * nodes,)](mixed, sums, out, heads, nodes, parts, D=width, P=block(parts, 2), num_warps=2)
    return out


@triton.jit
def attention_kernel(
    query, keys, values, mask_NM, mixed, sums, query_head, query_row, key_head, key_row, value_head, value_row,
    mask_row, nodes, heads, queries, rows, share, scale, D: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write sums of values weighted by 2^(score - largest), the largest score and the sum of the weights."""
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_B, column_D = tl.program_id(2) * B + tl.arange(0, B), tl.arange(0, D)
    real_B = query_B < queries
    head_B, node_B = group * (queries // nodes) + query_B // nodes, query_B % nodes
    place_BD = head_B[:, None] * query_head + node_B[:, None] * query_row + column_D[None, :]
    query_BD = tl.load(query + place_BD, mask=real_B[:, None], other=0)
    largest_B, total_B = tl.full([B], -float("inf"), tl.float32), tl.zeros([B], tl.float32)
    mixed_BD = tl.zeros([B, D], tl.float32)
    for start in range(part * share, tl.minimum(part * share + share, rows), R):
        row_R = start + tl.arange(0, R)
        real_R = row_R < rows
        place_DR = group * key_head + row_R[None, :] * key_row + column_D[:, None]
        key_DR = tl.load(keys + place_DR, mask=real_R[None, :], other=0)
        place_BR = node_B[:, None] * mask_row + row_R[None, :]
        mask_BR = tl.load(mask_NM + place_BR, mask=real_B[:, None] & real_R[None, :], other=0).to(tl.float32)
        score_BR = add_product(query_BD, key_DR, tl.zeros([B, R], tl.float32)) * scale
        # Bounded, so that the difference of two scores of rows that are not seen is a number.
        score_BR = tl.where(real_R[None, :], score_BR + tl.maximum(mask_BR, -1e30) * LOG2_E, -2e30)
        new_B = tl.maximum(largest_B, tl.max(score_BR, 1))
        weight_BR, shrink_B = tl.math.exp2(score_BR - new_B[:, None]), tl.math.exp2(largest_B - new_B)
        place_RD = group * value_head + row_R[:, None] * value_row + column_D[None, :]
        value_RD = tl.load(values + place_RD, mask=real_R[:, None], other=0)
        total_B = total_B * shrink_B + tl.sum(weight_BR, 1)
        mixed_BD = add_product(weight_BR.to(value_RD.dtype), value_RD, mixed_BD * shrink_B[:, None])
        largest_B = new_B
    place_B, count = head_B * nodes + node_B, heads * nodes
    tl.store(mixed + (part * count + place_B)[:, None] * D + column_D[None, :], mixed_BD, mask=real_B[:, None])
    tl.store(sums + 2 * part * count + place_B, largest_B, mask=real_B)
    tl.store(sums + (2 * part + 1) * count + place_B, total_B, mask=real_B)


@triton.jit
def combine_kernel(mixed, sums, out, heads, nodes, parts, D: tl.constexpr, P: tl.constexpr):
    """Write one query's weighted mean of all parts."""
    query, part_P, column_D = tl.program_id(0), tl.arange(0, P), tl.arange(0, D)
    real_P, count = part_P < parts, heads * nodes
    largest_P = tl.load(sums + 2 * part_P * count + query, mask=real_P, other=-float("inf"))
    total_P = tl.load(sums + (2 * part_P + 1) * count + query, mask=real_P, other=0)
    factor_P = tl.math.exp2(largest_P - tl.max(largest_P, 0))
    place_PD = (part_P[:, None] * count + query) * D + column_D[None, :]
    mixed_PD = tl.load(mixed + place_PD, mask=real_P[:, None], other=0) * factor_P[:, None]
    mean_D = tl.sum(mixed_PD, 0) / tl.sum(total_P * factor_P, 0)
    head, node = query // nodes, query % nodes
    tl.store(out + (node * heads + head) * D + column_D, mean_D.to(out.dtype.element_ty))
