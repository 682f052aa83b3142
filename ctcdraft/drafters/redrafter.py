"""ReDrafter: one recurrent head for all positions (Cheng et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.sequential import SequentialDrafter, teacher_forced_tokens
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.errors import check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.draft_vocab import draft_lm_head
from ctcdraft.nn.heads import TokenEmissions, TokenHead


class ReDrafter(SequentialDrafter):
    """Predicts draft token k from the anchor's hidden state h and a recurrent state of the root and the tokens so far.

        s[k] = SiLU(W e[k] + U s[k - 1] + b)        e[1] the embedding of the root, s[0] = 0
        x[k] = (h, s[k]), then `layers` times x + SiLU(V x), then an lm_head

    Args:
        layers: residual layers.
        vocabulary: size of the draft vocabulary, the most frequent tokens of the corpus; None for the base's own.
        own_head: a trained lm_head of 2 D columns, as published. False, which older run directories mean by leaving it
            out: x is projected to the base's width, and the lm_head is the base's, frozen.
    """

    fixed_shapes = True

    def __init__(
        self,
        base: BaseLM,
        frames: int,
        layers: int,
        tree: StepTreeBuilder,
        vocabulary: int | None = None,
        own_head: bool = False,
    ) -> None:
        super().__init__(frames, tree, base.stop_token_ids)
        check_int(layers, "drafter.layers", least=0)
        self.width = base.width  # of several layers the last one comes first
        read = 2 * base.width if own_head else base.width
        self.token = nn.Linear(base.width, base.width, bias=False)
        self.recurrent = nn.Linear(base.width, base.width)
        self.project: Any = nn.Identity() if own_head else nn.Linear(2 * base.width, base.width)
        self.layers = nn.ModuleList([nn.Linear(read, read) for _ in range(layers)])
        self.initialised = "at random, as published"
        if not own_head:  # the lm_head expects the base's hidden states
            start_as_identity(self.project, self.layers)
            self.initialised = "as the identity"
        self.to(base.device)
        self.teacher = TokenHead(base.head)  # distributions to learn from, in training
        self.head = TokenHead(draft_lm_head(base.head, vocabulary, trained=own_head, width=read))
        self.embedding = base.embedding

    def forward(self, batch: Batch) -> TokenEmissions:
        index_BA1 = batch.anchors_BA[..., None]
        anchors_BAD = batch.states_BLD[..., : self.width].gather(1, index_BA1.expand(-1, -1, self.width))
        memory_BAD, frames = torch.zeros_like(anchors_BAD), []
        for tokens_BA in teacher_forced_tokens(batch, self.frames).unbind(dim=2):
            states_BAD, memory_BAD = self.step(anchors_BAD, tokens_BA, memory_BAD)
            frames.append(states_BAD)
        return TokenEmissions(torch.stack(frames, dim=2), self.teacher, own=self.head)

    def step(self, anchors_XD: Tensor, tokens_X: Tensor, memory_XD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states that the lm_head reads, and the recurrent states, after one more token."""
        dtype = self.recurrent.weight.dtype
        embedded_XD = self.embedding(tokens_X).to(dtype)
        memory_XD = F.silu(self.token(embedded_XD) + self.recurrent(memory_XD.to(dtype)))
        states_XD = self.project(torch.cat([anchors_XD.to(dtype), memory_XD], dim=-1))
        for layer in self.layers:
            states_XD = states_XD + F.silu(layer(states_XD))
        return states_XD, memory_XD

    def step_function(self, context: Context, memory: Any | None) -> ReDrafterStepFunction:
        anchor_1D = context.newest(context.new_states_KD[None])[0][:, : self.width]
        return ReDrafterStepFunction(self, anchor_1D, torch.zeros_like(anchor_1D))


def start_as_identity(project: Any, layers: Any) -> None:
    """Make a projection of (h, s) and residual layers behind it return h, nearly."""
    nn.init.eye_(project.weight)
    for layer in (project, *layers):
        nn.init.zeros_(layer.bias)
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.01)


@dataclass
class ReDrafterStepFunction:
    drafter: ReDrafter
    anchor_1D: Tensor
    memory_KD: Tensor  # recurrent states of the last level

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        anchors_KD = self.anchor_1D.expand(len(tokens_K), -1)
        states_KD, self.memory_KD = self.drafter.step(anchors_KD, tokens_K, self.memory_KD[rows_K])
        return self.drafter.head(states_KD).float().log_softmax(dim=-1)

    def release(self) -> None:
        return None
