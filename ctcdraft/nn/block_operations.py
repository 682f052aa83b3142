"""Operations within the blocks of a draft head, on an accelerator. Their kernels are in `triton_block.py`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctcdraft.fused import fused
from ctcdraft.nn.rotary import apply_rotary

KERNELS = "ctcdraft.nn.triton_block"


@fused(KERNELS, launches=1, writes=("keys", "values"))
def rotate_into(
    query: Tensor, key: Tensor, value: Tensor, cos_PE: Tensor, sin_PE: Tensor, position_ids_N: Tensor, rows_N: Tensor,
    keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """Return the rotated query [1, H, T, d] of the last T rows; write rotated keys, and values, [1, G, N, d] to these
    rows of the cache."""
    cos, sin = cos_PE[position_ids_N], sin_PE[position_ids_N]
    keys.index_copy_(2, rows_N, apply_rotary(key, (cos, sin)))
    values.index_copy_(2, rows_N, value)
    queries = query.shape[2]
    return apply_rotary(query, (cos[-queries:], sin[-queries:]))


@fused(KERNELS, launches=1)
def rms_norm(x_XD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Return x over the root of its mean square, times the weight."""
    return F.rms_norm(x_XD, weight_D.shape, weight_D, epsilon)


@fused(KERNELS, launches=1)
def silu_gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused(KERNELS, launches=1)
def embed_beside(table_VD: Tensor, tokens_K: Tensor, states_XE: Tensor, rows_K: Tensor, tokens_first: bool) -> Tensor:
    """Return the embeddings of tokens and these rows of states, concatenated."""
    parts = [table_VD[tokens_K].to(states_XE.dtype), states_XE[rows_K]]
    return torch.cat(parts if tokens_first else parts[::-1], dim=1)


@fused(KERNELS, launches=1)
def gru_step(
    input_VG: Tensor, recurrent_GR: Tensor, recurrent_bias_G: Tensor, memory_XR: Tensor, rows_K: Tensor,
    tokens_K: Tensor,
) -> Tensor:  # fmt: skip
    """Return memory_KR of a GRU cell after these rows of a memory read one token each.

    input_VG: the cell's products of all tokens, their bias included; G = 3 R: reset, update, new.
    """
    memory_KR = memory_XR[rows_K]
    return gru_memory(input_VG[tokens_K], F.linear(memory_KR, recurrent_GR, recurrent_bias_G), memory_KR)


def gru_memory(input_XG: Tensor, recurrent_XG: Tensor, memory_XR: Tensor) -> Tensor:
    """Return the next memory_XR of a GRU cell, given its products of the inputs and of the memory."""
    rank = memory_XR.shape[-1]
    gates_XG = (input_XG[..., : 2 * rank] + recurrent_XG[..., : 2 * rank]).sigmoid_()
    reset_XR, update_XR = gates_XG[..., :rank], gates_XG[..., rank:]
    new_XR = torch.addcmul(input_XG[..., 2 * rank :], reset_XR, recurrent_XG[..., 2 * rank :]).tanh_()
    return new_XR.lerp_(memory_XR, update_XR)


@cache  # on the device from then on, where captured graphs read it
def row_zero(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def is_plain_lookup(embedding: nn.Module, tokens_K: Tensor) -> bool:
    """Return whether these operations look up as this embedding does: others scale, and a CPU needs no operation."""
    return not tokens_K.is_cpu and type(embedding) is nn.Embedding


def embed_rows(embedding: nn.Module, tokens_K: Tensor, states_XE: Tensor, rows_K: Tensor, tokens_first: bool) -> Tensor:
    """Return `embed_beside` of any embedding."""
    if is_plain_lookup(embedding, tokens_K):
        return embed_beside(embedding.weight, tokens_K, states_XE, rows_K, tokens_first)
    parts = [embedding(tokens_K).to(states_XE.dtype), states_XE[rows_K]]
    return torch.cat(parts if tokens_first else parts[::-1], dim=1)


def add_linear(residual_XD: Tensor, layer: nn.Module, x_XE: Tensor) -> Tensor:
    """Return residual + layer(x), which on an accelerator may be written over the residual.

    One product then adds a plain layer without bias; into new memory, it would be a copy and a product.
    """
    if residual_XD.is_cpu or torch.is_grad_enabled() or type(layer) is not nn.Linear or layer.bias is not None:
        return residual_XD + layer(x_XE)
    residual_XD.view(-1, residual_XD.shape[-1]).addmm_(x_XE.flatten(0, -2), layer.weight.T)
    return residual_XD
