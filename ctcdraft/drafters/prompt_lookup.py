"""Prompt lookup: draft tokens copied from an earlier part of the text (Saxena 2023). It has no weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_int
from ctcdraft.models.base_model import BaseLM


class PromptLookup:
    """Proposes what followed the last earlier occurrence of the newest tokens.

    ngram: longest run of newest tokens to look for; shorter ones are tried in turn. span: maximal number of draft
    tokens.
    """

    uses_hidden_states = False

    def __init__(self, base: BaseLM, ngram: int, span: int) -> None:
        self.ngram = check_int(ngram, "prompt_lookup.ngram")
        self.span = check_int(span, "prompt_lookup.span")

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        draft_tokens_K = find_continuation(context.tokens_L, self.ngram)[: min(self.span, context.depth)]
        return TokenTree.chain(context.root, draft_tokens_K), None


def find_continuation(tokens_L: Tensor, ngram: int) -> Tensor:
    """Return what followed the latest earlier occurrence of the longest matching suffix; empty if there is none.

    ngram 2:   3 1 4 1 5 3 1   ->   4 1 5 3 1      (the suffix 3 1 occurs at the start)
    """
    for size in range(min(ngram, len(tokens_L) - 1), 0, -1):
        windows_LG = tokens_L[:-1].unfold(0, size, 1)  # without the last token, or the suffix would find itself
        starts = (windows_LG == tokens_L[-size:]).all(dim=1).nonzero()
        if len(starts):
            return tokens_L[int(starts[-1]) + size :]
    return tokens_L[:0]
