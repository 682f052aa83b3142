"""Guessing that the text repeats itself. It reads only tokens and has no weights (Saxena 2023, prompt lookup)."""

from __future__ import annotations

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_int
from ctcdraft.models.base_model import BaseLM


class PromptLookup:
    """Propose what followed the last occurrence of the newest words.

    ngram: the longest run of newest words to look for; shorter ones are tried in turn, down to one word.
    span: the most words to propose.
    """

    uses_hidden_states = False

    def __init__(self, base: BaseLM, ngram: int, span: int) -> None:
        self.ngram = check_int(ngram, "prompt_lookup.ngram")
        self.span = check_int(span, "prompt_lookup.span")

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        draft_tokens_K = find_continuation(context.tokens_L, self.ngram)[: min(self.span, context.depth)]
        return TokenTree.chain(context.root, draft_tokens_K), None


def find_continuation(tokens_L: Tensor, ngram: int) -> Tensor:
    """What followed the latest earlier occurrence of the longest matching suffix; nothing if there is none.

    ngram 2:   3 1 4 1 5 3 1   ->   4 1 5 3 1      (the suffix 3 1 stood at the start)
    """
    for size in range(min(ngram, len(tokens_L) - 1), 0, -1):
        windows_LG = tokens_L[:-1].unfold(0, size, 1)
        starts = (windows_LG == tokens_L[-size:]).all(dim=1).nonzero()
        if len(starts):
            return tokens_L[int(starts[-1]) + size :]
    return tokens_L[:0]
