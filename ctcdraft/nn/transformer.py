"""One Llama-style block whose queries may stand beside the text they attend to. It knows no frames and no loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ctcdraft.nn.rotary import apply_rotary, config_rope_theta, default_frequencies


@dataclass(frozen=True)
class BlockConfig:
    """The sizes of a block: width D, heads H, key-value heads G, width of a head, width of the MLP, positions.

    What follows is Llama's unless it is said: the rotary frequencies (head_width / 2, 0 where a dimension is not
    turned) and the scale of their cosines, a norm of every head's queries and keys (Qwen3), biases of queries, keys and
    values (Qwen2), and the MLP's activation.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    epsilon: float
    rope_theta: float
    positions: int
    frequencies: tuple[float, ...]
    rotary_scale: float = 1.0
    qk_norm: bool = False
    qkv_bias: bool = False
    activation: str = "silu"

    @classmethod
    def of(cls, config: Any, context_length: int) -> Self:
        """Return a plain Llama layer of a base's sizes; what another architecture leaves open is filled as Llama does.

        nn/base_layer.py has the shape of the base's own layers, of which this is a part.
        """
        width, heads = config.hidden_size, config.num_attention_heads
        head_width, theta = getattr(config, "head_dim", None) or width // heads, config_rope_theta(config)
        return cls(
            width=width,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_width=head_width,
            inner=getattr(config, "intermediate_size", None) or 4 * width,
            epsilon=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            positions=context_length,
            frequencies=default_frequencies(head_width, theta),
        )

    def as_plain_llama(self) -> Self:
        """Return the same sizes as a plain Llama layer, which is what heads were made of before there was more."""
        frequencies = default_frequencies(self.head_width, self.rope_theta)
        return replace(
            self, frequencies=frequencies, rotary_scale=1.0, qk_norm=False, qkv_bias=False, activation="silu"
        )


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm whose scale follows the input's dtype: under autocast torch would warn and go slow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class SlotAttention(nn.Module):
    """Attention of T slots at every anchor: to the text up to the anchor, and to each other.

    Text never attends to slots, so its keys and values are functions of the text alone: they can be computed
    once per token and kept. That is what makes training equal to decoding.
    """

    def __init__(self, shape: BlockConfig, causal: bool) -> None:
        super().__init__()
        self.shape = shape
        self.causal = causal
        self.query = nn.Linear(shape.width, shape.heads * shape.head_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)
        self.query_norm, self.key_norm = head_norm(shape), head_norm(shape)

    def keys_values(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (turned to their positions) and values [B, G, L, d] of the text."""
        keys = apply_norm(self.key_norm, self.split_heads(self.key(x_BLD)))
        return apply_rotary(keys, turn), self.split_heads(self.value(x_BLD))

    def split_heads(self, x_BLD: Tensor) -> Tensor:
        """[B, heads, L, head_width]; two views, where einops would take longer than a small base's product."""
        return x_BLD.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)

    def forward(
        self,
        slots_BATD: Tensor,
        turn: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        visible_BAL: Tensor | None,
    ) -> Tensor:
        """Update_BATD. turn: [B, A, T, d]; visible_BAL: which text an anchor may see (None: all of it)."""
        kv_heads, frames = self.shape.kv_heads, slots_BATD.shape[2]
        query = rearrange(self.query(slots_BATD), "b a t (h d) -> b a h t d", h=self.shape.heads)
        turn = turn[0][:, :, None], turn[1][:, :, None]  # the same angles for every head
        query = apply_rotary(apply_norm(self.query_norm, query), turn) * self.shape.head_width**-0.5
        query = rearrange(query, "b a (g r) t d -> b g a (r t) d", g=kv_heads)
        own_key = rearrange(self.key(slots_BATD), "b a t (g d) -> b a g t d", g=kv_heads)
        own_key = rearrange(apply_rotary(apply_norm(self.key_norm, own_key), turn), "b a g t d -> b g a t d")
        own_value = rearrange(self.value(slots_BATD), "b a t (g d) -> b g a t d", g=kv_heads)
        text_keys, text_values = text

        # Rows of all anchors side by side: by the anchor, the text's keys and values would be copied for each.
        rows = query.shape[2:4]
        to_text = (query.flatten(2, 3) @ text_keys.transpose(-1, -2)).unflatten(2, rows)  # b g a (r t) l
        if visible_BAL is not None:
            to_text = to_text.masked_fill(~visible_BAL[:, None, :, None, :], -torch.inf)
        to_slots = query @ own_key.transpose(-1, -2)  # b g a (r t) t
        if self.causal:
            later_TT = torch.ones(frames, frames, dtype=torch.bool, device=query.device).triu(1)
            repeats = to_slots.shape[-2] // frames
            to_slots = to_slots.masked_fill(later_TT.repeat(repeats, 1), -torch.inf)
        weights = torch.cat([to_text, to_slots], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        on_text, on_slots = weights.split([text_keys.shape[2], frames], dim=-1)
        mixed = (on_text.flatten(2, 3) @ text_values).unflatten(2, rows) + on_slots @ own_value
        return self.out(rearrange(mixed, "b g a (r t) d -> b a t (g r d)", t=frames))

    def step(self, x_BND: Tensor, slots: int, turn: tuple[Tensor, Tensor], memory: Any, layer: int) -> Tensor:
        """`forward` for one anchor, B = 1: Update_BTD of the last T = `slots` rows; those before them are new text.

        turn: [N, d]. The keys and values of all N rows are appended to those in memory, so that text and slots lie
        side by side and one call attends to both; the caller makes it forget the slots' rows.
        """
        keys, values = memory.update(*self.keys_values(x_BND, turn), layer)
        cos, sin = turn
        query = apply_norm(self.query_norm, self.split_heads(self.query(x_BND[:, -slots:])))
        query = apply_rotary(query, (cos[-slots:], sin[-slots:]))
        seen_TM = None
        if self.causal:
            size = slots, keys.shape[2]
            seen_TM = torch.ones(size, dtype=torch.bool, device=keys.device).tril(size[1] - slots)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen_TM, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def head_norm(shape: BlockConfig) -> RMSNorm | None:
    """Return a norm of the columns of one head, where the shape asks for it."""
    return RMSNorm(shape.head_width, eps=shape.epsilon) if shape.qk_norm else None


def apply_norm(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class GatedMLP(nn.Module):
    """Llama's SwiGLU: down(silu(gate x) * up x), or the same with another of ACTIVATIONS."""

    def __init__(self, width: int, inner: int, activation: str = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class SlotBlock(nn.Module):
    """One Llama block for slots: norm, attention, norm, MLP, each added to the residual."""

    def __init__(self, shape: BlockConfig, causal: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, eps=shape.epsilon)
        self.attention = SlotAttention(shape, causal)
        self.mlp_norm = RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = GatedMLP(shape.width, shape.inner, shape.activation)

    def keys_values(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(self.attention_norm(x_BLD), turn)

    def forward(
        self,
        slots_BATD: Tensor,
        turn: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        visible_BAL: Tensor | None,
    ) -> Tensor:
        slots_BATD = slots_BATD + self.attention(self.attention_norm(slots_BATD), turn, text, visible_BAL)
        return slots_BATD + self.mlp(self.mlp_norm(slots_BATD))

    def step(self, text_BKD: Tensor, slots_BTD: Tensor, turn: tuple[Tensor, Tensor], memory: Any, layer: int) -> Tensor:
        """`forward` for one anchor, B = 1, the last of the new text rows; see SlotAttention.step."""
        rows_BND = self.attention_norm(torch.cat([text_BKD, slots_BTD], dim=1))
        slots_BTD = slots_BTD + self.attention.step(rows_BND, slots_BTD.shape[1], turn, memory, layer)
        return slots_BTD + self.mlp(self.mlp_norm(slots_BTD))

    def forward_text(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Return what a decoder layer would make of this text: every position is a slot behind the text before it."""
        length = x_BLD.shape[1]
        before_BLL = torch.ones(length, length, dtype=torch.bool, device=x_BLD.device).tril(-1)[None]
        own = turn[0][None, :, None], turn[1][None, :, None]
        return self(x_BLD[:, :, None], own, self.keys_values(x_BLD, turn), before_BLL)[:, :, 0]
