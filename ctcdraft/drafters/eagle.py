"""EAGLE: one autoregressive layer that predicts the base's next hidden states (Li et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.sequential import LevelAttention, SequentialDrafter, decoder_layer
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.errors import check_float
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.block_operations import embed_rows
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.nn.masks import gather_following, packed_causal_mask


class Eagle(SequentialDrafter):
    """Predicts the hidden state of a token from that token and the hidden state before it; the base's lm_head gives
    the next-token distribution.

        position        t                 t + 1               t + 2
        in          h[t], x[t+1]     f[t], x[t+2]        f[t+1], x[t+3]       x[t+1] the root, then draft tokens
        out         f[t] ~ h[t+1]    f[t+1] ~ h[t+2]     ...
        token       x[t+2]           x[t+3]

    In a draft its own predictions f replace the base's hidden states, which in training are all known: the first frame
    is the same in both, deeper ones are not.

    noise: half width of the uniform noise added to the hidden states in training, so that the layer tolerates its own
    errors. (The CTC paper's released code also scales it by 512 / the text's length; here it is constant.)
    like_base: see `decoder_layer`.
    """

    predicts_hidden_states = True
    fixed_shapes = True

    def __init__(
        self, base: BaseLM, frames: int, tree: StepTreeBuilder, noise: float = 0.0, like_base: bool = False
    ) -> None:
        super().__init__(frames, tree, base.stop_token_ids)
        self.noise = check_float(noise, "drafter.noise", least=0)
        self.fuse = nn.Linear(2 * base.width, base.width).to(base.device)
        # No norm before and after the layer, as published.
        self.block, self.initialised = decoder_layer(base, like_base, input_norm=False)
        self.head = TokenHead(base.head)
        self.embedding = base.embedding

    @property
    def dtype(self) -> torch.dtype:
        return self.fuse.weight.dtype

    def forward(self, batch: Batch) -> TokenEmissions:
        position_ids_BL = batch.position_ids_BL
        fused_BLD = self.fuse_inputs(batch.next_tokens(), self.noisy_states(batch))
        states_BLD = self.block(fused_BLD, position_ids_BL, seen=packed_causal_mask(position_ids_BL))
        states_BATD = gather_following(states_BLD, batch.anchors_BA, position_ids_BL, self.frames)
        return TokenEmissions(states_BATD, self.head, own=self.head)

    def noisy_states(self, batch: Batch) -> Tensor:
        if not self.training or self.noise == 0:
            return batch.states_BLD
        # The noise depends on the batch alone, so that a resumed run repeats it.
        rng = torch.Generator(batch.states_BLD.device)
        rng.manual_seed(hash(tuple(batch.anchors_BA.flatten().tolist())) % 2**63)
        noise_BLD = torch.rand(batch.states_BLD.shape, generator=rng, device=batch.states_BLD.device) * 2 - 1
        return batch.states_BLD + (self.noise * noise_BLD).to(batch.states_BLD.dtype)

    def fuse_inputs(self, tokens_BL: Tensor, states_BLD: Tensor) -> Tensor:
        last_BLD = states_BLD[..., : self.fuse.out_features]  # of several layers the last one comes first
        return self.fuse(torch.cat([self.embedding(tokens_BL).to(self.dtype), last_BLD.to(self.dtype)], dim=-1))

    def step_function(self, context: Context, memory: KVCache | None) -> EagleStepFunction:
        # Cache row t is computed from h[t] and x[t+1]; the newest row has the root.
        if memory is None:
            # With rows for the draft tokens of a tree, which `release` drops.
            memory = context.new_cache(1, context.nodes * self.frames, self.block.rotary.positions)
        states_BLD, tokens_BL = context.new_states_KD[None], context.new_tokens_K[None]
        new = memory.append(tokens_BL.shape[1], tokens_BL.device, count_1=context.count_1)
        inputs_BLD = self.fuse_inputs(tokens_BL, states_BLD)
        states_BLD = self.block(inputs_BLD, new.position_ids_N, memory, new.seen_by_text())
        new.close()
        return EagleStepFunction(self, memory, context.newest(states_BLD)[0], LevelAttention(memory, tokens_BL.device))


@dataclass
class EagleStepFunction:
    """Distributions from the predicted hidden states_KD of the last level."""

    drafter: Eagle
    memory: KVCache
    states_KD: Tensor
    levels: LevelAttention

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        if level := self.levels.next_level(rows_K):
            position_ids_K, seen_KM = level
            inputs_KE = embed_rows(self.drafter.embedding, tokens_K, self.states_KD, rows_K, True)
            fused_BKD = self.drafter.fuse(inputs_KE)[None]
            self.states_KD = self.drafter.block(fused_BKD, position_ids_K, self.memory, seen_KM)[0]
        return self.drafter.head(self.states_KD).float().log_softmax(dim=-1)

    def release(self) -> KVCache:
        self.levels.drop()
        return self.memory
