"""What a base costs by its shape: parameters, bytes, operations. It reads sizes of tensors and never their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.transformer import BlockConfig


@dataclass(frozen=True)
class ModelStats:
    """A base in numbers, whether it is in memory or on torch's meta device.

    body: parameters that every token read is multiplied by, all but embeddings and head. head: the head's.
    attended: heads x width of a head. itemsize: bytes of a value in the base's dtype. kv_bytes: keys and values of one
    token in all layers. taps: how many states a token has.
    """

    parameters: int
    body: int
    head: int
    layers: int
    width: int
    inner: int
    attention_width: int
    itemsize: int
    weight_bytes: int
    kv_bytes: int
    taps: int

    @classmethod
    def of(cls, base: BaseLM) -> Self:
        shape = BlockConfig.of(base.lm.config, base.context_length)
        layers = int(base.lm.config.num_hidden_layers)
        parameters = sum(count_elements(weight) for weight in base.lm.parameters())  # a tied head is one of them, once
        looked_up, head = base.embedding.weight, base.head.weight
        return cls(
            parameters=parameters,
            body=parameters - head.numel() - (0 if looked_up is head else looked_up.numel()),
            head=head.numel(),
            layers=layers,
            width=base.width,
            inner=shape.inner,
            attention_width=shape.heads * shape.head_width,
            itemsize=base.dtype.itemsize,
            weight_bytes=sum(count_elements(weight) * weight.element_size() for weight in base.lm.parameters()),
            kv_bytes=2 * layers * shape.kv_heads * shape.head_width * base.dtype.itemsize,
            taps=len(base.taps),
        )

    @property
    def state_width(self) -> int:
        """Values a token of all taps' states."""
        return self.width * self.taps

    def prefill_flops(self, tokens: float, context: float) -> float:
        """Operations to read tokens up to their states; `context` tokens are attended to by each, on average.

        A multiplication and an addition a parameter and token; the same for scores and for sums of values.
        """
        return tokens * (2.0 * self.body + 4.0 * self.layers * self.attention_width * context)

    def decode_flops(self, tokens: float, context: float) -> float:
        """The same and the head, for tokens that are said one by one."""
        return self.prefill_flops(tokens, context) + tokens * 2.0 * self.head

    def activation_bytes(self, rows: int, length: int) -> int:
        """Values of one layer that are alive at once while rows of text are read; where there are more taps, the
        states of all layers are kept too."""
        values = 4 * self.width + 3 * self.inner + 3 * self.attention_width
        saved = (self.layers + 1) * self.width if self.taps > 1 else 0
        return rows * length * (values + saved) * self.itemsize


def count_elements(weight: Tensor) -> int:
    """How many a weight has, wherever its shards are."""
    return int(getattr(weight, "ds_numel", weight.numel()))
