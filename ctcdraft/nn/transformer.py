"""Llama-style blocks, and the one of causal text; that of draft slots is in slot_attention.py.

Parameters of both have the same names, by which nn/base_layer.py initialises them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.nn.block_config import ACTIVATIONS, BlockConfig, RMSNorm
from ctcdraft.nn.block_operations import add_linear, rotate_into, silu_gated
from ctcdraft.nn.masks import additive_mask
from ctcdraft.nn.rotary import Rotary, apply_rotary
from ctcdraft.nn.tree_attention import has_kernels, tree_attention
from ctcdraft.nn.weight_layout import PackedLinears

TensorPair = tuple[Tensor, Tensor]  # cosines and sines of a rotation, or keys and values


def optional_norm(width: int, shape: BlockConfig, present: bool) -> nn.Module:
    return RMSNorm(width, eps=shape.epsilon) if present else nn.Identity()


class AttentionProjections(PackedLinears):
    """The projections of multi-head attention with grouped keys and values."""

    packs = ("query", "key", "value")

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.shape, inputs = shape, shape.inputs * shape.width
        self.query = nn.Linear(inputs, shape.heads * shape.head_width, bias=shape.qkv_bias)
        self.key = nn.Linear(inputs, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.value = nn.Linear(inputs, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)
        self.query_norm, self.key_norm = (optional_norm(shape.head_width, shape, shape.qk_norm) for _ in range(2))

    def project(self, x_BND: Tensor, queries: int) -> list[Tensor]:
        """Return queries of the last rows, and keys and values, by head and before norms and rotation."""
        if self.packed is None:
            parts = self.query(x_BND[:, -queries:]), self.key(x_BND), self.value(x_BND)
        else:
            own, shared = self.query.out_features, self.key.out_features
            query, key, value = F.linear(x_BND, *self.packed).split([own, shared, shared], dim=-1)
            parts = query[:, -queries:], key, value
        return [self.split_heads(part) for part in parts]

    def queries(self, x_BLD: Tensor, rotation: TensorPair) -> Tensor:
        """Return rotated queries [B, H, L, d]."""
        return apply_rotary(self.query_norm(self.split_heads(self.query(x_BLD))), rotation)

    def keys_values(self, x_BLD: Tensor, rotation: TensorPair) -> TensorPair:
        """Return rotated keys, and values, [B, G, L, d]."""
        keys = self.key_norm(self.split_heads(self.key(x_BLD)))
        return apply_rotary(keys, rotation), self.split_heads(self.value(x_BLD))

    def attended(
        self, x_BND: Tensor, queries: int, rotation: Any, memory: Any, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append keys and values of all N rows to a cache; return the rotated queries of the last rows, and all keys
        and values that they may attend to. rotation: that of `AppendedRows` or `StaticRows`, [N, d]."""
        if len(rotation) == 2:  # exact shapes
            keys, values = memory.update(*self.keys_values(x_BND, rotation), layer)
            query = self.queries(x_BND[:, -queries:], (rotation[0][-queries:], rotation[1][-queries:]))
            return query, keys, values
        query, key, value = self.project(x_BND, queries)
        query, key = self.query_norm(query), self.key_norm(key)
        keys, values = memory.layer(layer, key, value)
        query = rotate_into(query, key, value, *rotation, memory.rows_N, keys, values)
        return query, keys[:, :, : memory.visible], values[:, :, : memory.visible]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask_XM: Tensor) -> Tensor:
        """Return the mixed values [1, T, H * d] of queries [1, H, T, d] under the mask of `mask_of`.

        Heads with the same keys are rows of one head: kernels with a mask are slow for grouped queries.
        """
        groups, (_, heads, queries, width) = keys.shape[1], query.shape
        if has_kernels(mask_XM, query.dtype, width, queries):
            return tree_attention(query, keys, values, mask_XM, width**-0.5).flatten(2)
        if groups < heads:
            query = query.unflatten(1, (groups, -1)).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(query, keys, values, mask_XM)
        return mixed.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).flatten(2)  # [1, T, G, H / G, d]

    def mask_of(self, seen_TM: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask for `attend`. Attention would convert one of truth values in every call."""
        by_kernels = has_kernels(seen_TM, dtype, self.shape.head_width, len(seen_TM))
        return additive_mask(seen_TM, dtype, 1 if by_kernels else self.shape.heads // self.shape.kv_heads)

    def split_heads(self, x_BLD: Tensor) -> Tensor:
        # [B, heads, L, d] by two views: einops takes longer than a small base's product.
        return x_BLD.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)


class NormOfEach(nn.Module):
    """A norm of its own for each of several vectors side by side."""

    def __init__(self, width: int, epsilon: float, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(width, eps=epsilon) for _ in range(count)])

    def forward(self, x_XE: Tensor) -> Tensor:
        parts = x_XE.chunk(len(self.norms), dim=-1)
        return torch.cat([norm(part_XD) for norm, part_XD in zip(self.norms, parts, strict=True)], dim=-1)


class GatedMLP(PackedLinears):
    """Llama's SwiGLU: down(silu(gate x) * up x), or the same with another of ACTIVATIONS."""

    packs = ("gate", "up")

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        if self.packed is None or self.activation is not F.silu or torch.is_grad_enabled():
            return self.activation(self.gate(x)) * self.up(x)
        return silu_gated(F.linear(x, self.packed[0]))


def last_input(x: Tensor, width: int) -> Tensor:
    """Return the last of the vectors of `width` that a block reads side by side."""
    # inductor (torch 2.13, CPU) compiles a residual connection from a slice of all columns to wrong losses.
    return x if x.shape[-1] == width else x[..., -width:]


class LlamaBlock(nn.Module):
    """Norm, attention, norm, MLP, with residual connections. input_norm: False for EAGLE's layer."""

    def __init__(self, shape: BlockConfig, attention: AttentionProjections, input_norm: bool = True) -> None:
        super().__init__()
        self.attention_norm = optional_norm(shape.width, shape, input_norm)
        self.attention: Any = attention
        self.mlp_norm = RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp: Any = GatedMLP(shape)


class CausalAttention(AttentionProjections):
    """Causal attention over new and cached rows, or attention under the mask `seen`, before the output projection.

    seen: truth values, or in fixed shapes the `mask_of` these.
    """

    def forward(self, x_BLD: Tensor, rotation: Any, cache: Any, seen: Tensor | None, layer: int) -> Tensor:
        if cache is None:
            query, (keys, values) = self.queries(x_BLD, rotation), self.keys_values(x_BLD, rotation)
        else:
            query, keys, values = self.attended(x_BLD, x_BLD.shape[1], rotation, cache, layer)
            if cache.fixed_shapes and seen is not None:
                mask = self.mask_of(seen, query.dtype) if seen.dtype == torch.bool else seen
                return self.attend(query, keys, values, mask)
            if seen is None:  # `is_causal` would align the triangle with the first key, not with the last
                rows, seen_rows = x_BLD.shape[1], keys.shape[2]
                seen = torch.ones(rows, seen_rows, dtype=torch.bool, device=x_BLD.device).tril(seen_rows - rows)
        mixed = F.scaled_dot_product_attention(query, keys, values, seen, is_causal=seen is None, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class CausalBlock(LlamaBlock):
    """One decoder block over text from left to right, or over a tree of draft tokens after it."""

    def __init__(self, shape: BlockConfig, input_norm: bool) -> None:
        super().__init__(shape, CausalAttention(shape), input_norm)
        self.rotary = Rotary(shape.frequencies, shape.positions, shape.rotary_scale)
        self.layer = 0  # its number in the cache

    def forward(self, x_BLD: Tensor, position_ids: Tensor, cache: Any = None, seen: Tensor | None = None) -> Tensor:
        """Return the block's output [B, L, D].

        Args:
            position_ids: [L], or [B, L] where sequences differ.
            cache: a KVCache of earlier rows, to which these are appended.
            seen: true where a row may attend, [L, M] or [B, 1, L, M]; None: to all rows up to itself.
        """
        fixed_shapes = cache is not None and cache.fixed_shapes
        rotation = self.rotary.at(position_ids) if fixed_shapes else self.rotary(position_ids[..., None, :])
        mixed_BLE = self.attention(self.attention_norm(x_BLD), rotation, cache, seen, self.layer)
        x_BLD = last_input(x_BLD, self.attention.shape.width) + self.attention.out(mixed_BLE)
        return x_BLD if self.mlp is None else add_linear(x_BLD, self.mlp.down, self.mlp.inner(self.mlp_norm(x_BLD)))
