"""Parameters, bytes and FLOPs of a base model, from the sizes of its tensors alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.block_config import BlockConfig


@dataclass(frozen=True)
class ModelStats:
    """Sizes of a base, in memory or on the meta device."""

    parameters: int
    body: int  # parameters that every token is multiplied with: all but the embedding and the lm_head
    head: int  # parameters of the lm_head
    layers: int
    width: int
    inner: int  # width of the MLP
    attention_width: int  # number of heads x width of a head
    itemsize: int  # bytes of a value in the dtype of the base
    weight_bytes: int
    kv_bytes: int  # of the keys and values of one token in all layers
    states_per_token: int  # hidden states per token: the last layer's and the auxiliary ones

    @classmethod
    def of(cls, base: BaseLM) -> Self:
        shape = BlockConfig.of(base.lm.config, base.context_length)
        layers = int(base.lm.config.num_hidden_layers)
        parameters = sum(count_elements(weight) for weight in base.lm.parameters())  # a tied lm_head is counted once
        embedding, head = base.embedding.weight, base.head.weight
        return cls(
            parameters=parameters,
            body=parameters - head.numel() - (0 if embedding is head else embedding.numel()),
            head=head.numel(),
            layers=layers,
            width=base.width,
            inner=shape.inner,
            attention_width=shape.heads * shape.head_width,
            itemsize=base.dtype.itemsize,
            weight_bytes=sum(count_elements(weight) * weight.element_size() for weight in base.lm.parameters()),
            kv_bytes=2 * layers * shape.kv_heads * shape.head_width * base.dtype.itemsize,
            states_per_token=len(base.aux_layers),
        )

    @property
    def state_width(self) -> int:
        """Values per token in the hidden states that drafters read."""
        return self.width * self.states_per_token

    def prefill_flops(self, tokens: float, context: float) -> float:
        """Return the FLOPs of a forward pass up to the hidden states.

        Two per parameter and token; attention adds two per attended value for the scores and two for the weighted sums.

        Args:
            context: tokens that each token attends to, on average.
        """
        return tokens * (2.0 * self.body + 4.0 * self.layers * self.attention_width * context)

    def decode_flops(self, tokens: float, context: float) -> float:
        """Return `prefill_flops` plus those of the lm_head, for tokens that are generated one by one."""
        return self.prefill_flops(tokens, context) + tokens * 2.0 * self.head

    def activation_bytes(self, rows: int, length: int) -> int:
        """Return the peak bytes of activations in a forward pass over `rows` sequences of `length` tokens.

        Layers run one at a time, so it is that of one layer.
        """
        values = 4 * self.width + 3 * self.inner + 3 * self.attention_width
        # With auxiliary layers transformers keeps the hidden states of all layers.
        saved = (self.layers + 1) * self.width if self.states_per_token > 1 else 0
        return rows * length * (values + saved) * self.itemsize


def count_elements(weight: Tensor) -> int:
    return int(getattr(weight, "ds_numel", weight.numel()))  # ds_numel: with the ZeRO-3 shards of other processes
