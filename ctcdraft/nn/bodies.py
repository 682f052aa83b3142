"""Bodies that attend: base states in, one state a frame out. They know no words and no blank.

Every body has `layers`, in how many it keeps keys and values of the text (0: it looks at the anchor alone),
`init_from_base`, `text_keys_values` and `forward`, which is for training and says what is computed, and `step`, which
is
`forward` for decoding: one anchor, behind text that is remembered. As here.

Bodies that look at the anchor alone: base state in, one state a frame out. They know no text, words or blank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.errors import check_int
from ctcdraft.nn.base_layer import copy_final_norm, init_from_base_layer
from ctcdraft.nn.rotary import Rotary
from ctcdraft.nn.transformer import BlockConfig, RMSNorm, SlotBlock


class AttentionBody(nn.Module):
    """The paper's draft module: T learned slots appended at an anchor, one Llama-style block (Wen et al. 2024,
    section 3; Figure 1).

        text    h0  h1  h2  h3*          * the anchor: the newest state the base has
        slots                s1  s2  s3  s4      at positions anchor + 1, + 2, ...
                             |___ each other, and all text up to the anchor

    A slot starts as the projected anchor state plus its own embedding, plus (root_input) the projected
    embedding of the root, which is certain by then; without it the body is the paper's to the letter.
    causal: slots see only earlier slots; the default is both ways. blocks: how many (runs that do not say have
    one). Each of them sees the same text, projected base states: text passes through no block.
    like_base: rotary frequencies, norms of heads, biases and activation of the base's layers; runs that do not say so
    have a plain Llama layer.
    """

    def __init__(
        self,
        shape: BlockConfig,
        frames: int,
        root_input: bool,
        causal: bool,
        blocks: int = 1,
        like_base: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape = shape if like_base else shape.as_plain_llama()
        self.layers = check_int(blocks, "drafter.body.blocks")
        self.frames = frames
        self.rotary = Rotary(shape.frequencies, shape.positions + frames, shape.rotary_scale)
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        nn.init.eye_(self.project.weight)
        self.slots_TD = nn.Parameter(torch.randn(frames, shape.width) * 0.02)
        self.root_norm = RMSNorm(shape.width, eps=shape.epsilon) if root_input else None
        self.root_project = nn.Linear(shape.width, shape.width, bias=False) if root_input else None
        self.block = SlotBlock(shape, causal)
        self.deeper = nn.ModuleList([SlotBlock(shape, causal) for _ in range(blocks - 1)])
        self.norm = RMSNorm(shape.width, eps=shape.epsilon)

    def init_from_base(self, lm: Any) -> str:
        """Copy the base's last layer where outputs agree, and its final norm; return in words what was done."""

        def read(x_BLD: Tensor, places_L: Tensor) -> Tensor:
            return self.block.forward_text(x_BLD, self.rotary(places_L))

        copied, description = init_from_base_layer(self.block, self.shape, read, lm)
        deeper: list[Any] = [*self.deeper] if copied else []
        for block in deeper:  # a second reading of what is there already: it starts by adding nothing
            block.load_state_dict(self.block.state_dict())
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)
        return f"{description}, final norm {'from the base' if copy_final_norm(self.norm, lm) else 'of ones'}"

    def text_keys_values(self, states_BLD: Tensor, position_ids_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, G, L, d] of the text for every block, each a function of its own state and place."""
        text_BLD, turn = self.project(states_BLD), self.rotary(position_ids_BL[:, None])  # the same for every head
        return [block.keys_values(text_BLD, turn) for block in (self.block, *self.deeper)]

    def forward(
        self,
        anchor_BAD: Tensor,
        root_BAD: Tensor,
        anchors_BA: Tensor,
        text: list[tuple[Tensor, Tensor]],
        visible_BAL: Tensor | None,
    ) -> Tensor:
        """States_BATD of every frame, ready for the head.

        anchor_BAD: base states at the anchors; root_BAD: embeddings of the roots; anchors_BA: their places.
        """
        start_BAD = self.with_root(self.project(anchor_BAD), root_BAD)
        slots_BATD = start_BAD[:, :, None] + self.slots_TD
        steps_T = torch.arange(1, self.frames + 1, device=anchors_BA.device)
        turn = self.rotary(anchors_BA[..., None] + steps_T)
        for block, keys_values in zip((self.block, *self.deeper), text, strict=True):
            slots_BATD = block(slots_BATD, turn, keys_values, visible_BAL)
        return self.norm(slots_BATD)

    def step(self, states_BKD: Tensor, root_BAD: Tensor, memory: Any) -> Tensor:
        """States_BATD behind the newest of the fresh base states; B = A = 1.

        memory: the KVCache of the text so far, which the fresh states join. The slots' rows lie in it too while
        they are needed:

            a b c | d e | s1 s2 s3        remembered, fresh, slots: positions 0 .. 7 in one piece
        """
        text_BKD = self.project(states_BKD)
        start = memory.length
        read = start + text_BKD.shape[1]
        turn = self.rotary.span(start, read + self.frames, text_BKD.device)
        slots_BTD = self.with_root(text_BKD[:, -1:], root_BAD) + self.slots_TD
        for layer, block in enumerate((self.block, *self.deeper)):
            slots_BTD = block.step(text_BKD, slots_BTD, turn, memory, layer)
        memory.crop(read)
        return self.norm(slots_BTD)[:, None]

    def with_root(self, start_BAD: Tensor, root_BAD: Tensor) -> Tensor:
        if self.root_project is None or self.root_norm is None:
            return start_BAD
        return start_BAD + self.root_project(self.root_norm(root_BAD))


class AuxStateFusion(nn.Module):
    """States of several taps, side by side, into one: the last layer's as it is, plus a map of the others, normed,
    which starts at zero. It starts as a drafter of one tap."""

    def __init__(self, width: int, taps: int, epsilon: float) -> None:
        super().__init__()
        self.width = width
        self.norms = nn.ModuleList([RMSNorm(width, eps=epsilon) for _ in range(taps - 1)])
        self.mix = nn.Linear((taps - 1) * width, width, bias=False)
        nn.init.zeros_(self.mix.weight)

    def forward(self, taps_BLD: Tensor) -> Tensor:
        last_BLD, *others = taps_BLD.split(self.width, dim=-1)
        normed = [norm(tap_BLD) for norm, tap_BLD in zip(self.norms, others, strict=True)]
        return last_BLD + self.mix(torch.cat(normed, dim=-1))


class AnchorBody(nn.Module):
    """What bodies without attention share: they keep nothing of the text, and start as the identity."""

    layers = 0

    def init_from_base(self, lm: Any) -> str:
        return "as the identity"

    def text_keys_values(self, states_BLD: Tensor, position_ids_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        return []

    def step(self, states_BKD: Tensor, root_BAD: Tensor, memory: None) -> Tensor:
        return self(anchor_BAD=states_BKD[:, -1:])


class SiLULinear(nn.Linear):
    """SiLU(W x): what is added to a state."""

    def forward(self, x_XE: Tensor) -> Tensor:
        return F.silu(super().forward(x_XE))


class SiLUBottleneck(nn.Module):
    """U SiLU(W x), as wide within as is asked for: a residue of any size, so that budgets can be matched."""

    def __init__(self, came: int, inner: int, went: int) -> None:
        super().__init__()
        self.up = SiLULinear(came, inner)
        self.down = nn.Linear(inner, went, bias=False)

    def forward(self, x_XE: Tensor) -> Tensor:
        return self.down(self.up(x_XE))


def residual_branch(in_features: int, out_features: int, inner: int | None, key: str) -> nn.Module:
    """From `in_features` columns to `out_features`; inner: columns within, None for none. key: what the user types."""
    return (
        SiLULinear(in_features, out_features)
        if inner is None
        else SiLUBottleneck(in_features, check_int(inner, key), out_features)
    )


def zero_init_(block: nn.Module) -> None:
    """What it adds is zero at first, and learns from the first step on."""
    for parameter in (block.down if isinstance(block, SiLUBottleneck) else block).parameters():
        nn.init.zeros_(parameter)


class ResidualBody(AnchorBody):
    """Medusa's heads (Cai et al. 2024, section 2.1): for every frame `blocks` times s + SiLU(W s), from the
    anchor's state. The head behind is the base's own, frozen, where Medusa gives each head a copy of its own to train.

    The root is no input: its word is certain by then, yet Medusa's heads do not see it.
    inner: s + U SiLU(W s) with that many columns within instead, which is no longer Medusa's; None is.
    """

    def __init__(self, shape: BlockConfig, frames: int, blocks: int, inner: int | None = None) -> None:
        super().__init__()
        check_int(blocks, "drafter.body.blocks")
        self.heads = nn.ModuleList()
        for _ in range(frames):
            made = [residual_branch(shape.width, shape.width, inner, "drafter.body.inner") for _ in range(blocks)]
            for block in made:
                zero_init_(block)
            self.heads.append(nn.ModuleList(made))

    def forward(self, anchor_BAD: Tensor, **unused: Any) -> Tensor:
        """States_BATD of every frame, ready for the head."""
        return torch.stack([self.apply_blocks(blocks, anchor_BAD) for blocks in self.heads], dim=2)

    @staticmethod
    def apply_blocks(blocks: Any, state_BAD: Tensor) -> Tensor:
        for block in blocks:
            state_BAD = state_BAD + block(state_BAD)
        return state_BAD


class FeedForwardBody(AnchorBody):
    """Blockwise parallel decoding (Stern et al. 2018, section 6): one feed-forward layer for all frames, T times
    as wide within and without, and the anchor's state added to every frame. Its second map starts at zero."""

    def __init__(self, shape: BlockConfig, frames: int, inner: int | None) -> None:
        super().__init__()
        inner = shape.width if inner is None else check_int(inner, "drafter.body.inner")
        self.frames = frames
        self.up = nn.Linear(shape.width, frames * inner)
        self.down = nn.Linear(frames * inner, frames * shape.width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, anchor_BAD: Tensor, **unused: Any) -> Tensor:
        """States_BATD of every frame, ready for the head."""
        frames_BATD = self.down(F.relu(self.up(anchor_BAD))).unflatten(-1, (self.frames, -1))
        return anchor_BAD[:, :, None] + frames_BATD
