"""The sizes of a draft head's blocks, where they differ from Llama's, and their norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.nn.block_operations import rms_norm
from ctcdraft.nn.rotary import config_rope_theta, default_frequencies

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.is_contiguous() and not torch.is_grad_enabled() and self.weight.dtype == x.dtype:
            return rms_norm(x, self.weight, self.eps)
        # With weights in the input's dtype: under autocast torch would warn and take a slow path.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


@dataclass(frozen=True)
class BlockConfig:
    """The sizes of a block, and where it differs from Llama's; the defaults are a plain Llama layer."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int  # width of the MLP
    epsilon: float
    rope_theta: float
    positions: int  # number of position ids
    frequencies: tuple[float, ...]  # head_width / 2 rotary ones, 0 for dimensions that are not rotated
    rotary_scale: float = 1.0  # factor on cosines and sines (YaRN)
    qk_norm: bool = False  # a norm of every head's queries and keys (Qwen3)
    qkv_bias: bool = False  # biases of queries, keys and values (Qwen2)
    activation: str = "silu"  # of ACTIVATIONS
    state_layers: int = 1  # hidden-state layers of the base per token of the text
    inputs: int = 1  # vectors of this width side by side that the attention reads: two in EAGLE-3

    @classmethod
    def of(cls, config: Any, context_length: int) -> Self:
        """Return a plain Llama layer of a base's sizes, with Llama's defaults for what its config does not name."""
        width, heads = config.hidden_size, config.num_attention_heads
        head_width, theta = getattr(config, "head_dim", None) or width // heads, config_rope_theta(config)
        return cls(
            width=width,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_width=head_width,
            inner=getattr(config, "intermediate_size", None) or 4 * width,
            epsilon=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            positions=context_length,
            frequencies=default_frequencies(head_width, theta),
        )

    def as_plain_llama(self) -> Self:
        """Return a plain Llama layer of the same sizes, which older checkpoints have."""
        frequencies = default_frequencies(self.head_width, self.rope_theta)
        return replace(
            self, frequencies=frequencies, rotary_scale=1.0, qk_norm=False, qkv_bias=False, activation="silu"
        )
