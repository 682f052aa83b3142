"""Parameters, bytes and FLOPs of a base model, from the sizes of its tensors alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from torch import Tensor, nn

from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.draft_vocab import DraftVocabHead


@dataclass(frozen=True)
class ModelStats:
    """Sizes of a base, in memory or on the meta device."""

    parameters: int
    body: int  # parameters that a token is multiplied with: all but embedding, lm_head and experts it is not sent to
    head: int  # parameters of the lm_head
    layers: int
    width: int
    inner: int  # width of the MLP
    attention_width: int  # number of heads x width of a head
    itemsize: int  # bytes of a value in the dtype of the base
    weight_bytes: int  # of all weights, in memory
    kv_bytes: int  # of the keys and values of one token in all layers
    states_per_token: int  # hidden states per token: the last layer's and the auxiliary ones

    @classmethod
    def of(cls, base: BaseLM) -> Self:
        shape = BlockConfig.of(base.lm.config, base.context_length)
        layers = int(base.lm.config.num_hidden_layers)
        parameters = sum(count_elements(weight) for weight in base.lm.parameters())  # a tied lm_head is counted once
        embedding, head = base.embedding.weight, base.head.weight
        idle = sum(
            int(count_elements(weight) * (1 - used_share(name, base.lm.config)))
            for name, weight in base.lm.named_parameters()
        )
        cached = 2 * shape.kv_heads * shape.head_width
        if rank := getattr(base.lm.config, "kv_lora_rank", None):  # DeepSeek's compressed keys and values
            cached = rank + base.lm.config.qk_rope_head_dim
        return cls(
            parameters=parameters,
            body=parameters - idle - head.numel() - (0 if embedding is head else embedding.numel()),
            head=head.numel(),
            layers=layers,
            width=base.width,
            inner=shape.inner,
            attention_width=shape.heads * shape.head_width,
            itemsize=base.dtype.itemsize,
            weight_bytes=sum(count_elements(weight) * weight.element_size() for weight in base.lm.parameters()),
            kv_bytes=layers * cached * base.dtype.itemsize,
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
        saved = (self.states_per_token - 1) * self.width  # inputs of the auxiliary layers
        return rows * length * (values + saved) * self.itemsize


@dataclass(frozen=True)
class DraftBytes:
    """Weights that one draft reads at least, in bytes: each once, in the dtype of the base.

    A drafter that computes token by token reads its weights again for every level; keys and values come on top.
    """

    body: int
    correction: int
    head: int  # its own rows: the blank
    vocabulary: int  # rows of the lm_head, the base's or its own
    base: int  # read by one step of the base

    @classmethod
    def of(cls, drafter: Any, base: BaseLM, base_bytes: int | None = None) -> Self | None:
        """Return the bytes of a drafter; None for one without weights. base_bytes: of a quantised base."""
        size, parts = ModelStats.of(base), {"body": 0, "correction": 0, "head": 0, "vocabulary": 0}
        for part, count in read_weights(drafter, base) if isinstance(drafter, nn.Module) else ():
            parts[part] += count * size.itemsize
        read = (size.body + size.head) * size.itemsize if base_bytes is None else base_bytes
        return cls(**parts, base=read) if any(parts.values()) else None

    @property
    def total(self) -> int:
        return self.body + self.correction + self.head + self.vocabulary

    @property
    def least_c(self) -> float:
        """The lower bound of c where memory bandwidth limits both the draft and the base."""
        return self.total / self.base


def read_weights(drafter: nn.Module, base: BaseLM) -> Iterator[tuple[str, int]]:
    """Yield the part of a draft and the number of values of every weight it multiplies with."""
    restricted = [each for each in drafter.modules() if isinstance(each, DraftVocabHead)]
    drafted = min((len(each.words_N) for each in restricted), default=base.vocabulary)
    replaced = [each.all for each in restricted if each.trained]
    lm_head, seen = base.head.weight, set[int]()
    lm: Any = getattr(drafter, "lm", nn.Module())  # layers of the base, which are no submodule
    for name, module in chain(drafter.named_modules(remove_duplicate=False), lm.named_modules(prefix="lm")):
        # Of an embedding a few rows are read; a teacher is read in training.
        if isinstance(module, nn.Embedding) or name.startswith("teacher.") or module in replaced:
            continue
        for weight in module.parameters(recurse=False):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            first = name.partition(".")[0]
            is_lm_head = weight is lm_head or (first == "head" and weight.ndim == 2)
            part = "vocabulary" if is_lm_head else first if first in ("correction", "head") else "body"
            values, shape = count_elements(weight), getattr(weight, "ds_shape", weight.shape)
            # With a draft vocabulary only its rows of a table over the vocabulary are read; no body has such tables.
            is_table = part != "body" and len(shape) > 0 and shape[0] == base.vocabulary
            yield part, values // base.vocabulary * drafted if is_table else values


def used_share(name: str, config: Any) -> float:
    """Return the share of a parameter that one token is multiplied with: k / n of n experts, of all others 1.

    A step over several tokens reads more of the experts than this.
    """
    chosen = getattr(config, "num_experts_per_tok", None)
    total = getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None)
    return chosen / total if chosen and total and ".experts." in name else 1.0


def count_elements(weight: Tensor) -> int:
    return int(getattr(weight, "ds_numel", weight.numel()))  # ds_numel: with the ZeRO-3 shards of other processes
