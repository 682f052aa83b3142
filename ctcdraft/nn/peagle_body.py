"""P-EAGLE's body: a causal transformer over the text, with masks behind it for the tokens to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctcdraft.errors import check_int
from ctcdraft.nn.block_config import BlockConfig, RMSNorm
from ctcdraft.nn.compiled_body import PEagleArrays
from ctcdraft.nn.masks import visible_mask
from ctcdraft.nn.rotary import Rotary
from ctcdraft.nn.slot_attention import SlotBlock, Text
from ctcdraft.nn.slot_bodies import INITIAL_SPREAD, SlotBody, aux_projection, draw_weights
from ctcdraft.nn.transformer import TensorPair


class PEagleBody(SlotBody):
    """P-EAGLE's draft model (AWS 2026, arXiv:2602.01469): EAGLE-3's layers, with masks for the tokens to come.

        text      x1,h0  x2,h1  x3,h2*                       * the anchor, beside the root x3; h = fc(auxiliary layers)
        masks                          mask,m  mask,m         m: one state in place of the base's
        frames                  f1       f2      f3

    The text runs through all blocks, each token beside the hidden state before it. Rows see those before them; masks
    also all text up to their anchor. So frames are the outputs of the anchor's row and of T - 1 masks.
    """

    make_arrays = PEagleArrays
    reads_all_layers = True
    reads_tokens = True

    def __init__(self, shape: BlockConfig, frames: int, blocks: int, like_base: bool) -> None:
        super().__init__()
        self.shape = shape = shape if like_base else shape.as_plain_llama()
        self.layers = check_int(blocks, "drafter.body.blocks")
        self.frames = self.rows = frames
        self.rotary = Rotary(shape.frequencies, shape.positions + self.rows, shape.rotary_scale)
        self.fc = aux_projection(shape)
        self.mask_D = nn.Parameter(torch.randn(shape.width) * INITIAL_SPREAD)
        self.mask_state_E = nn.Parameter(torch.randn(self.fc.in_features))
        self.block = SlotBlock(replace(shape, inputs=2), causal=True)
        self.deeper = nn.ModuleList([SlotBlock(shape, causal=True) for _ in range(blocks - 1)])
        self.norm = RMSNorm(shape.width, eps=shape.epsilon)
        draw_weights(self)

    def init_from_base(self, lm: Any) -> str:
        return "at random, as published"

    def read_text(self, states_BLE: Tensor) -> Tensor:
        """Return the pairs of the first block: the embedding of the token after it beside the fused hidden state."""
        layers_BLE, embedding_BLD = states_BLE[..., : -self.shape.width], states_BLE[..., -self.shape.width :]
        return torch.cat([embedding_BLD, self.fc(layers_BLE[..., -self.fc.in_features :])], dim=-1)

    def masks(self, like_BNE: Tensor) -> Tensor:
        """Return the pairs of the T - 1 masks, [T - 1, 2 D]."""
        pair_E = torch.cat([self.mask_D, self.fc(self.mask_state_E)]).to(like_BNE.dtype)
        return pair_E.expand(self.rows - 1, -1)

    def first_rows(self, start_BAD: Any, root_BAD: Tensor) -> Tensor:
        masks_BARE = self.masks(start_BAD).expand(*start_BAD.shape[:2], -1, -1)
        return torch.cat([start_BAD[:, :, None], masks_BARE], dim=2)

    def text_keys_values(self, states_BLE: Tensor, position_ids_BL: Tensor) -> list[TensorPair]:
        """Return keys and values [B, G, L, d] of the text for every block; they depend on the text up to a token."""
        rotation, text_BLE = self.rotary(position_ids_BL[:, None]), self.read_text(states_BLE)
        everywhere_BL = torch.arange(position_ids_BL.shape[1], device=position_ids_BL.device).expand_as(position_ids_BL)
        before_BLL = before_anchor(visible_mask(everywhere_BL, position_ids_BL))
        keys_values = [self.block.keys_values(text_BLE, rotation)]
        for block, deeper in zip([self.block, *self.deeper], self.deeper, strict=False):
            text_BLE = block.forward_text(text_BLE, rotation, before_BLL)
            keys_values.append(deeper.keys_values(text_BLE, rotation))
        return keys_values

    def forward(
        self, anchor_BAD: Tensor, root_BAD: Tensor, anchors_BA: Tensor, text: Sequence[Text], visible_BAL: Any
    ) -> Tensor:
        assert all(isinstance(one, tuple) for one in text), "a StoredText would show the anchor's row, too"
        # The anchor's row is computed again as the first of the draft, which then must not see the one in the text.
        return super().forward(anchor_BAD, root_BAD, anchors_BA - 1, text, before_anchor(visible_BAL))

    def step_in_tensors(self, states_BKE: Tensor, root_BAD: Tensor, memory: Any, context: Any) -> Tensor:
        text_BKE = self.read_text(states_BKE)
        text = text_BKE.shape[1]
        rows_BNE = torch.cat([text_BKE, self.masks(text_BKE)[None]], dim=1)
        new = memory.append(text, text_BKE.device, self.rows - 1, True, context.count_1)
        rotation, seen_NM = new.rotation(self.rotary), new.seen_by_all()
        mask_NM = self.block.attention.mask_of(seen_NM, text_BKE.dtype) if memory.fixed_shapes else seen_NM
        for layer, block in enumerate((self.block, *self.deeper)):
            rows_BNE = block.step(rows_BNE[:, :0], rows_BNE, rotation, memory, layer, mask_NM)
        new.close()
        frames_BTD = torch.cat([context.newest(rows_BNE[:, :text]), rows_BNE[:, text:]], dim=1)
        return self.norm(frames_BTD)[:, None]


def before_anchor(visible_BAL: Tensor) -> Tensor:
    """Return the text that anchors see without the anchors themselves, which are the last of what they see.

    0 1 1 1 0   ->   0 1 1 0 0
    """
    return visible_BAL & F.pad(visible_BAL[..., 1:], (0, 1), value=False)
