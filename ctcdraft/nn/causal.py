"""One Llama-style block that reads a text from left to right, or a tree of guesses behind it. It knows no words."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ctcdraft.nn.rotary import Rotary, apply_rotary
from ctcdraft.nn.transformer import BlockConfig, GatedMLP, RMSNorm, apply_norm, head_norm


class CausalAttention(nn.Module):
    """Every row sees the rows up to itself, those in the cache included, or what `seen` says."""

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.heads * shape.head_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)
        self.query_norm, self.key_norm = head_norm(shape), head_norm(shape)

    def forward(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor], cache: Any, seen: Tensor | None) -> Tensor:
        query = rearrange(self.query(x_BLD), "b l (h d) -> b h l d", h=self.shape.heads)
        keys = rearrange(self.key(x_BLD), "b l (g d) -> b g l d", g=self.shape.kv_heads)
        query, keys = (
            apply_rotary(apply_norm(self.query_norm, query), turn),
            apply_rotary(apply_norm(self.key_norm, keys), turn),
        )
        values = rearrange(self.value(x_BLD), "b l (g d) -> b g l d", g=self.shape.kv_heads)
        if cache is not None:
            past = cache.length
            keys, values = cache.update(keys, values, 0)
            if seen is None:
                size = x_BLD.shape[1], keys.shape[2]
                seen = torch.ones(size, dtype=torch.bool, device=x_BLD.device).tril(past)
        mixed = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=True
        )
        return self.out(rearrange(mixed, "b h l d -> b l (h d)"))


class CausalBlock(nn.Module):
    """Norm, attention, norm, MLP, each added to the residual. input_norm: EAGLE's layer has no first norm.

    Parameters are named as in SlotBlock, so that nn/base_layer.py fills either.
    """

    def __init__(self, shape: BlockConfig, input_norm: bool) -> None:
        super().__init__()
        self.rotary = Rotary(shape.frequencies, shape.positions, shape.rotary_scale)
        self.attention_norm = RMSNorm(shape.width, eps=shape.epsilon) if input_norm else None
        self.attention = CausalAttention(shape)
        self.mlp_norm = RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = GatedMLP(shape.width, shape.inner, shape.activation)

    def forward(self, x_BLD: Tensor, position_ids: Tensor, cache: Any = None, seen: Tensor | None = None) -> Tensor:
        """places: [L], or [B, L] where rows differ. cache: rows read before, to which these are added. seen: which
        rows each may see, its own included: [L, M] or [B, 1, L, M]; None: all up to itself."""
        normed_BLD = x_BLD if self.attention_norm is None else self.attention_norm(x_BLD)
        x_BLD = x_BLD + self.attention(normed_BLD, self.rotary(position_ids[..., None, :]), cache, seen)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))
