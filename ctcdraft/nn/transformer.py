"""Llama-style blocks: of draft slots, T queries per anchor that attend to text and to each other; and of causal text.

Parameters of both blocks have the same names, by which nn/base_layer.py initialises them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ctcdraft.nn.block_config import ACTIVATIONS, BlockConfig, RMSNorm
from ctcdraft.nn.block_operations import add_linear, rotate_into, silu_gated
from ctcdraft.nn.masks import additive_mask
from ctcdraft.nn.rotary import Rotary, apply_rotary
from ctcdraft.nn.weight_layout import PackedLinears

TensorPair = tuple[Tensor, Tensor]  # cosines and sines of a rotation, or keys and values


def optional_norm(width: int, shape: BlockConfig, present: bool) -> nn.Module:
    return RMSNorm(width, eps=shape.epsilon) if present else nn.Identity()


class AttentionProjections(PackedLinears):
    """The projections of multi-head attention with grouped keys and values."""

    packs = ("query", "key", "value")

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.heads * shape.head_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
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

        Heads with the same keys are rows of one head: no fast kernel takes both a mask and grouped queries.
        """
        groups, (_, heads, queries, _) = keys.shape[1], query.shape
        if groups < heads:
            query = query.unflatten(1, (groups, -1)).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(query, keys, values, mask_XM)
        return mixed.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).flatten(2)  # [1, T, G, H / G, d]

    def mask_of(self, seen_TM: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask for `attend`. Attention would convert one of truth values in every call."""
        return additive_mask(seen_TM, dtype, self.shape.heads // self.shape.kv_heads)

    def split_heads(self, x_BLD: Tensor) -> Tensor:
        # [B, heads, L, d] by two views: einops takes longer than a small base's product.
        return x_BLD.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)


class SlotAttention(AttentionProjections):
    """Attention of T slots per anchor to the text up to the anchor, and to each other.

    Text never attends to slots, so its keys and values depend on the text alone: they are computed once per token and
    kept. This is what makes training equal to decoding.
    """

    def __init__(self, shape: BlockConfig, causal: bool) -> None:
        super().__init__(shape)
        self.causal = causal

    def forward(self, slots_BATD: Tensor, rotation: TensorPair, text: TensorPair, visible_BAL: Tensor | None) -> Tensor:
        """Return update_BATD. rotation: [B, A, T, d]; visible_BAL: the text that an anchor may see (None: all)."""
        kv_heads, frames = self.shape.kv_heads, slots_BATD.shape[2]
        query = rearrange(self.query(slots_BATD), "b a t (h d) -> b a h t d", h=self.shape.heads)
        rotation = rotation[0][:, :, None], rotation[1][:, :, None]  # the same angles for every head
        query = apply_rotary(self.query_norm(query), rotation) * self.shape.head_width**-0.5
        query = rearrange(query, "b a (g r) t d -> b g a (r t) d", g=kv_heads)
        own_key = rearrange(self.key(slots_BATD), "b a t (g d) -> b a g t d", g=kv_heads)
        own_key = rearrange(apply_rotary(self.key_norm(own_key), rotation), "b a g t d -> b g a t d")
        own_value = rearrange(self.value(slots_BATD), "b a t (g d) -> b g a t d", g=kv_heads)
        text_keys, text_values = text

        # All anchors in one product: a product per anchor would copy the text's keys and values for each of them.
        rows = query.shape[2:4]
        to_text = (query.flatten(2, 3) @ text_keys.transpose(-1, -2)).unflatten(2, rows)  # b g a (r t) l
        if visible_BAL is not None:
            to_text = to_text.masked_fill(~visible_BAL[:, None, :, None, :], -torch.inf)
        to_slots = query @ own_key.transpose(-1, -2)  # b g a (r t) t
        if self.causal:
            later_TT = torch.ones(frames, frames, dtype=torch.bool, device=query.device).triu(1)
            repeats = to_slots.shape[-2] // frames
            to_slots = to_slots.masked_fill(later_TT.repeat(repeats, 1), -torch.inf)
        at_least_float32 = torch.promote_types(query.dtype, torch.float32)
        weights = torch.cat([to_text, to_slots], dim=-1).softmax(dim=-1, dtype=at_least_float32).to(query.dtype)
        on_text, on_slots = weights.split([text_keys.shape[2], frames], dim=-1)
        mixed = (on_text.flatten(2, 3) @ text_values).unflatten(2, rows) + on_slots @ own_value
        return self.out(rearrange(mixed, "b g a (r t) d -> b a t (g r d)", t=frames))

    def step(self, x_BND: Tensor, slots: int, rotation: Any, memory: Any, layer: int, seen_TM: Any) -> Tensor:
        """Return `forward` for one anchor, B = 1, before the output projection, of the last T = `slots` rows; the
        others are new text.

        Args:
            rotation: [N, d].
            memory: the cache to which all N rows are appended; the caller drops the slots' rows.
            seen_TM: which of its rows the slots see, in fixed shapes the `mask_of` these; None: all.
        """
        # Slots beside the text in one cache, so that one attention call covers both.
        query, keys, values = self.attended(x_BND, slots, rotation, memory, layer)
        if memory.fixed_shapes:
            return self.attend(query, keys, values, seen_TM)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen_TM, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


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


class LlamaBlock(nn.Module):
    """Norm, attention, norm, MLP, with residual connections. input_norm: False for EAGLE's layer."""

    def __init__(self, shape: BlockConfig, attention: AttentionProjections, input_norm: bool = True) -> None:
        super().__init__()
        self.attention_norm = optional_norm(shape.width, shape, input_norm)
        self.attention: Any = attention
        self.mlp_norm = RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp: Any = GatedMLP(shape)


class SlotBlock(LlamaBlock):
    """One block for slots."""

    def __init__(self, shape: BlockConfig, causal: bool) -> None:
        super().__init__(shape, SlotAttention(shape, causal))

    def keys_values(self, x_BLD: Tensor, rotation: TensorPair) -> TensorPair:
        return self.attention.keys_values(self.attention_norm(x_BLD), rotation)

    def forward(self, slots_BATD: Tensor, rotation: TensorPair, text: TensorPair, visible_BAL: Tensor | None) -> Tensor:
        slots_BATD = slots_BATD + self.attention(self.attention_norm(slots_BATD), rotation, text, visible_BAL)
        return slots_BATD + self.mlp(self.mlp_norm(slots_BATD))

    def step(
        self, text_BKD: Tensor, slots_BTD: Tensor, rotation: Any, memory: Any, layer: int, seen_TM: Tensor | None
    ) -> Tensor:
        """Return `forward` for one anchor, B = 1, the last of the new text rows; see SlotAttention.step."""
        rows_BND = self.attention_norm(torch.cat([text_BKD, slots_BTD], dim=1))
        mixed_BTD = self.attention.step(rows_BND, slots_BTD.shape[1], rotation, memory, layer, seen_TM)
        slots_BTD = add_linear(slots_BTD, self.attention.out, mixed_BTD)
        return add_linear(slots_BTD, self.mlp.down, self.mlp.inner(self.mlp_norm(slots_BTD)))

    def forward_text(self, x_BLD: Tensor, rotation: TensorPair) -> Tensor:
        """Return the output of the block as a decoder layer: every position is a slot after the text before it."""
        length = x_BLD.shape[1]
        before_BLL = torch.ones(length, length, dtype=torch.bool, device=x_BLD.device).tril(-1)[None]
        own = rotation[0][None, :, None], rotation[1][None, :, None]
        return self(x_BLD[:, :, None], own, self.keys_values(x_BLD, rotation), before_BLL)[:, :, 0]


class CausalAttention(AttentionProjections):
    """Causal attention over new and cached rows, or attention under the mask `seen`, before the output projection."""

    def forward(self, x_BLD: Tensor, rotation: Any, cache: Any, seen: Tensor | None, layer: int) -> Tensor:
        if cache is None:
            query, (keys, values) = self.queries(x_BLD, rotation), self.keys_values(x_BLD, rotation)
        else:
            query, keys, values = self.attended(x_BLD, x_BLD.shape[1], rotation, cache, layer)
            if cache.fixed_shapes and seen is not None:
                return self.attend(query, keys, values, self.mask_of(seen, query.dtype))
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
        x_BLD = x_BLD + self.attention.out(
            self.attention(self.attention_norm(x_BLD), rotation, cache, seen, self.layer)
        )
        return x_BLD if self.mlp is None else add_linear(x_BLD, self.mlp.down, self.mlp.inner(self.mlp_norm(x_BLD)))
