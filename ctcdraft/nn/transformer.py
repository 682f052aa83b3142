"""One Llama-style block whose queries may stand beside the text they attend to. It knows no frames and no loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a block: width D, heads H, key-value heads G, width of a head, width of the MLP, positions."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    epsilon: float
    rope_theta: float
    positions: int

    @classmethod
    def of(cls, config: Any, context_length: int) -> Self:
        """The shape of a base's own layers; what another architecture leaves open is filled as Llama does."""
        width, heads = config.hidden_size, config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            width=width,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_width=getattr(config, "head_dim", None) or width // heads,
            inner=getattr(config, "intermediate_size", None) or 4 * width,
            epsilon=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", 10_000.0),
            positions=context_length,
        )


class Norm(nn.RMSNorm):
    """Root-mean-square norm whose scale follows the input's dtype: under autocast torch would warn and go slow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), half-split as in Llama; frequencies in float32 whatever the dtype."""

    def __init__(self, head_width: int, theta: float, positions: int) -> None:
        super().__init__()
        # Tables, no buffers: `.to(bfloat16)` would round the angles, and decoding would differ from training.
        self._tables = {torch.device("cpu"): rotary_tables(head_width, theta, positions)}

    def forward(self, positions_X: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` takes, two tensors [*X, head_width], for every position."""
        cos, sin = self.tables(positions_X.device)
        return cos[positions_X], sin[positions_X]

    def span(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same for the positions start .. stop - 1: [stop - start, head_width]. A slice gathers nothing."""
        cos, sin = self.tables(device)
        return cos[start:stop], sin[start:stop]

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            cos, sin = self._tables[torch.device("cpu")]
            self._tables[device] = cos.to(device), sin.to(device)
        return self._tables[device]


def rotary_tables(head_width: int, theta: float, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, [positions, head_width]; the left half's sines are negative."""
    frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.arange(positions)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).float(), torch.cat([-sin, sin], dim=-1).float()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [..., head_width] by the angles of its position: (l, r) becomes (l cos - r sin, r cos + l sin).

    The sign is in the table of sines, so the halves only change places: four operations, and no copy is negated.
    """
    cos, sin = turn
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class SlotAttention(nn.Module):
    """Attention of T slots at every anchor: to the text up to the anchor, and to each other.

    Text never attends to slots, so its keys and values are functions of the text alone: they can be computed
    once per token and kept. That is what makes training equal to decoding.
    """

    def __init__(self, shape: BlockShape, causal: bool) -> None:
        super().__init__()
        self.shape = shape
        self.causal = causal
        self.query = nn.Linear(shape.width, shape.heads * shape.head_width, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)

    def keys_values(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (turned to their positions) and values [B, G, L, d] of the text."""
        return rotate(self.by_head(self.key(x_BLD)), turn), self.by_head(self.value(x_BLD))

    def by_head(self, x_BLD: Tensor) -> Tensor:
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
        query = rotate(query, turn) * self.shape.head_width**-0.5
        query = rearrange(query, "b a (g r) t d -> b g a (r t) d", g=kv_heads)
        own_key = rearrange(self.key(slots_BATD), "b a t (g d) -> b a g t d", g=kv_heads)
        own_key = rearrange(rotate(own_key, turn), "b a g t d -> b g a t d")
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
        query = rotate(self.by_head(self.query(x_BND[:, -slots:])), (cos[-slots:], sin[-slots:]))
        seen_TM = None
        if self.causal:
            size = slots, keys.shape[2]
            seen_TM = torch.ones(size, dtype=torch.bool, device=keys.device).tril(size[1] - slots)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen_TM, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """Llama's SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SlotBlock(nn.Module):
    """One Llama block for slots: norm, attention, norm, MLP, each added to the residual."""

    def __init__(self, shape: BlockShape, causal: bool) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, eps=shape.epsilon)
        self.attention = SlotAttention(shape, causal)
        self.mlp_norm = Norm(shape.width, eps=shape.epsilon)
        self.mlp = GatedMLP(shape.width, shape.inner)

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


# Our parameter <- the parameter of a Llama layer that plays the same part.
LLAMA_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def copy_llama_layer(block: nn.Module, layer: nn.Module) -> bool:
    """Start the block from a base's layer if that is Llama-shaped to the last parameter; say whether it was."""
    theirs = layer.state_dict()
    ours = block.state_dict()
    same_names = set(theirs) == set(LLAMA_NAMES.values())
    if not same_names or any(ours[name].shape != theirs[LLAMA_NAMES[name]].shape for name in ours):
        return False
    block.load_state_dict({name: unpacked(theirs[LLAMA_NAMES[name]]) for name in ours})
    return True


def unpacked(value: Any) -> Tensor:
    """A weight's values, where a package for quantising holds them as codes and scales."""
    return value.dequantize() if hasattr(value, "__tensor_flatten__") else value
