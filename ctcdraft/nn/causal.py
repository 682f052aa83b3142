"""A Llama-style decoder block over text from left to right, or over a tree of draft tokens after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.nn.rotary import Rotary
from ctcdraft.nn.transformer import AttentionProjections, BlockConfig, GatedMLP, RMSNorm


class CausalAttention(AttentionProjections):
    """Causal attention over new and cached rows, or attention under the mask `seen`."""

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, seen: Tensor | None) -> Tensor:
        query, (keys, values) = self.queries(x_BLD, rotation), self.keys_values(x_BLD, rotation)
        if cache is not None:
            past = cache.length
            keys, values = cache.update(keys, values, 0)
            if seen is None:
                size = x_BLD.shape[1], keys.shape[2]
                seen = torch.ones(size, dtype=torch.bool, device=x_BLD.device).tril(past)
        mixed = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class CausalBlock(nn.Module):
    """Norm, attention, norm, MLP, with residual connections. input_norm: False for EAGLE's layer.

    Parameters are named as in SlotBlock, so that nn/base_layer.py initialises either.
    """

    def __init__(self, shape: BlockConfig, input_norm: bool) -> None:
        super().__init__()
        self.rotary = Rotary(shape.frequencies, shape.positions, shape.rotary_scale)
        self.attention_norm = RMSNorm(shape.width, eps=shape.epsilon) if input_norm else None
        self.attention = CausalAttention(shape)
        self.mlp_norm = RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = GatedMLP(shape.width, shape.inner, shape.activation)

    def forward(self, x_BLD: Tensor, position_ids: Tensor, cache: Any = None, seen: Tensor | None = None) -> Tensor:
        """Return the block's output [B, L, D].

        Args:
            position_ids: [L], or [B, L] where sequences differ.
            cache: a KVCache of earlier rows, to which these are appended.
            seen: true where a row may attend, [L, M] or [B, 1, L, M]; None: to all rows up to itself.
        """
        normed_BLD = x_BLD if self.attention_norm is None else self.attention_norm(x_BLD)
        x_BLD = x_BLD + self.attention(normed_BLD, self.rotary(position_ids[..., None, :]), cache, seen)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))
