"""Prompt lookup: draft tokens copied from an earlier part of the text (Saxena 2023). It has no weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_float, check_int
from ctcdraft.models.base_model import BaseLM


class PromptLookup:
    """Proposes what followed the last earlier occurrence of the newest tokens.

    ngram: longest run of newest tokens to look for; the longest that occurs is taken. span: maximal number of draft
    tokens. acceptance: how often the token after a run of 1, 2, ... tokens is right, the last one for longer runs too;
    None if that is not known. A draft token that is right makes the run longer by one, so that with .4 .7 .8

        a run of 1   ->   path probabilities .4   .4 * .7   .4 * .7 * .8   .4 * .7 * .8 * .8
    """

    uses_hidden_states = False

    def __init__(self, base: BaseLM, ngram: int, span: int, acceptance: Sequence[float] | None = None) -> None:
        self.ngram = check_int(ngram, "prompt_lookup.ngram")
        self.span = check_int(span, "prompt_lookup.span")
        self.path_probs: list[tuple[float, ...]] | None = None  # by length of the run, from 1
        if acceptance:
            rates = [check_float(one, "prompt_lookup.acceptance", least=0, most=1) for one in acceptance]
            rates += rates[-1:] * (self.ngram + self.span)
            self.path_probs = [tuple(accumulate(rates[run : run + self.span], mul)) for run in range(self.ngram)]

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        draft_tokens_K, run = find_continuation(context.tokens_L, self.ngram)
        draft_tokens_K = draft_tokens_K[: max(min(self.span, context.depth), 0)]
        if self.path_probs is None or len(draft_tokens_K) == 0:
            return TokenTree.chain(context.root, draft_tokens_K), None
        probs = [prob for prob in self.path_probs[run - 1] if prob >= context.min_path_prob][: len(draft_tokens_K)]
        tokens = draft_tokens_K[: len(probs)].tolist()
        return TokenTree.from_lists(context.root, tokens, range(-1, len(tokens) - 1), probs), None


def find_continuation(tokens_L: Tensor, ngram: int) -> tuple[Tensor, int]:
    """Return what followed the latest earlier occurrence of the longest matching suffix, and that suffix's length.

    ngram 2:   3 1 4 1 5 3 1   ->   4 1 5 3 1, 2      (the suffix 3 1 occurs at the start)
    """
    text_L = tokens_L.numpy(force=True)  # a tensor operation per length would cost a hundredth of a small base's step
    ends_G = np.flatnonzero(text_L[:-1] == text_L[-1])
    if len(ends_G) == 0:
        return tokens_L[:0], 0
    size = 1
    while size < ngram:
        longer_G = ends_G[ends_G >= size]
        longer_G = longer_G[text_L[longer_G - size] == text_L[-1 - size]]
        if len(longer_G) == 0:
            break
        ends_G, size = longer_G, size + 1
    return tokens_L[int(ends_G[-1]) + 1 :], size
