"""The kernels of `block_operations.py`, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ctcdraft.fused import block
from ctcdraft.triton_parts import add_product

ELEMENTS = 1024  # of an elementwise kernel's program


def rotate_into(
    query: Tensor, key: Tensor, value: Tensor, cos_PE: Tensor, sin_PE: Tensor, position_ids_N: Tensor, rows_N: Tensor,
    keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    _, heads, queries, width = query.shape
    groups, rows = key.shape[1:3]
    # As a transposed view, which the output projection reads without a copy.
    rotated = query.new_empty(1, queries, heads, width).transpose(1, 2)
    given = query, key, value, cos_PE, sin_PE, position_ids_N, rows_N, keys, values, rotated
    strides = *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], *keys.stride()[1:3]
    sizes = rows - queries, heads, groups, width
    rotate_kernel[(rows, heads + 2 * groups)](*given, *strides, *sizes, E=block(width))
    return rotated


@triton.jit
def rotate_kernel(
    query, key, value, cos_PE, sin_PE, position_ids_N, rows_N, keys, values, rotated, query_head, query_row, key_head,
    key_row, value_head, value_row, cache_head, cache_row, text, heads, groups, width, E: tl.constexpr,
):  # fmt: skip
    row, part, index_E = tl.program_id(0), tl.program_id(1), tl.arange(0, E)
    real_E, target = index_E < width, tl.load(rows_N + row)
    group = (part - heads).to(tl.int64)  # times the rows of a cache it can exceed 32 bits
    if part >= heads + groups:
        group -= groups
        place = values + group * cache_head + target * cache_row
        x_E = tl.load(value + group * value_head + row * value_row + index_E, mask=real_E)
        tl.store(place + index_E, x_E, mask=real_E)
    else:
        swapped_E = (index_E + width // 2) % width
        angle = tl.load(position_ids_N + row) * width + index_E
        cos_E, sin_E = tl.load(cos_PE + angle, mask=real_E), tl.load(sin_PE + angle, mask=real_E)
        if part >= heads:
            from_key = key + group * key_head + row * key_row
            x_E, other_E = tl.load(from_key + index_E, mask=real_E), tl.load(from_key + swapped_E, mask=real_E)
            y_E = x_E.to(tl.float32) * cos_E + other_E.to(tl.float32) * sin_E
            place = keys + group * cache_head + target * cache_row
            tl.store(place + index_E, y_E.to(x_E.dtype), mask=real_E)
        elif row >= text:
            from_query = query + part * query_head + (row - text) * query_row
            x_E, other_E = tl.load(from_query + index_E, mask=real_E), tl.load(from_query + swapped_E, mask=real_E)
            y_E = x_E.to(tl.float32) * cos_E + other_E.to(tl.float32) * sin_E
            place = rotated + ((row - text) * heads + part) * width
            tl.store(place + index_E, y_E.to(x_E.dtype), mask=real_E)


def rms_norm(x_XD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    out_XD, width = x_XD.new_empty(x_XD.shape), len(weight_D)
    rows, size = x_XD.numel() // width, block(width)
    norm_kernel[(rows,)](x_XD, weight_D, out_XD, width, epsilon, D=size, num_warps=min(max(size // 512, 1), 16))
    return out_XD


@triton.jit
def norm_kernel(x_XD, weight_D, out_XD, width, epsilon, D: tl.constexpr):
    row, index_D = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    x_D = tl.load(x_XD + row * width + index_D, mask=index_D < width, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x_D * x_D, 0) / width + epsilon)
    y_D = x_D * scale * tl.load(weight_D + index_D, mask=index_D < width, other=0).to(tl.float32)
    tl.store(out_XD + row * width + index_D, y_D.to(out_XD.dtype.element_ty), mask=index_D < width)


def silu_gated(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    silu_kernel[(out.numel() // width, triton.cdiv(width, ELEMENTS))](gate_up.contiguous(), out, width, N=ELEMENTS)
    return out


@triton.jit
def silu_kernel(gate_up, out, width, N: tl.constexpr):
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    real = index < width
    gate = tl.load(gate_up + 2 * row * width + index, mask=real, other=0)
    x = gate.to(tl.float32)
    silu = (x / (1 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + index, mask=real, other=0).to(tl.float32)
    tl.store(out + row * width + index, (silu * up).to(gate.dtype), mask=real)


def embed_beside(table_VD: Tensor, tokens_K: Tensor, states_XE: Tensor, rows_K: Tensor, tokens_first: bool) -> Tensor:
    width, other = table_VD.shape[1], states_XE.shape[1]
    out = states_XE.new_empty(len(tokens_K), width + other)
    starts = (0, width) if tokens_first else (other, 0)
    grid = len(tokens_K), triton.cdiv(width, ELEMENTS) + triton.cdiv(other, ELEMENTS)
    strides = table_VD.stride(0), states_XE.stride(0)
    embed_kernel[grid](table_VD, tokens_K, states_XE, rows_K, out, *strides, width, other, *starts, D=ELEMENTS)
    return out


@triton.jit
def embed_kernel(
    table_VD, tokens_K, states_XE, rows_K, out, table_row, states_row, width, other, table_start, states_start,
    D: tl.constexpr,
):  # fmt: skip
    row, part, index_D = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    of_table = tl.cdiv(width, D)
    out_row = out + row * (width + other)
    if part < of_table:
        index_D += part * D
        x_D = tl.load(table_VD + tl.load(tokens_K + row) * table_row + index_D, mask=index_D < width, other=0)
        tl.store(out_row + table_start + index_D, x_D.to(out.dtype.element_ty), mask=index_D < width)
    else:
        index_D += (part - of_table) * D
        state_D = tl.load(states_XE + tl.load(rows_K + row) * states_row + index_D, mask=index_D < other, other=0)
        tl.store(out_row + states_start + index_D, state_D, mask=index_D < other)


def gru_step(
    input_VG: Tensor, recurrent_GR: Tensor, recurrent_bias_G: Tensor, memory_XR: Tensor, rows_K: Tensor,
    tokens_K: Tensor,
) -> Tensor:  # fmt: skip
    count, rank = len(tokens_K), memory_XR.shape[1]
    out_KR = memory_XR.new_empty(count, rank)
    strides = input_VG.stride(0), *recurrent_GR.stride(), memory_XR.stride(0)
    gru_kernel[(triton.cdiv(rank, 16),)](
        input_VG, recurrent_GR, recurrent_bias_G, memory_XR, rows_K, tokens_K, out_KR, *strides, count, rank,
        K=block(count), R=16, D=64,
    )  # fmt: skip
    return out_KR


@triton.jit
def gru_kernel(
    input_VG, recurrent_GR, recurrent_bias_G, memory_XR, rows_K, tokens_K, out_KR, input_row, recurrent_gate,
    recurrent_column, memory_row, count, rank, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One program computes R columns of the memories. Products keep the dtype of the weights, sums are float32."""
    index_K, out_R = tl.arange(0, K), tl.program_id(0) * R + tl.arange(0, R)
    real_K, real_R = index_K < count, out_R < rank
    real_KR = real_K[:, None] & real_R[None, :]
    row_K = tl.load(rows_K + index_K, mask=real_K, other=0)
    reset_KR, update_KR = tl.zeros([K, R], tl.float32), tl.zeros([K, R], tl.float32)
    recurrent_KR = tl.zeros([K, R], tl.float32)
    for start in range(0, rank, D):
        index_D = start + tl.arange(0, D)
        real_D = index_D < rank
        real_DR = real_D[:, None] & real_R[None, :]
        place_KD = row_K[:, None] * memory_row + index_D[None, :]
        memory_KD = tl.load(memory_XR + place_KD, mask=real_K[:, None] & real_D[None, :], other=0)
        weight_DR = recurrent_GR + out_R[None, :] * recurrent_gate + index_D[:, None] * recurrent_column
        reset_DR = tl.load(weight_DR, mask=real_DR, other=0)
        update_DR = tl.load(weight_DR + rank * recurrent_gate, mask=real_DR, other=0)
        new_DR = tl.load(weight_DR + 2 * rank * recurrent_gate, mask=real_DR, other=0)
        reset_KR = add_product(memory_KD, reset_DR, reset_KR)
        update_KR = add_product(memory_KD, update_DR, update_KR)
        recurrent_KR = add_product(memory_KD, new_DR, recurrent_KR)
    token_K = tl.load(tokens_K + index_K, mask=real_K, other=0)
    input_KR = input_VG + token_K[:, None] * input_row + out_R[None, :]
    reset_KR += tl.load(input_KR, mask=real_KR, other=0).to(tl.float32) + bias_of(recurrent_bias_G, out_R, real_R)
    update_KR += tl.load(input_KR + rank, mask=real_KR, other=0).to(tl.float32)
    update_KR += bias_of(recurrent_bias_G + rank, out_R, real_R)
    recurrent_KR += bias_of(recurrent_bias_G + 2 * rank, out_R, real_R)
    new_KR = tl.load(input_KR + 2 * rank, mask=real_KR, other=0).to(tl.float32) + tl.sigmoid(reset_KR) * recurrent_KR
    new_KR = 2 * tl.sigmoid(2 * new_KR) - 1  # the hyperbolic tangent
    before_KR = tl.load(memory_XR + row_K[:, None] * memory_row + out_R[None, :], mask=real_KR, other=0)
    next_KR = new_KR + tl.sigmoid(update_KR) * (before_KR.to(tl.float32) - new_KR)
    place_KR = index_K[:, None] * rank + out_R[None, :]
    tl.store(out_KR + place_KR, next_KR.to(out_KR.dtype.element_ty), mask=real_KR)


@triton.jit
def bias_of(bias_G, gate_R, real_R):
    return tl.load(bias_G + gate_R, mask=real_R, other=0).to(tl.float32)[None, :]
