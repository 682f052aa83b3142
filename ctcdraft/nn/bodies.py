"""Bodies: how a parallel drafter computes the hidden states of all frames from the base's hidden states.

Every body has the methods of AttentionBody, `forward` for all anchors of a batch in training and `step` for one anchor
in decoding, and `layers`: how many keep keys and values of the text (0: it uses the anchor alone).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.errors import check_int
from ctcdraft.nn.base_layer import copy_final_norm, init_from_base_layer, zero
from ctcdraft.nn.block_config import BlockConfig, RMSNorm
from ctcdraft.nn.compiled_body import AttentionArrays
from ctcdraft.nn.compiled_step import compiled_fusion
from ctcdraft.nn.rotary import Rotary
from ctcdraft.nn.slot_attention import SlotBlock
from ctcdraft.nn.slot_bodies import SlotBody
from ctcdraft.nn.transformer import TensorPair


class AttentionBody(SlotBody):
    """The draft module of Wen et al. 2024 (section 3, Figure 1): T learned slots after an anchor, Llama-style blocks.

        text    h0  h1  h2  h3*          * the anchor: the newest hidden state of the base
        slots                s1  s2  s3  s4      at positions anchor + 1, + 2, ...
                             |___ attend to each other, and to all text up to the anchor

    A slot starts as the projected anchor state plus its own embedding. All blocks see the same projected text.

    Args:
        root_input: add the projected embedding of the root; without it the body is exactly the paper's.
        causal: slots attend only to earlier slots instead of to all.
        like_base: rotary frequencies, head norms, biases and activation of the base's layers instead of plain Llama's.
        own_text: add to each block's text a linear map (at first 0) of all hidden-state layers, normalised.
            E: the width of all layers together, the fused state first.
        root_row: R = T + 1 rows, the first one the projected embedding of the root at its position.
    """

    make_arrays = AttentionArrays

    # The defaults are for older checkpoints, whose configs do not name these.
    def __init__(
        self,
        shape: BlockConfig,
        frames: int,
        root_input: bool,
        causal: bool,
        blocks: int = 1,
        like_base: bool = False,
        own_text: bool = False,
        root_row: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape = shape if like_base else shape.as_plain_llama()
        self.layers = check_int(blocks, "drafter.body.blocks")
        self.frames, self.rows = frames, frames + root_row
        self.root_input, self.root_row = root_input, root_row
        self.rotary = Rotary(shape.frequencies, shape.positions + self.rows, shape.rotary_scale)
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        nn.init.eye_(self.project.weight)
        self.slots_TD = nn.Parameter(torch.randn(frames, shape.width) * 0.02)
        self.root_norm: Any = RMSNorm(shape.width, eps=shape.epsilon) if root_input or root_row else None
        self.root_project: Any = nn.Linear(shape.width, shape.width, bias=False) if root_input or root_row else None
        self.block = SlotBlock(shape, causal)
        self.deeper = nn.ModuleList([SlotBlock(shape, causal) for _ in range(blocks - 1)])
        self.norm = RMSNorm(shape.width, eps=shape.epsilon)
        all_layers, count = shape.state_layers * shape.width, blocks if own_text else 0
        self.own_text = nn.ModuleList([nn.Linear(all_layers, shape.width, bias=False) for _ in range(count)])
        zero(self.own_text)

    def init_from_base(self, lm: Any) -> str:
        """Copy the base's last layer if outputs agree, and its final norm; return a description of what was done."""
        copied, description = init_from_base_layer(
            self.block,
            self.shape,
            lambda x_BLD, ids_L: self.block.forward_text(x_BLD, self.rotary(ids_L[None, None])),
            lm,
        )
        # Further copies start with zero output, or the layer would be applied several times.
        for block in cast(list[Any], [*self.deeper] if copied else []):
            block.load_state_dict(self.block.state_dict())
            zero(block.attention.out)
            zero(block.mlp.down)
        return f"{description}, final norm {'from the base' if copy_final_norm(self.norm, lm) else 'of ones'}"

    def read_text(self, states_BLE: Tensor) -> Tensor:
        return self.project(states_BLE[..., : self.shape.width])

    def texts(self, text_BLD: Tensor, states_BLE: Tensor) -> list[tuple[Any, Tensor]]:
        shared, width = super().texts(text_BLD, states_BLE), self.shape.width
        if not self.own_text:
            return shared
        normed_BLE = F.rms_norm(states_BLE.unflatten(-1, (-1, width)), (width,), eps=self.shape.epsilon).flatten(-2)
        return [(block, text_BLD + own(normed_BLE)) for (block, _), own in zip(shared, self.own_text, strict=True)]

    def first_rows(self, start_BAD: Any, root_BAD: Tensor) -> Tensor:
        if self.root_project is None:
            return start_BAD[:, :, None] + self.slots_TD
        if not self.root_row:  # then the root is input
            return (start_BAD + self.root_project(self.root_norm(root_BAD)))[:, :, None] + self.slots_TD
        root_BAD = self.root_project(self.root_norm(root_BAD))
        slots_BATD = (start_BAD + root_BAD if self.root_input else start_BAD)[:, :, None] + self.slots_TD
        return torch.cat([root_BAD[:, :, None], slots_BATD], dim=2)


