"""What links two steps of fixed shapes: the context of a draft, on the device, and the report of a step to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ctcdraft.decoding.sampling import unwarped_log_probs
from ctcdraft.decoding.settings import LogitsProcessor
from ctcdraft.decoding.static_cache import StaticCache


@dataclass(frozen=True)
class StaticContext:
    """All inputs of a draft, like loop.Context; of the new tokens and hidden states count_1 are real."""

    root_1: Tensor
    new_tokens_K: Tensor  # committed since the last draft, the root being the newest
    new_states_KD: Tensor  # of the tokens before them
    count_1: Tensor | None  # None: all, in the first draft of a text
    last_1: Tensor  # count_1 - 1
    nodes: int
    new_cache: Callable[..., StaticCache]  # (layers, rows beyond the text, position ids of the drafter)
    logits_processor: LogitsProcessor = unwarped_log_probs
    min_path_prob: float = 0.0
    tokens_L: Tensor | None = None  # the whole text, in its first draft
    padded = True

    @property
    def root(self) -> Tensor:
        return self.root_1[0]

    @property
    def depth(self) -> int:
        return self.nodes - 1

    def newest(self, x_BKX: Tensor) -> Tensor:
        """Return the row of the newest token, [B, 1, X]."""
        return x_BKX[:, -1:] if self.count_1 is None else x_BKX.index_select(1, self.last_1)


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step on the host."""

    tokens: tuple[int, ...]  # committed, the bonus token last
    has_rejected_child: bool
    drafted: int  # depth of the tree
    nodes: int  # of the tree, without padding

    @classmethod
    def of(cls, values: Sequence[int]) -> StepReport:
        length, has_child, drafted, nodes, *tokens = values
        return cls(tuple(tokens[:length]), bool(has_child), drafted, nodes)
