"""Blocks of draft slots: T queries per anchor that attend to text and to each other."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.block_operations import add_linear
from ctcdraft.nn.rotary import apply_rotary
from ctcdraft.nn.transformer import AttentionProjections, LlamaBlock, NormOfEach, TensorPair, last_input


class StoredText(Protocol):
    """Keys and values of the text for one block, wherever they are."""

    def attend(self, query: Tensor, own_key: Tensor, own_value: Tensor, causal: bool) -> Tensor:
        """Return what the slots' queries read from the text that their anchor sees and from the slots.

        Args:
            query: [B, G, A, R T, d], scaled; R query heads per key-value head.
            own_key, own_value: of the slots, [B, G, A, T, d].
            causal: a slot sees no later slot.
        """


Text = TensorPair | StoredText


def attend_to_tensors(
    text: TensorPair, visible_BAL: Tensor | None, query: Tensor, own_key: Tensor, own_value: Tensor, causal: bool
) -> Tensor:
    """Do `StoredText.attend` with keys and values [B, G, L, d], of which an anchor sees visible_BAL (None: all)."""
    keys, values = text
    # All anchors in one product: a product per anchor would copy the text's keys and values for each of them.
    rows, frames = query.shape[2:4], own_key.shape[3]
    to_text = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, rows)  # b g a (r t) l
    if visible_BAL is not None:
        to_text = to_text.masked_fill(~visible_BAL[:, None, :, None, :], -torch.inf)
    to_slots = query @ own_key.transpose(-1, -2)  # b g a (r t) t
    if causal:
        later_TT = torch.ones(frames, frames, dtype=torch.bool, device=query.device).triu(1)
        repeats = to_slots.shape[-2] // frames
        to_slots = to_slots.masked_fill(later_TT.repeat(repeats, 1), -torch.inf)
    at_least_float32 = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([to_text, to_slots], dim=-1).softmax(dim=-1, dtype=at_least_float32).to(query.dtype)
    on_text, on_slots = weights.split([keys.shape[2], frames], dim=-1)
    return (on_text.flatten(2, 3) @ values).unflatten(2, rows) + on_slots @ own_value


class SlotAttention(AttentionProjections):
    """Attention of T slots per anchor to the text up to the anchor, and to each other.

    Text never attends to slots, so its keys and values depend on the text alone: they are computed once per token and
    kept. This is what makes training equal to decoding.
    """

    def __init__(self, shape: BlockConfig, causal: bool) -> None:
        super().__init__(shape)
        self.causal = causal

    def forward(self, slots_BATD: Tensor, rotation: TensorPair, text: Text, visible_BAL: Tensor | None) -> Tensor:
        """Return update_BATD.

        Args:
            rotation: [B, A, T, d].
            visible_BAL: the text that an anchor may see (None: all); a `StoredText` knows it itself.
        """
        kv_heads, frames = self.shape.kv_heads, slots_BATD.shape[2]
        query = rearrange(self.query(slots_BATD), "b a t (h d) -> b a h t d", h=self.shape.heads)
        rotation = rotation[0][:, :, None], rotation[1][:, :, None]  # the same angles for every head
        query = apply_rotary(self.query_norm(query), rotation) * self.shape.head_width**-0.5
        query = rearrange(query, "b a (g r) t d -> b g a (r t) d", g=kv_heads)
        own_key = rearrange(self.key(slots_BATD), "b a t (g d) -> b a g t d", g=kv_heads)
        own_key = rearrange(apply_rotary(self.key_norm(own_key), rotation), "b a g t d -> b g a t d")
        own_value = rearrange(self.value(slots_BATD), "b a t (g d) -> b g a t d", g=kv_heads)
        own = query, own_key, own_value, self.causal
        mixed = attend_to_tensors(text, visible_BAL, *own) if isinstance(text, tuple) else text.attend(*own)
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


class SlotBlock(LlamaBlock):
    """One block for slots.

    Where the attention reads several vectors side by side, each has a norm, and the block adds to the last of them.

    norm_text: whether its first norm is applied to the text too.
    """

    def __init__(self, shape: BlockConfig, causal: bool, norm_text: bool = True) -> None:
        super().__init__(shape, SlotAttention(shape, causal))
        self.norm_text, self.width = norm_text, shape.width
        if shape.inputs > 1:
            self.attention_norm = NormOfEach(shape.width, shape.epsilon, shape.inputs)

    def keys_values(self, x_BLD: Tensor, rotation: TensorPair) -> TensorPair:
        return self.attention.keys_values(self.attention_norm(x_BLD) if self.norm_text else x_BLD, rotation)

    def forward(self, slots_BATD: Tensor, rotation: TensorPair, text: Text, visible_BAL: Tensor | None) -> Tensor:
        mixed_BATD = self.attention(self.attention_norm(slots_BATD), rotation, text, visible_BAL)
        slots_BATD = last_input(slots_BATD, self.width) + mixed_BATD
        return slots_BATD + self.mlp(self.mlp_norm(slots_BATD))

    def step(
        self, text_BKD: Tensor, slots_BTD: Tensor, rotation: Any, memory: Any, layer: int, seen_TM: Tensor | None
    ) -> Tensor:
        """Return `forward` for one anchor, B = 1, the last of the new text rows; see SlotAttention.step."""
        rows_BND = torch.cat([text_BKD, slots_BTD if self.norm_text else self.attention_norm(slots_BTD)], dim=1)
        rows_BND = self.attention_norm(rows_BND) if self.norm_text else rows_BND
        mixed_BTD = self.attention.step(rows_BND, slots_BTD.shape[1], rotation, memory, layer, seen_TM)
        slots_BTD = add_linear(last_input(slots_BTD, self.width), self.attention.out, mixed_BTD)
        return add_linear(slots_BTD, self.mlp.down, self.mlp.inner(self.mlp_norm(slots_BTD)))

    def forward_text(self, x_BLD: Tensor, rotation: TensorPair, before_BLL: Tensor | None = None) -> Tensor:
        """Return the output of the block as a decoder layer: every position is a slot after the text before it.

        Args:
            rotation: [B, 1, L, d].
            before_BLL: true for the text that a position sees besides itself; None: all that is before it.
        """
        length = x_BLD.shape[1]
        if before_BLL is None:
            before_BLL = torch.ones(length, length, dtype=torch.bool, device=x_BLD.device).tril(-1)[None]
        own = rotation[0][:, 0, :, None], rotation[1][:, 0, :, None]
        return self(x_BLD[:, :, None], own, self.keys_values(x_BLD, rotation), before_BLL)[:, :, 0]
