"""EAGLE-3: a decoder layer trained on its own outputs, without a target for them (Li et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.drafters.eagle import FeedbackDrafter
from ctcdraft.drafters.sequential import teacher_forced_tokens
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import base_block_config, copy_final_norm, init_from_base_layer
from ctcdraft.nn.block_config import BlockConfig, RMSNorm
from ctcdraft.nn.draft_vocab import draft_lm_head
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.nn.masks import packed_causal_mask, visible_mask
from ctcdraft.nn.transformer import CausalBlock, NormOfEach, TensorPair


class PairBlock(CausalBlock):
    """A decoder block whose attention reads pairs of an embedding and a hidden state, and adds to the latter.

    `unroll` computes what it would compute in a draft from every anchor along the text.
    """

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__(replace(shape, inputs=2), input_norm=True)
        self.attention_norm = NormOfEach(shape.width, shape.epsilon, 2)

    def init_from_base(self, shape: BlockConfig, lm: Any) -> str:
        """Copy a layer of the base, whose attention reads hidden states, if outputs agree; return a description.

        The weights for embeddings keep their random values.
        """
        layer = CausalBlock(shape, input_norm=True)
        copied, description = init_from_base_layer(layer, shape, layer, lm)
        if copied:
            weights = self.state_dict()
            for name, value in layer.state_dict().items():
                name = name.replace("attention_norm.", "attention_norm.norms.1.")
                weights[name][..., -value.shape[-1] :] = value  # in place: a state dict holds the parameters' memory
        return description

    def unroll(
        self, pairs_BLE: Tensor, position_ids_BL: Tensor, anchors_BA: Tensor, later_BATD: Tensor, feed: Any
    ) -> Tensor:
        """Return outputs_BATD of the anchors and of the T - 1 steps that follow each, every output fed to the next.

        Row t of the text is computed from the base's hidden states. A step sees the rows up to its anchor, its own row
        and those of the earlier steps of the same anchor; anchor 2, third step:

            rows of the text     steps of anchor 2
            0  1  2  3  4        +1  +2
            1  1  1  0  0         1   1

        Args:
            later_BATD: embeddings of the tokens of the later steps.
            feed: applied to an output before it is fed to the next step.
        """
        attention, rotation = self.attention, self.rotary(position_ids_BL[:, None])
        normed_BLE = self.attention_norm(pairs_BLE)
        query, text = attention.queries(normed_BLE, rotation), attention.keys_values(normed_BLE, rotation)
        seen = packed_causal_mask(position_ids_BL)
        # Without a mask the fastest kernels run.
        mixed = F.scaled_dot_product_attention(query, text[0], text[1], seen, is_causal=seen is None, enable_gqa=True)
        width = self.attention.shape.width
        rows_BLD = self.add(pairs_BLE[..., -width:], mixed.transpose(1, 2).flatten(2))
        outputs = [rows_BLD.gather(1, anchors_BA[..., None].expand(-1, -1, width))]
        hidden_BAL = ~visible_mask(anchors_BA, position_ids_BL)
        position_ids_BA, own = position_ids_BL.gather(1, anchors_BA), []
        for step, embedding_BAD in enumerate(later_BATD.unbind(dim=2), start=1):
            pair_BAE = torch.cat([embedding_BAD, feed(outputs[-1])], dim=-1)
            # There are none behind the full context; labels are missing there, too, so that nothing is trained.
            rotation = self.rotary((position_ids_BA + step).clamp(max=self.rotary.positions - 1)[:, None])
            normed_BAE = self.attention_norm(pair_BAE)
            own.append(attention.keys_values(normed_BAE, rotation))
            mixed_BAE = attend(attention.queries(normed_BAE, rotation), text, hidden_BAL, own)
            outputs.append(self.add(pair_BAE[..., -width:], mixed_BAE))
        return torch.stack(outputs, dim=2)

    def add(self, x_BLD: Tensor, mixed_BLE: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention.out(mixed_BLE)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


def attend(query_BHAd: Tensor, text: TensorPair, hidden_BAL: Tensor, own: list[TensorPair]) -> Tensor:
    """Return the mixed values_BAE of queries [B, H, A, d] that see text, and of `own` each the row of the same anchor.

    No attention kernel has such a mask: over the rows of all anchors and steps it would be mostly zeros.

    Args:
        text: keys and values [B, G, L, d].
        hidden_BAL: true for text that an anchor does not see.
        own: per step, keys and values [B, G, A, d].
    """
    text_keys, text_values = text
    query = query_BHAd.unflatten(1, (text_keys.shape[1], -1)) * query_BHAd.shape[-1] ** -0.5  # b g r a d
    to_text = query.flatten(2, 3) @ text_keys.transpose(-1, -2)
    to_text = to_text.unflatten(2, query.shape[2:4]).masked_fill(hidden_BAL[:, None, None], -torch.inf)
    to_own = torch.stack([(query * keys[:, :, None]).sum(dim=-1) for keys, _ in own], dim=-1)
    at_least_float32 = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([to_text, to_own], dim=-1).softmax(dim=-1, dtype=at_least_float32).to(query.dtype)
    on_text, on_own = weights.split([text_keys.shape[2], len(own)], dim=-1)
    mixed = (on_text.flatten(2, 3) @ text_values).unflatten(2, query.shape[2:4])
    for weight, (_, values) in zip(on_own.unbind(dim=-1), own, strict=True):
        mixed = mixed + weight[..., None] * values[:, :, None]
    return mixed.permute(0, 3, 1, 2, 4).flatten(2)


class Eagle3(FeedbackDrafter):
    """The base's auxiliary layers, fused, beside the token's embedding; the layer's output is read by an lm_head.

    In training the outputs of a step are the inputs of the next, as in a draft, for `frames` steps or as many as there
    are labels. So training equals decoding in every frame; each learns the base's distribution alone.

    Args:
        vocabulary: size of the draft vocabulary, the most frequent tokens of the corpus; None for the base's own.
        own_head: an lm_head that is trained, at first the base's rows; False: the base's, frozen.
        layer_norms: a norm of each auxiliary layer before they are fused (EAGLE-3.1).
        feed_normed: feed outputs back after the final norm, not before it (EAGLE-3.1).
        like_base: rotary frequencies, head norms, biases and activation of the base's layers instead of plain Llama's.
    """

    uses_aux_hidden_states = True

    def __init__(
        self,
        base: BaseLM,
        frames: int,
        tree: StepTreeBuilder,
        vocabulary: int | None,
        own_head: bool,
        layer_norms: bool,
        feed_normed: bool,
        like_base: bool,
    ) -> None:
        super().__init__(frames, tree, base.stop_token_ids)
        config = base_block_config(base.lm, base.context_length)
        config = config if like_base else config.as_plain_llama()
        self.width, self.state_columns = base.width, base.state_columns
        # The last layer comes first of several and is not read; alone it is all there is.
        self.skipped = base.width if len(base.aux_layers) > 1 else 0
        layers = max(len(base.aux_layers) - 1, 1)
        self.layer_norms: Any = NormOfEach(base.width, config.epsilon, layers) if layer_norms else nn.Identity()
        self.fuse = nn.Linear(layers * base.width, base.width, bias=False)
        self.block = PairBlock(config)
        self.norm = RMSNorm(base.width, eps=config.epsilon)
        self.to(base.device)
        self.feed_normed = feed_normed
        self.teacher = TokenHead(base.head)  # of the base: distributions to learn from
        self.head = TokenHead(draft_lm_head(base.head, vocabulary, trained=own_head))
        self.embedding = base.embedding
        self.initialised = f"{self.block.init_from_base(config, base.lm)}, final norm "
        self.initialised += "from the base" if copy_final_norm(self.norm, base.lm) else "of ones"

    def forward(self, batch: Batch) -> TokenEmissions:
        frames = min(self.frames, batch.labels_BAS.shape[2])
        pairs_BLE = self.training_pairs(batch, batch.states_BLD)
        later_BATD = self.embedding(teacher_forced_tokens(batch, frames)[:, :, 1:]).to(self.dtype)
        feed = self.norm if self.feed_normed else nn.Identity()
        outputs_BATD = self.block.unroll(pairs_BLE, batch.position_ids_BL, batch.anchors_BA, later_BATD, feed)
        return TokenEmissions(self.norm(outputs_BATD), self.teacher, own=self.head)

    def input_states(self, states_BLD: Tensor) -> Tensor:
        if self.state_columns is not None:
            states_BLD = states_BLD[..., self.state_columns]
        return self.fuse(self.layer_norms(states_BLD[..., self.skipped :].to(self.dtype)))

    def outputs(self, pairs_BLE: Tensor, position_ids: Tensor, memory: Any = None, seen: Any = None) -> Tensor:
        outputs_BLD = self.block(pairs_BLE, position_ids, memory, seen)
        return self.norm(outputs_BLD) if self.feed_normed else outputs_BLD

    def logits(self, outputs_XD: Tensor) -> Tensor:
        return self.head(outputs_XD if self.feed_normed else self.norm(outputs_XD))
