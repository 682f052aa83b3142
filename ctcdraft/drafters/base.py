"""What a trainable drafter owes: emissions for a batch of windows, a tree for a context. It computes no loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError
from ctcdraft.nn.draft_vocab import DraftVocabHead, most_frequent_tokens
from ctcdraft.nn.heads import Emissions
from ctcdraft.nn.weight_layout import to_column_major_

if TYPE_CHECKING:
    from ctcdraft.batch import Batch


class DraftHead(nn.Module):
    """A drafter with weights. Its frozen parts belong to the base; what requires a gradient is its own."""

    initialised: str  # in words, for the plan
    usable_untrained = False  # whether it drafts before it is trained
    predicts_hidden_states = False  # whether its frames guess the base's next states, not words alone
    per_frame_weights = False  # whether every frame has weights of its own, which no other frame teaches
    uses_aux_hidden_states = (
        True  # whether it sees the states of all the layers in base.taps, and not the last one's alone
    )

    @abstractmethod
    def forward(self, batch: Batch) -> Emissions:
        """Emissions of every anchor, from text up to that anchor only: what `draft` would see there."""

    @abstractmethod
    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        """The tree for a context, and what to remember of it; see decoding.loop.Drafter."""

    def metrics(self, batch: Batch) -> dict[str, float]:
        """What is worth watching beside the loss whenever the run is probed, by name."""
        return {}

    @property
    def has_draft_vocab(self) -> bool:
        """Whether it is to say some of the base's words only: the commonest of a corpus."""
        return bool(self._draft_vocab_heads())

    def set_draft_vocab(self, counts_V: Tensor, always: Collection[int]) -> None:
        """Take the words that are to be said from how often a corpus says each."""
        for _, head in self._draft_vocab_heads():
            head.set_tokens(most_frequent_tokens(counts_V, len(head.words_N), always))

    def vocab_coverage(self, counts_V: Tensor) -> float:
        """Of all that a corpus says, the share in words that this drafter can say."""
        covered = [counts_V[head.words_N.cpu()].sum() for _, head in self._draft_vocab_heads()] or [counts_V.sum()]
        return float(min(covered)) / max(int(counts_V.sum()), 1)

    def trainable_state_dict(self) -> dict[str, Tensor]:
        """The trained tensors, by name, and which words are said where not all are: what a checkpoint holds."""
        trained = {name: value for name, value in self.named_parameters() if value.requires_grad}
        return trained | {f"{name}.words_N": head.words_N for name, head in self._draft_vocab_heads()}

    def after_load(self) -> None:
        """Make anew what follows from `trainable_state_dict`, after it was written to."""
        for _, head in self._draft_vocab_heads():
            head.refresh()

    def _draft_vocab_heads(self) -> list[tuple[str, DraftVocabHead]]:
        return [(name, part) for name, part in self.named_modules() if isinstance(part, DraftVocabHead)]

    def for_inference(self, base: Any) -> Self:
        """To draft with: in the base's type, without noise, its own weights laid for what drafts multiply."""
        to_column_major_(self.to(base.dtype).eval(), but=base.lm.parameters())
        return self

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [value for value in self.parameters() if value.requires_grad]


def uses_hidden_states(drafter: Any) -> bool:
    """Whether it needs the base's states, which guesses do not have. What does not say so is taken to need them."""
    return getattr(drafter, "uses_hidden_states", True)


def refuse_non_drafter(part: Any) -> None:
    """Raise InputError for what has a loop of its own, such as stock `generate`, as a part of a drafter."""
    if not hasattr(part, "draft"):
        raise InputError(f"{type(part).__name__} decodes outside our loop and drafts for nobody; name a drafter")


def samples_drafts(drafter: Any) -> bool:
    """Whether it says that its guesses are drawn, so that a tree of them comes with their law."""
    parts = (drafter, getattr(drafter, "growth", None), getattr(drafter, "paths", None))
    return any(getattr(part, "samples_drafts", False) for part in parts)


def has_nested_trees(drafter: Any) -> bool:
    """Whether its tree of n nodes is the first n nodes of its larger ones; its way to grow or to read frames has a say.
    What does not say otherwise promises it."""
    parts = (drafter, getattr(drafter, "growth", None), getattr(drafter, "paths", None))
    return all(getattr(part, "has_nested_trees", True) for part in parts)
