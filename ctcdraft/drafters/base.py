"""Trainable drafters: emissions for a batch of windows in training, a token tree for a context in decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, Self

import torch
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError
from ctcdraft.nn.draft_vocab import DraftVocabHead, most_frequent_tokens
from ctcdraft.nn.heads import Emissions
from ctcdraft.nn.logit_correction import GRUCorrection
from ctcdraft.nn.weight_layout import PackedLinears, to_column_major_
from ctcdraft.renamed import DRAFT_HEAD_MEMBERS


class DraftHead(nn.Module):
    """A drafter with weights. Parameters that require a gradient are its own, the others are the base's."""

    initialised: str  # how the weights start, for the plan
    usable_untrained = False  # whether it can draft before training
    predicts_hidden_states = False  # whether its frames predict the base's next hidden states
    per_frame_weights = False  # whether every frame has weights of its own, which training of others does not change
    fixed_shapes = False  # whether a draft can be a fixed sequence of operations of fixed shapes, without the host
    uses_aux_hidden_states = True  # whether it reads all layers in base.aux_layers, not the last layer alone

    def __init_subclass__(cls) -> None:
        # An override under a previous name would be ignored in silence, and the head trained or saved without it.
        # Only members of the class are seen here, not attributes set in __init__.
        super().__init_subclass__()
        for name in vars(cls):
            if name in DRAFT_HEAD_MEMBERS:
                now = DRAFT_HEAD_MEMBERS[name]
                raise InputError(f"{cls.__name__}.{name} is called {now} now; rename yours, even if it means another")

    @abstractmethod
    def forward(self, batch: Batch) -> Emissions:
        """Return the emissions of every anchor, from the text up to that anchor: those that `draft` computes there."""

    @abstractmethod
    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        """Return the tree for a context and the memory for the next call; see decoding.loop.Drafter."""

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return measures, by name, that are logged beside the loss at every validation."""
        return {}

    def why_not_captured(self) -> str | None:
        """Return why its steps cannot be captured as a CUDA graph; None where they can."""
        for part in drafter_and_tree(self):
            if part is not None and not getattr(part, "fixed_shapes", False):
                return f"drafts of {type(part).__name__} need the host"
        return None

    @property
    def has_draft_vocab(self) -> bool:
        """Whether its head has the most frequent tokens of a corpus only."""
        return bool(self._draft_vocab_heads())

    def set_draft_vocab(self, counts_V: Tensor, always: Collection[int]) -> None:
        """Choose the draft vocabulary: the most frequent tokens by counts_V, and the token ids in `always`."""
        for _, head in self._draft_vocab_heads():
            head.set_tokens(most_frequent_tokens(counts_V, len(head.words_N), always))

    def vocab_coverage(self, counts_V: Tensor) -> float:
        """Return the share of a corpus's tokens, counted by counts_V, that are in the draft vocabulary."""
        covered = [counts_V[head.words_N.cpu()].sum() for _, head in self._draft_vocab_heads()] or [counts_V.sum()]
        return float(min(covered)) / max(int(counts_V.sum()), 1)

    def trainable_state_dict(self) -> dict[str, Tensor]:
        """Return the content of a checkpoint: trained tensors by name, and the token ids of a draft vocabulary."""
        trained = {name: value for name, value in self.named_parameters() if value.requires_grad}
        return trained | {f"{name}.words_N": head.words_N for name, head in self._draft_vocab_heads()}

    def after_load(self) -> None:
        """Recompute what is derived from the tensors of `trainable_state_dict`, after they were written to."""
        for _, head in self._draft_vocab_heads():
            head.refresh()

    def _draft_vocab_heads(self) -> list[tuple[str, DraftVocabHead]]:
        return [(name, part) for name, part in self.named_modules() if isinstance(part, DraftVocabHead)]

    def for_inference(self, base: Any) -> Self:
        """Return itself in evaluation mode and the base's dtype, its weights in the layout of small batches."""
        # The base's own weights, which the head shares, keep their layout.
        to_column_major_(self.to(base.dtype).eval(), but=base.lm.parameters())
        for part in self.modules():
            if isinstance(part, PackedLinears | GRUCorrection):
                part.pack()
        return self

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [value for value in self.parameters() if value.requires_grad]


def uses_hidden_states(drafter: Any) -> bool:
    """Return whether a drafter reads hidden states of the base, which draft tokens do not have; True if unknown."""
    return getattr(drafter, "uses_hidden_states", True)


def refuse_non_drafter(part: Any) -> None:
    """Raise InputError for a part that has a decoding loop of its own, such as stock `generate`."""
    if not hasattr(part, "draft"):
        raise InputError(f"{type(part).__name__} has a decoding loop of its own and cannot draft; name a drafter")


def refuse_other_tree(drafter: nn.Module, tree: Any, from_frames: bool) -> None:
    """Raise InputError for a tree builder of the other kind: of frames, or of distributions computed step by step."""
    if hasattr(tree, "interprets_as") != from_frames:
        how, names = "step by step", "dynamic, top_n, chain or medusa63"
        if from_frames:
            how, names = "all frames at once", "prefix_search, per_frame, sparse or sampled"
        raise InputError(
            f"drafter/tree: {type(drafter).__name__} computes {how}, and {type(tree).__name__} does not build a tree "
            f"from that; choose for example {names}"
        )


def drafter_and_tree(drafter: Any) -> tuple[Any, Any, Any]:
    return drafter, getattr(drafter, "frame_tree", None), getattr(drafter, "step_tree", None)


def samples_drafts(drafter: Any) -> bool:
    """Return whether draft tokens are sampled, so that the trees hold the distributions they were sampled from."""
    return any(getattr(part, "samples_drafts", False) for part in drafter_and_tree(drafter))


def remembers_responses(drafter: Any) -> bool:
    """Return whether drafts depend on the texts that were decoded before, hence on their order."""
    parts = (getattr(drafter, role, None) for role in ("first", "second", "drafter"))
    return getattr(drafter, "remembers_responses", False) or any(remembers_responses(part) for part in parts if part)


def has_nested_trees(drafter: Any) -> bool:
    """Return whether the tree of n nodes is always the first n nodes of a larger tree; True unless declared."""
    return all(getattr(part, "has_nested_trees", True) for part in drafter_and_tree(drafter))
