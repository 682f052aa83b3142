"""Bodies whose frames are rows of queries behind the text: what they share, and DFlash's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.errors import check_int
from ctcdraft.nn.block_config import BlockConfig, RMSNorm
from ctcdraft.nn.compiled_body import BodyArrays, DFlashArrays, compiled_step
from ctcdraft.nn.rotary import Rotary
from ctcdraft.nn.slot_attention import SlotBlock, Text
from ctcdraft.nn.transformer import TensorPair

INITIAL_SPREAD = 0.02  # of weights drawn at random, as in transformers' models


class SlotBody(nn.Module):
    """Base class of bodies that compute R rows behind the text, which attend to the text and to each other.

    The last T rows are the frames. Keys and values of the text depend on its own token alone, so that they are computed
    once and kept; this also makes training equal to decoding. A subclass sets these attributes and has `read_text` and
    `first_rows`.
    """

    shape: BlockConfig
    layers: int  # blocks, each with keys and values of the text
    frames: int
    rows: int
    rotary: Rotary
    block: Any
    deeper: Any  # the further blocks
    norm: Any
    make_arrays: Callable[[Any], BodyArrays]  # for the step in machine code
    arrays: BodyArrays | None = None
    reads_all_layers = False  # whether it takes the hidden-state layers as they are instead of one fused state
    reads_tokens = False  # whether the embedding of the token after it follows the layers of every token of the text
    starts_at_anchor = True  # whether the first rows depend on the text at the anchor

    def read_text(self, states_BLE: Tensor) -> Tensor:
        """Return the text_BLD that the blocks attend to, given all hidden-state layers of its tokens."""
        raise NotImplementedError

    def first_rows(self, start_BAD: Any, root_BAD: Tensor) -> Tensor:
        """Return the rows_BARD of the first block, given `read_text` of the anchors and embeddings of the roots.

        start_BAD: None where `starts_at_anchor` is false.
        """
        raise NotImplementedError

    def texts(self, text_BLD: Tensor, states_BLE: Tensor) -> list[tuple[Any, Tensor]]:
        """Return every block with the text that it sees, given that of `read_text`."""
        return [(block, text_BLD) for block in (self.block, *self.deeper)]

    def text_keys_values(self, states_BLE: Tensor, position_ids_BL: Tensor) -> list[TensorPair]:
        """Return keys and values [B, G, L, d] of the text for every block; each depends on its own token alone."""
        rotation = self.rotary(position_ids_BL[:, None])  # the same for all heads
        texts = self.texts(self.read_text(states_BLE), states_BLE)
        return [block.keys_values(text_BLD, rotation) for block, text_BLD in texts]

    def forward(
        self,
        anchor_BAD: Tensor,
        root_BAD: Tensor,
        anchors_BA: Tensor,
        text: Sequence[Text],
        visible_BAL: Tensor | None,
    ) -> Tensor:
        """Return hidden states_BATD of every frame, ready for the head.

        Args:
            anchor_BAD, root_BAD: the base's hidden states at the anchors, and embeddings of the roots.
            anchors_BA: position ids of the anchors.
            visible_BAL: the text that an anchor may see (None: all).
        """
        rows_BARD = self.first_rows(self.read_text(anchor_BAD) if self.starts_at_anchor else None, root_BAD)
        steps_R = torch.arange(1, self.rows + 1, device=anchors_BA.device)
        rotation = self.rotary(anchors_BA[..., None] + steps_R)
        for block, keys_values in zip([self.block, *self.deeper], text, strict=True):
            rows_BARD = block(rows_BARD, rotation, keys_values, visible_BAL)
        return self.norm(rows_BARD[:, :, -self.frames :])

    def step(self, states_BKE: Tensor, root_BAD: Tensor, memory: Any, context: Any) -> Tensor:
        """Return hidden states_BATD for an anchor at the newest of the new states; B = A = 1.

        memory: the cache of the text so far, to which the new states are appended. context: of the draft.

            a b c | d e | s1 s2 s3        cached, new, slots: contiguous positions 0 .. 7
        """
        if not context.padded and (frames_BATD := compiled_step(self, states_BKE, root_BAD, memory)) is not None:
            return frames_BATD
        return self.step_in_tensors(states_BKE, root_BAD, memory, context)

    def step_in_tensors(self, states_BKE: Tensor, root_BAD: Tensor, memory: Any, context: Any) -> Tensor:
        text_BKD = self.read_text(states_BKE)
        new = memory.append(text_BKD.shape[1], text_BKD.device, self.rows, self.block.attention.causal, context.count_1)
        rotation, seen_RM = new.rotation(self.rotary), new.seen_by_drafted()
        mask_RM = self.block.attention.mask_of(seen_RM, text_BKD.dtype) if memory.fixed_shapes else seen_RM
        start_BAD = context.newest(text_BKD) if self.starts_at_anchor else None
        rows_BRD = self.first_rows(start_BAD, root_BAD)[:, 0]
        for layer, (block, own_BKD) in enumerate(self.texts(text_BKD, states_BKE)):
            rows_BRD = block.step(own_BKD, rows_BRD, rotation, memory, layer, mask_RM)
        new.close()  # drops the rows behind the text: the next draft has others there
        return self.norm(rows_BRD[:, -self.frames :])[:, None]


class DFlashBody(SlotBody):
    """DFlash's draft model (Chen et al. 2026, arXiv:2602.06036): a block of the root and masks, denoised in one pass.

        text    c0  c1  c2  c3*                    * the anchor; c = norm(fc(the auxiliary layers of a token))
        rows                    root mask mask     embeddings, at positions anchor + 1, + 2, ...
        frames                       f1   f2       with root_predicts   f1   f2   f3

    Every block attends to the same text, without its own norm before keys and values, and to all rows of the draft. The
    layers are Qwen3's, whatever the base's are; of the base's come the sizes and the rotary frequencies.

    Args:
        causal: rows attend only to earlier rows instead of to all (JetSpec).
        root_predicts: the root's row is the first frame (DSpark, Domino), so that T rows give T frames.
    """

    make_arrays = DFlashArrays
    reads_all_layers = True
    starts_at_anchor = False

    def __init__(
        self, shape: BlockConfig, frames: int, blocks: int, causal: bool = False, root_predicts: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape = replace(shape, qk_norm=True, qkv_bias=False, activation="silu")
        self.layers = check_int(blocks, "drafter.body.blocks")
        self.frames, self.rows = frames, frames + (not root_predicts)
        self.rotary = Rotary(shape.frequencies, shape.positions + self.rows, shape.rotary_scale)
        self.fc = aux_projection(shape)
        self.text_norm = RMSNorm(shape.width, eps=shape.epsilon)
        # The published heads take the embedding of a token that the base never uses; not every base has one.
        self.mask_D = nn.Parameter(torch.randn(shape.width) * INITIAL_SPREAD)
        self.block = SlotBlock(shape, causal, norm_text=False)
        self.deeper = nn.ModuleList([SlotBlock(shape, causal, norm_text=False) for _ in range(blocks - 1)])
        self.norm = RMSNorm(shape.width, eps=shape.epsilon)
        draw_weights(self)

    def init_from_base(self, lm: Any) -> str:
        return "at random, as published"

    def read_text(self, states_BLE: Tensor) -> Tensor:
        return self.text_norm(self.fc(states_BLE[..., -self.fc.in_features :]))

    def first_rows(self, start_BAD: Any, root_BAD: Tensor) -> Tensor:
        masks_BATD = self.mask_D.to(root_BAD.dtype).expand(*root_BAD.shape[:2], self.rows - 1, -1)
        return torch.cat([root_BAD[:, :, None], masks_BATD], dim=2)


def aux_projection(shape: BlockConfig) -> nn.Linear:
    """Return a linear map of the auxiliary hidden-state layers of a token to one width.

    The last layer comes first of several and is not read, as published; alone it is all there is.
    """
    return nn.Linear(max(shape.state_layers - 1, 1) * shape.width, shape.width, bias=False)


def draw_weights(module: nn.Module) -> None:
    """Draw the weights of all linear layers as transformers' models do."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=INITIAL_SPREAD)
