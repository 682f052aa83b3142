"""Bodies that look at the anchor alone: base state in, one state a frame out. They know no text, words or blank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.errors import whole
from ctcdraft.nn.transformer import BlockShape


class AnchorBody(nn.Module):
    """What bodies without attention share: they keep nothing of the text, and start as the identity."""

    layers = 0

    def init_from_base(self, lm: Any) -> str:
        return "as the identity"

    def text_keys_values(self, states_BLD: Tensor, position_ids_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        return []

    def step(self, states_BKD: Tensor, root_BAD: Tensor, memory: None) -> Tensor:
        return self(anchor_BAD=states_BKD[:, -1:])


class Residue(nn.Linear):
    """SiLU(W x): what is added to a state."""

    def forward(self, x_XE: Tensor) -> Tensor:
        return F.silu(super().forward(x_XE))


class Widened(nn.Module):
    """U SiLU(W x), as wide within as is asked for: a residue of any size, so that budgets can be matched."""

    def __init__(self, came: int, inner: int, went: int) -> None:
        super().__init__()
        self.up = Residue(came, inner)
        self.down = nn.Linear(inner, went, bias=False)

    def forward(self, x_XE: Tensor) -> Tensor:
        return self.down(self.up(x_XE))


def residue(in_features: int, out_features: int, inner: int | None, key: str) -> nn.Module:
    """From `in_features` columns to `out_features`; inner: columns within, None for none. key: what the user types."""
    return Residue(in_features, out_features) if inner is None else Widened(in_features, whole(inner, key), out_features)


def start_at_nothing(block: nn.Module) -> None:
    """What it adds is zero at first, and learns from the first step on."""
    for parameter in (block.down if isinstance(block, Widened) else block).parameters():
        nn.init.zeros_(parameter)


class ResidualBody(AnchorBody):
    """Medusa's heads (Cai et al. 2024, section 2.1): for every frame `blocks` times s + SiLU(W s), from the
    anchor's state. The head behind is the base's own, frozen, where Medusa gives each head a copy of its own to train.

    The root is no input: its word is certain by then, yet Medusa's heads do not see it.
    inner: s + U SiLU(W s) with that many columns within instead, which is no longer Medusa's; None is.
    """

    def __init__(self, shape: BlockShape, frames: int, blocks: int, inner: int | None = None) -> None:
        super().__init__()
        whole(blocks, "drafter.body.blocks")
        self.heads = nn.ModuleList()
        for _ in range(frames):
            made = [residue(shape.width, shape.width, inner, "drafter.body.inner") for _ in range(blocks)]
            for block in made:
                start_at_nothing(block)
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

    def __init__(self, shape: BlockShape, frames: int, inner: int | None) -> None:
        super().__init__()
        inner = shape.width if inner is None else whole(inner, "drafter.body.inner")
        self.frames = frames
        self.up = nn.Linear(shape.width, frames * inner)
        self.down = nn.Linear(frames * inner, frames * shape.width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, anchor_BAD: Tensor, **unused: Any) -> Tensor:
        """States_BATD of every frame, ready for the head."""
        frames_BATD = self.down(F.relu(self.up(anchor_BAD))).unflatten(-1, (self.frames, -1))
        return anchor_BAD[:, :, None] + frames_BATD
