"""Prompt lookup: draft tokens copied from an earlier part of the text (Saxena 2023). It has no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_float, check_int
from ctcdraft.models.base_model import BaseLM

CopyMemory = tuple[int, int]  # the length of the prompt, and the position in it from which was copied last


class PromptLookup:
    """Proposes what followed the last earlier occurrence of the newest tokens.

    ngram: longest run of newest tokens to look for; the longest that occurs is taken. span: maximal number of draft
    tokens. acceptance: how often the token after a run of 1, 2, ... tokens is right, the last one for longer runs too;
    None if that is not known. A draft token that is right makes the run longer by one, so that with .4 .7 .8

        a run of 1   ->   path probabilities .4   .4 * .7   .4 * .7 * .8   .4 * .7 * .8 * .8

    prompt_only: for responses that rewrite a text in the prompt (aggressive decoding, Sun et al. 2021). Runs are looked
    for in the prompt alone, and of equally long ones the first behind the position copied last is taken: so copying
    goes on behind a difference, and not at another place with the same few tokens.
    """

    uses_hidden_states = False
    why_not_captured = "its drafts need the host"

    def __init__(
        self, base: BaseLM, ngram: int, span: int, acceptance: Sequence[float] | None = None, prompt_only: bool = False
    ) -> None:
        self.ngram = check_int(ngram, "prompt_lookup.ngram")
        self.span = check_int(span, "prompt_lookup.span")
        self.prompt_only = prompt_only
        self.path_probs: list[tuple[float, ...]] | None = None  # by length of the run, from 1
        if acceptance:
            rates = [check_float(one, "prompt_lookup.acceptance", least=0, most=1) for one in acceptance]
            rates += rates[-1:] * (self.ngram + self.span)
            self.path_probs = [tuple(accumulate(rates[run : run + self.span], mul)) for run in range(self.ngram)]

    def draft(
        self, context: Context, memory: CopyMemory | None, rng: torch.Generator
    ) -> tuple[TokenTree, CopyMemory | None]:
        if self.prompt_only:
            prompt, position = memory or (len(context.tokens_L) - 1, 0)  # the first draft is behind the first token
            draft_tokens_K, run, position = find_in_prompt(context.tokens_L, self.ngram, prompt, position)
            memory = prompt, position
        else:
            draft_tokens_K, run = find_continuation(context.tokens_L, self.ngram)
        draft_tokens_K = draft_tokens_K[: max(min(self.span, context.depth), 0)]
        if self.path_probs is None or len(draft_tokens_K) == 0:
            return TokenTree.chain(context.root, draft_tokens_K), memory
        probs = [prob for prob in self.path_probs[run - 1] if prob >= context.min_path_prob][: len(draft_tokens_K)]
        tokens = draft_tokens_K[: len(probs)].tolist()
        return TokenTree.from_lists(context.root, tokens, range(-1, len(tokens) - 1), probs), memory


def find_continuation(tokens_L: Tensor, ngram: int) -> tuple[Tensor, int]:
    """Return what followed the latest earlier occurrence of the longest matching suffix, and that suffix's length.

    ngram 2:   3 1 4 1 5 3 1   ->   4 1 5 3 1, 2      (the suffix 3 1 occurs at the start)
    """
    size, ends_G = longest_run(tokens_L, len(tokens_L) - 1, ngram)
    return (tokens_L[int(ends_G[-1]) + 1 :] if size else tokens_L[:0]), size


def find_in_prompt(tokens_L: Tensor, ngram: int, prompt: int, position: int) -> tuple[Tensor, int, int]:
    """Return what follows the longest matching suffix in the first `prompt` tokens, its length, and where that begins.

    Of several places it is the first one at `position` or behind it, else the last one before.
    """
    size, ends_G = longest_run(tokens_L, prompt, ngram)
    if size:
        position = int(ends_G[min(int(np.searchsorted(ends_G, position)), len(ends_G) - 1)]) + 1
    return (tokens_L[position:prompt] if size else tokens_L[:0]), size, position


def longest_run(tokens_L: Tensor, until: int, ngram: int) -> tuple[int, np.ndarray]:
    """Return the number of newest tokens, at most `ngram`, that occur in the first `until` tokens, and where they end.

    0 and no place if not even the newest one does.
    """
    text_L = tokens_L.numpy(force=True)  # a tensor operation per length would cost a hundredth of a small base's step
    ends_G = np.flatnonzero(text_L[:until] == text_L[-1])
    *_, longest = (0, ends_G), *matching_runs(text_L, ends_G, text_L, ngram)
    return longest


def matching_runs(
    past_L: np.ndarray, ends_G: np.ndarray, newest_L: np.ndarray, longest: int, start: int = 0, known: int = 1
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for `known` and more newest tokens the positions in past_L at which they end, while there are any.

    Args:
        ends_G: where the `known` newest tokens end.
        longest: maximal number of tokens.
        start: position at which a run may begin.
    """
    for size in range(known, longest + 1):
        if size > known:
            ends_G = ends_G[ends_G >= start + size - 1]
            ends_G = ends_G[past_L[ends_G - size + 1] == newest_L[-size]]
        if len(ends_G) == 0:
            return
        yield size, ends_G
