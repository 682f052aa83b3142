"""Hydra: one head per position, conditioned on the draft tokens before it (Ankner et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.sequential import SequentialDrafter, decoder_layer, teacher_forced_tokens
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.errors import check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import copy_final_norm
from ctcdraft.nn.block_config import RMSNorm
from ctcdraft.nn.block_operations import embed_rows
from ctcdraft.nn.bodies import residual_branch
from ctcdraft.nn.draft_vocab import FrameHeads, draft_lm_head
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.nn.masks import packed_causal_mask


class HydraHead(nn.Module):
    """A hidden state and the embeddings of `tokens` tokens, concatenated and projected to the width, then residual
    layers. It starts as the identity of the hidden state."""

    def __init__(self, width: int, tokens: int, layers: int, inner: int | None) -> None:
        super().__init__()
        self.condense = nn.Linear((1 + tokens) * width, width)
        nn.init.zeros_(self.condense.weight)
        nn.init.eye_(self.condense.weight[:, :width])
        nn.init.zeros_(self.condense.bias)
        self.layers = nn.ModuleList(
            residual_branch((1 + tokens) * width if n == 0 else width, width, inner, "drafter.inner")
            for n in range(layers)
        )
        # Small, not zero: with zeros the embeddings' part of `condense` would get no gradient in the first step.
        for layer in self.layers.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, inputs_XE: Tensor) -> Tensor:
        x_XD, inner_XE = self.condense(inputs_XE), inputs_XE
        for layer in self.layers:
            x_XD = x_XD + layer(inner_XE)
            inner_XE = x_XD
        return x_XD


class Hydra(SequentialDrafter):
    """Head k predicts draft token k from the anchor's hidden state, the root and the k - 1 draft tokens before it.

    Args:
        layers: layers of each head's MLP, 1 in Hydra and 4 in Hydra++.
        prefix_layer: Hydra++'s extra decoder layer, through which a draft depends on all hidden states of the text.
        inner: width of a bottleneck within each layer; None, as in both papers, for none.
        own_heads: a trained lm_head with a bias for each frame, as in both papers, instead of the base's.
        prefix_norm: a norm behind the prefix layer.
        vocabulary: size of the draft vocabulary, the most frequent tokens of the corpus; None for the base's own.
        like_base: of the prefix layer; see `decoder_layer`.
    """

    per_frame_weights = True
    fixed_shapes = True

    def __init__(
        self,
        base: BaseLM,
        frames: int,
        layers: int,
        prefix_layer: bool,
        tree: StepTreeBuilder,
        inner: int | None = None,
        like_base: bool = False,
        own_heads: bool = False,
        prefix_norm: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__(frames, tree, base.stop_token_ids)
        check_int(layers, "drafter.layers")
        self.heads = nn.ModuleList(HydraHead(base.width, k + 1, layers, inner) for k in range(frames)).to(base.device)
        self.teacher = TokenHead(base.head)  # distributions to learn from, in training
        lm_head = partial(FrameHeads, base.head, frames, vocabulary, with_bias=True)
        self.head: Any = lm_head() if own_heads else TokenHead(draft_lm_head(base.head, vocabulary, trained=False))
        self.embedding = base.embedding
        self.width = base.width  # of several layers the last one comes first
        self.prefix: Any = None
        self.initialised = "as the identity"
        if prefix_layer:
            self.prefix, initialised = decoder_layer(base, like_base, input_norm=True)
            self.initialised += f", prefix layer {initialised}"
        self.prefix_norm: Any = None
        if prefix_layer and prefix_norm:
            self.prefix_norm = RMSNorm(base.width, eps=self.prefix.mlp_norm.eps).to(base.device)
            copy_final_norm(self.prefix_norm, base.lm)

    @property
    def dtype(self) -> torch.dtype:
        return self.trainable_parameters()[0].dtype

    def forward(self, batch: Batch) -> TokenEmissions:
        seen = packed_causal_mask(batch.position_ids_BL)
        states_BLD = self.context_states(batch.states_BLD, batch.position_ids_BL, None, seen)
        index_BAD = batch.anchors_BA[..., None].expand(-1, -1, states_BLD.shape[-1])
        inputs_BAD = states_BLD.gather(1, index_BAD)
        embedded_BATD = self.embedding(teacher_forced_tokens(batch, self.frames)).to(self.dtype)
        frames = []
        for head, embedding_BAD in zip(self.heads, embedded_BATD.unbind(dim=2), strict=True):
            inputs_BAD = torch.cat([inputs_BAD, embedding_BAD], dim=-1)
            frames.append(head(inputs_BAD))
        return TokenEmissions(torch.stack(frames, dim=2), self.teacher, own=self.head)

    def context_states(
        self, states_BLD: Tensor, position_ids: Tensor, memory: KVCache | None, seen: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states that the heads read: through the prefix layer where there is one."""
        states_BLD = states_BLD[..., : self.width].to(self.dtype)
        if self.prefix is not None:
            states_BLD = self.prefix(states_BLD, position_ids, memory, seen)
        return states_BLD if self.prefix_norm is None else self.prefix_norm(states_BLD)

    def step_function(self, context: Context, memory: KVCache | None) -> HydraStepFunction:
        if memory is None:  # draft tokens take no rows: the heads have no attention
            memory = context.new_cache(1, 0)
        states_BLD = context.new_states_KD[None]
        new = memory.append(states_BLD.shape[1], states_BLD.device, count_1=context.count_1)
        states_BLD = self.context_states(states_BLD, new.position_ids_N, memory, new.seen_by_text())
        if self.prefix is not None:
            new.close()
        return HydraStepFunction(self, memory, context.newest(states_BLD)[0])


@dataclass
class HydraStepFunction:
    drafter: Hydra
    memory: KVCache
    inputs_KE: Tensor  # per row of the last level, the anchor's hidden state and the embeddings of all tokens since
    level: int = 0

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        self.inputs_KE = embed_rows(self.drafter.embedding, tokens_K, self.inputs_KE, rows_K, False)
        states_KD, lm_head = self.drafter.heads[self.level](self.inputs_KE), self.drafter.head.of_frame(self.level)
        self.level += 1
        return lm_head(states_KD).float().log_softmax(dim=-1)

    def release(self) -> KVCache:
        return self.memory
