"""A frozen head cut down to the words a corpus says most: less to read, to multiply, to sum up. It knows no blank.

A draft's head reads V rows of weights for words of which most are never said; the rows of the N commonest are enough
(frequency-ranked drafts, Zhao et al. 2025, "FR-Spec"). Every class keeps its number: the words that were left out have
probability 0, so trees, searches and verification see no difference, and labels among them cannot be said.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.errors import InputError, check_int


class DraftVocabHead(nn.Module):
    """`count` words of a head. Until `choose` says which, they are the first ones."""

    def __init__(self, words: Any, count: int) -> None:
        super().__init__()
        if check_int(count, "drafter.vocabulary") > len(words.weight):
            raise InputError(f"drafter.vocabulary={count} of {len(words.weight)} words; lower it, or null for all")
        self.all = words
        self.words_N: Tensor
        self.register_buffer("words_N", torch.arange(count, device=words.weight.device))
        self.refresh()

    def set_tokens(self, tokens_N: Tensor) -> None:
        """Which words, in ascending order."""
        self.words_N.copy_(tokens_N)
        self.refresh()

    def refresh(self) -> None:
        """A copy of their rows, in one place; to be made anew after words_N was written to."""
        self.weight = self.all.weight[self.words_N]
        self.bias = None if getattr(self.all, "bias", None) is None else self.all.bias[self.words_N]
        self.row_of_token_V = torch.full((len(self.all.weight),), -1, device=self.words_N.device)
        self.row_of_token_V[self.words_N] = torch.arange(len(self.words_N), device=self.words_N.device)

    def forward(self, states_XD: Tensor) -> Tensor:
        """Logits_XV, -inf of the words that were left out."""
        logits_XN = nn.functional.linear(states_XD, self.weight, self.bias)
        logits_XV = logits_XN.new_full((*logits_XN.shape[:-1], len(self.row_of_token_V)), -torch.inf)
        return logits_XV.index_copy(-1, self.words_N, logits_XN)


def most_frequent_tokens(counts_V: Tensor, count: int, always: Collection[int]) -> Tensor:
    """The `count` words that were counted most, `always` among them, in ascending order; of equal ones the first.

    counts 5 0 7 5, two of them, always 1   ->   1 2
    """
    required = [token for token in always if token < len(counts_V)]  # an end token may lie beyond the head's rows
    if count < len(required):
        raise InputError(
            f"drafter.vocabulary={count} has no room for the {len(required)} words that end a text; raise it"
        )
    ranked_V = counts_V.double()
    ranked_V[required] = torch.inf
    return ranked_V.sort(descending=True, stable=True).indices[:count].sort().values


def head_rows(head: Any, labels_XS: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of the head `head` for these labels (of free slots any), and true_XS where it cannot say a label; None if
    it can say all."""
    tokens_XS = labels_XS.clamp(min=0)
    if not isinstance(head, DraftVocabHead):
        return tokens_XS, None
    rows_XS = head.row_of_token_V[tokens_XS]
    return rows_XS.clamp(min=0), rows_XS < 0


def restrict_rows(head: Any, table_VR: Tensor) -> Tensor:
    """The rows of another table for the words that this head can say."""
    return table_VR[head.words_N] if isinstance(head, DraftVocabHead) else table_VR


def mask_absent_labels(scores_XTS: Tensor, absent_XS: Tensor | None) -> Tensor:
    """-inf at every frame for labels that cannot be said."""
    return scores_XTS if absent_XS is None else scores_XTS.masked_fill(absent_XS[:, None], -torch.inf)