class AuxStateFusion(nn.Module):
    """Fusion of auxiliary hidden-state layers: the last layer's state plus a linear map of the others, normalised.

    states_BLD holds all layers of a token, the last layer first.
    """

    def __init__(self, width: int, layers: int, epsilon: float) -> None:
        super().__init__()
        self.width = width
        self.norms = nn.ModuleList([RMSNorm(width, eps=epsilon) for _ in range(layers - 1)])
        self.mix = nn.Linear((layers - 1) * width, width, bias=False)
        zero(self.mix)  # training starts from a drafter that uses the last layer alone

    def forward(self, states_BLD: Tensor) -> Tensor:
        if (fused_BLD := compiled_fusion(self, states_BLD)) is not None:
            return fused_BLD
        last_BLD, *others = states_BLD.split(self.width, dim=-1)
        normed = [norm(state_BLD) for norm, state_BLD in zip(self.norms, others, strict=True)]
        return last_BLD + self.mix(torch.cat(normed, dim=-1))


class AnchorBody(nn.Module):
    """Base class of bodies without attention: they use the anchor's hidden state alone and start as the identity."""

    layers = 0

    def init_from_base(self, lm: Any) -> str:
        return "as the identity"

    def text_keys_values(self, states_BLD: Tensor, position_ids_BL: Tensor) -> list[TensorPair]:
        return []

    def step(self, states_BKD: Tensor, root_BAD: Tensor, memory: None, context: Any) -> Tensor:
        return self(anchor_BAD=context.newest(states_BKD))


class SiLULinear(nn.Linear):
    """SiLU(W x + b), a residual branch."""

    def forward(self, x_XE: Tensor) -> Tensor:
        return F.silu(super().forward(x_XE))


def residual_branch(in_features: int, out_features: int, inner: int | None, key: str) -> nn.Module:
    """Return SiLU(W x + b), or U SiLU(W x + b) of `inner` columns, by which parameter budgets can be matched.

    key: the config key of `inner`.
    """
    if inner is None:
        return SiLULinear(in_features, out_features)
    up = SiLULinear(in_features, check_int(inner, key))
    return nn.Sequential(OrderedDict(up=up, down=nn.Linear(inner, out_features, bias=False)))


class ResidualBody(AnchorBody):
    """Medusa's heads (Cai et al. 2024, section 2.1): for every frame, `blocks` times s + SiLU(W s), s the state.

    The lm_head after it is the base's, frozen; Medusa trains a copy for each head. As in Medusa the root is no input.
    inner: s + U SiLU(W s) with so many columns instead, which is no longer Medusa's; None for Medusa's.
    """

    def __init__(self, shape: BlockConfig, frames: int, blocks: int, inner: int | None = None) -> None:
        super().__init__()
        check_int(blocks, "drafter.body.blocks")
        self.heads = nn.ModuleList()
        for _ in range(frames):
            branches = [residual_branch(shape.width, shape.width, inner, "drafter.body.inner") for _ in range(blocks)]
            for branch in branches:  # the last linear layer alone, so that the output is zero and the gradient is not
                zero(getattr(branch, "down", branch))
            self.heads.append(nn.ModuleList(branches))

    def forward(self, anchor_BAD: Tensor, **unused: Any) -> Tensor:
        """Return hidden states_BATD of every frame, ready for the head."""
        frames: list[Tensor] = []
        for branches in cast(list[nn.ModuleList], [*self.heads]):
            state_BAD = anchor_BAD
            for branch in branches:
                state_BAD = state_BAD + branch(state_BAD)
            frames.append(state_BAD)
        return torch.stack(frames, dim=2)


class FeedForwardBody(AnchorBody):
    """Blockwise parallel decoding (Stern et al. 2018, section 6): one feed-forward layer of T outputs for all frames.

    The anchor's hidden state is added to every frame.
    """

    def __init__(self, shape: BlockConfig, frames: int, inner: int | None) -> None:
        super().__init__()
        self.frames = frames
        inner = shape.width if inner is None else check_int(inner, "drafter.body.inner")
        self.up = nn.Linear(shape.width, frames * inner)
        self.down = nn.Linear(frames * inner, frames * shape.width)
        zero(self.down)  # every frame starts as the anchor's state

    def forward(self, anchor_BAD: Tensor, **unused: Any) -> Tensor:
        """Return hidden states_BATD of every frame, ready for the head."""
        frames_BATD = self.down(F.relu(self.up(anchor_BAD))).unflatten(-1, (self.frames, -1))
        return anchor_BAD[:, :, None] + frames_BATD
