"""EAGLE: one autoregressive layer that predicts the base's next hidden states (Li et al. 2024).

`FeedbackDrafter` is what EAGLE and EAGLE-3 share, one decoder layer over pairs of a token and the hidden state before:

    position        t                 t + 1               t + 2
    in          h[t], x[t+1]     f[t], x[t+2]        f[t+1], x[t+3]       x[t+1] the root, then draft tokens
    out             f[t]             f[t+1]          ...
    token       x[t+2]           x[t+3]

In a draft its own outputs f replace the base's hidden states h.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.sequential import LevelAttention, SequentialDrafter, decoder_layer
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.errors import check_float, check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.block_operations import embed_rows
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.nn.masks import gather_following, packed_causal_mask


class FeedbackDrafter(SequentialDrafter):
    """A drafter whose layer reads its own outputs in place of the base's hidden states in a draft."""

    fixed_shapes = True
    fuse: nn.Linear
    block: Any  # of nn.transformer, for its rotary
    embedding: nn.Module

    @property
    def dtype(self) -> torch.dtype:
        return self.fuse.weight.dtype

    @abstractmethod
    def input_states(self, states_BLD: Tensor) -> Tensor:
        """Return what the layer reads of the base's hidden states, [B, L, D]."""

    @abstractmethod
    def outputs(self, pairs_BLE: Tensor, position_ids: Tensor, memory: Any = None, seen: Any = None) -> Tensor:
        """Return the layer's outputs_BLD, given embeddings and hidden states side by side; see CausalBlock."""

    @abstractmethod
    def logits(self, outputs_XD: Tensor) -> Tensor:
        """Return the logits_XV of the next token."""

    def pairs(self, tokens_BL: Tensor, states_BLD: Tensor) -> Tensor:
        return torch.cat([self.embedding(tokens_BL).to(states_BLD.dtype), states_BLD], dim=-1)

    def training_pairs(self, batch: Batch, states_BLD: Tensor) -> Tensor:
        """Return the pairs_BLE of every position, the token after it beside its hidden state."""
        return self.pairs(batch.next_tokens(), self.input_states(states_BLD))

    def step_function(self, context: Context, memory: KVCache | None) -> FeedbackStepFunction:
        # Cache row t is computed from h[t] and x[t+1]; the newest row has the root.
        if memory is None:
            # With rows for the draft tokens of a tree, which `release` drops.
            memory = context.new_cache(1, context.nodes * self.frames, self.block.rotary.positions)
        states_BLD, tokens_BL = self.input_states(context.new_states_KD[None]), context.new_tokens_K[None]
        new = memory.append(tokens_BL.shape[1], tokens_BL.device, count_1=context.count_1)
        outputs_BLD = self.outputs(self.pairs(tokens_BL, states_BLD), new.position_ids_N, memory, new.seen_by_text())
        new.close()
        return FeedbackStepFunction(
            self, memory, context.newest(outputs_BLD)[0], LevelAttention(memory, tokens_BL.device)
        )


@dataclass
class FeedbackStepFunction:
    """Distributions from the outputs_KD of the last level."""

    drafter: FeedbackDrafter
    memory: KVCache
    outputs_KD: Tensor
    levels: LevelAttention

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        if level := self.levels.next_level(rows_K):
            position_ids_K, seen_KM = level
            pairs_KE = embed_rows(self.drafter.embedding, tokens_K, self.outputs_KD, rows_K, True)
            self.outputs_KD = self.drafter.outputs(pairs_KE[None], position_ids_K, self.memory, seen_KM)[0]
        return self.drafter.logits(self.outputs_KD).float().log_softmax(dim=-1)

    def release(self) -> KVCache:
        self.levels.drop()
        return self.memory


class Eagle(FeedbackDrafter):
    """Predicts the base's next hidden state, f[t] ~ h[t+1]; the base's lm_head gives the distribution of the token.

    In training all hidden states are the base's: the first frame is the same as in a draft, deeper ones are not.

    noise: half width of the uniform noise added to the hidden states in training, so that the layer tolerates its own
        errors.
    noise_length: the noise is scaled by noise_length / tokens of the text, as in EAGLE's released code (512), up to
        the last token that is trained; None: it is constant, as the paper describes it.
    like_base: see `decoder_layer`.
    """

    predicts_hidden_states = True

    def __init__(
        self,
        base: BaseLM,
        frames: int,
        tree: StepTreeBuilder,
        noise: float = 0.0,
        like_base: bool = False,
        noise_length: int | None = None,
    ) -> None:
        super().__init__(frames, tree, base.stop_token_ids)
        self.noise = check_float(noise, "drafter.noise", least=0)
        self.noise_length = check_int(noise_length, "drafter.noise_length", null=True)
        self.fuse = nn.Linear(2 * base.width, base.width).to(base.device)
        # No norm before and after the layer, as published.
        self.block, self.initialised = decoder_layer(base, like_base, input_norm=False)
        self.head = TokenHead(base.head)
        self.embedding = base.embedding

    def forward(self, batch: Batch) -> TokenEmissions:
        pairs_BLE, position_ids_BL = self.training_pairs(batch, self.noisy_states(batch)), batch.position_ids_BL
        states_BLD = self.outputs(pairs_BLE, position_ids_BL, seen=packed_causal_mask(position_ids_BL))
        states_BATD = gather_following(states_BLD, batch.anchors_BA, position_ids_BL, self.frames)
        return TokenEmissions(states_BATD, self.head, own=self.head)

    def noisy_states(self, batch: Batch) -> Tensor:
        states_BLD = batch.states_BLD
        if not self.training or self.noise == 0:
            return states_BLD
        # The noise depends on the batch alone, so that a resumed run repeats it.
        rng = torch.Generator(states_BLD.device)
        rng.manual_seed(hash(tuple(batch.anchors_BA.flatten().tolist())) % 2**63)
        noise_BLD = (torch.rand(states_BLD.shape, generator=rng, device=states_BLD.device) * 2 - 1) * self.noise
        if self.noise_length is not None:
            lengths_BL = trained_lengths(batch)
            noise_BLD *= (self.noise_length / lengths_BL.clamp(min=1) * (lengths_BL > 0))[..., None]
        return states_BLD + noise_BLD.to(states_BLD.dtype)

    def input_states(self, states_BLD: Tensor) -> Tensor:
        return states_BLD[..., : self.fuse.out_features].to(self.dtype)  # of several layers the last one comes first

    def outputs(self, pairs_BLE: Tensor, position_ids: Tensor, memory: Any = None, seen: Any = None) -> Tensor:
        return self.block(self.fuse(pairs_BLE), position_ids, memory, seen)

    def logits(self, outputs_XD: Tensor) -> Tensor:
        return self.head(outputs_XD)


def trained_lengths(batch: Batch) -> Tensor:
    """Return at every position the tokens of its text up to the last label of a window; 0 in texts without windows.

    Padding has no label, so that it does not count as a part of the last text.
    """
    ends_BA = batch.position_ids_BL.gather(1, batch.anchors_BA) + 2 + batch.lengths_BA
    first_BL = torch.arange(batch.tokens_BL.shape[1], device=ends_BA.device) - batch.position_ids_BL
    lengths_BL = torch.zeros_like(batch.position_ids_BL).scatter_reduce(
        1, first_BL.gather(1, batch.anchors_BA), ends_BA * (batch.lengths_BA > 0), "amax"
    )
    return lengths_BL.gather(1, first_BL)
