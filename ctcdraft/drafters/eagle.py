"""EAGLE: one autoregressive layer that guesses the base's next states (Li et al. 2024). It knows no loss."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.sequential import SequentialDrafter, extend_visibility
from ctcdraft.drafters.trees.dynamic import TreeBuilder
from ctcdraft.errors import InputError, check_float
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import base_block_config, init_from_base_layer
from ctcdraft.nn.causal import CausalBlock
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.nn.packing import gather_following, packed_causal_mask


class Eagle(SequentialDrafter):
    """From a state and the word that followed it to the state of that word; the base's head says the next.

        position        t                 t + 1               t + 2
        in          h[t], x[t+1]     f[t], x[t+2]        f[t+1], x[t+3]       x[t+1] the root, then guesses
        out         f[t] ~ h[t+1]    f[t+1] ~ h[t+2]     ...
        says        x[t+2]           x[t+3]

    Along a draft its own states stand in for the base's, which in training are all true: its first frame is
    the same in both, the deeper ones are not. No norm before the layer and none after it, as published.
    noise: in training every number of h is off by up to this much, evenly, so that it learns to bear its own errors.
    (The CTC paper's released code scales that by 512 / the text's length besides; here it is the same everywhere.)
    like_base: rotary frequencies, norms of heads, biases and activation of the base's layers; runs that do not say so
    have a plain Llama layer. Of several taps (base.taps) it reads and predicts the last layer's hidden states alone.
    """

    predicts_hidden_states = True

    def __init__(
        self, base: BaseLM, frames: int, growth: TreeBuilder, noise: float = 0.0, like_base: bool = False
    ) -> None:
        super().__init__(frames, growth, base.stop_token_ids)
        if check_float(noise, "drafter.noise") < 0:
            raise InputError(f"drafter.noise={noise} is no width of noise; 0 is none, 0.1 is EAGLE's own")
        self.noise = noise
        self.fuse = nn.Linear(2 * base.width, base.width).to(base.device)
        shape = base_block_config(base.lm, base.context_length)
        shape = shape if like_base else shape.as_plain_llama()
        self.block = CausalBlock(shape, input_norm=False).to(base.device)
        self.head = TokenHead(base.head)
        self.embedding = base.embedding
        self.initialised = init_from_base_layer(self.block, shape, self.block, base.lm)[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.fuse.weight.dtype

    def forward(self, batch: Batch) -> TokenEmissions:
        position_ids_BL = batch.position_ids_BL
        # Behind a text's last word comes nothing, and not the first of the next text in a pack.
        next_BL = batch.tokens_BL.roll(-1, dims=1).masked_fill(position_ids_BL.roll(-1, dims=1) == 0, 0)
        # The root comes from the batch, as the drafter is told it: a shifted one must show.
        next_BL = next_BL.scatter(1, batch.anchors_BA, batch.roots_BA)
        states_BLD = self.block(
            self.fuse_inputs(next_BL, self.noisy_states(batch)),
            position_ids_BL,
            seen=packed_causal_mask(position_ids_BL),
        )
        return TokenEmissions(
            gather_following(states_BLD, batch.anchors_BA, position_ids_BL, self.frames), self.head, own=self.head
        )

    def noisy_states(self, batch: Batch) -> Tensor:
        """The batch's states, with noise in training: a function of the batch alone, so a resumed run repeats it."""
        if not self.training or self.noise == 0:
            return batch.states_BLD
        rng = torch.Generator(batch.states_BLD.device)
        rng.manual_seed(hash(tuple(batch.anchors_BA.flatten().tolist())) % 2**63)
        noise_BLD = torch.rand(batch.states_BLD.shape, generator=rng, device=batch.states_BLD.device) * 2 - 1
        return batch.states_BLD + (self.noise * noise_BLD).to(batch.states_BLD.dtype)

    def fuse_inputs(self, tokens_BL: Tensor, states_BLD: Tensor) -> Tensor:
        last_BLD = states_BLD[..., : self.fuse.out_features]  # of several taps the last layer's, which comes first
        return self.fuse(torch.cat([self.embedding(tokens_BL).to(self.dtype), last_BLD.to(self.dtype)], dim=-1))

    def step_function(self, context: Context, memory: KVCache | None) -> EagleStepFunction:
        """Rows of the text: what h[t] and x[t+1] gave; the newest row holds the root."""
        if memory is None:
            memory = KVCache(
                layers=1, capacity=len(context.tokens_L) + context.remaining_tokens + context.nodes * self.frames
            )
        start, states_BLD = memory.length, rearrange(context.new_states_KD, "k d -> 1 k d")
        tokens_BL = context.tokens_L[None, start + 1 : start + 1 + states_BLD.shape[1]]
        positions_L = torch.arange(start, start + states_BLD.shape[1], device=tokens_BL.device)
        states_BLD = self.block(self.fuse_inputs(tokens_BL, states_BLD), positions_L, memory)
        return EagleStepFunction(self, memory, states_BLD[0, -1:])


class EagleStepFunction:
    """states_KD: guessed for the rows of the last level."""

    def __init__(self, drafter: Eagle, memory: KVCache, states_KD: Tensor) -> None:
        self.drafter = drafter
        self.memory = memory
        self.text = memory.length
        self.states_KD = states_KD
        self.level = 0
        self.seen_KR = torch.ones(1, 0, dtype=torch.bool, device=states_KD.device)

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        if self.level > 0:  # the root's row is the text's newest
            self.seen_KR = extend_visibility(self.seen_KR, rows_K)
            seen_KM = torch.nn.functional.pad(self.seen_KR, (self.text, 0), value=True)
            positions_K = torch.full_like(tokens_K, self.text - 1 + self.level)
            fused_BKD = self.drafter.fuse_inputs(tokens_K[None], self.states_KD[None, rows_K])
            self.states_KD = self.drafter.block(fused_BKD, positions_K, self.memory, seen_KM)[0]
        self.level += 1
        return self.drafter.head(self.states_KD).float().log_softmax(dim=-1)

    def release(self) -> KVCache:
        self.memory.crop(self.text)
        return self.memory
