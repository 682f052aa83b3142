"""Whether the mask of a row marks its answer, exactly or not at all. It knows templates and ids; no file, no model.

A row is one answer behind its own prompt, as turns.py asked for it, so its mask is derived and not searched: zeros on
the template's prompt, ones on what the base said. That holds for templates with and without generation markers, also
for those that rewrite earlier turns. A wrong mask fails silently, though: a head trained on prompts, on nothing, or
one word beside its answers still learns something. So before training every mask is held to its template again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.errors import InputError

PROBE_PROMPTS = ("x", "Two words", "3 + 4 =", "Why?\n")  # users who have no end in common


class MaskedRow(Protocol):
    """An answer after its prompt, as training reads it."""

    @property
    def id(self) -> str: ...
    @property
    def tokens_L(self) -> Tensor: ...
    @property
    def mask_L(self) -> Tensor: ...
    @property
    def ended(self) -> bool: ...


def generation_prompt_tokens(tokenizer: Any) -> list[int]:
    """The ids that stand before every answer: how the prompts of quite different users all end."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    backwards = [prompt_tokens(tokenizer, [{"role": "user", "content": text}])[::-1] for text in PROBE_PROMPTS]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*backwards, strict=False))
    return [tokens[0] for tokens in same][::-1]


def refuse_wrong_masks(rows: Iterable[MaskedRow], tokenizer: Any, stop_token_ids: Collection[int]) -> None:
    """Raise InputError unless every answer begins behind the template's opening and ends with its first end token."""
    before = torch.tensor(generation_prompt_tokens(tokenizer), dtype=torch.int64)
    stops = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
    for row in rows:
        fault = mask_fault(row, before, stops)
        if fault:
            raise InputError(
                f"the answer mask of {row.id} {fault}; training on it would teach the wrong words: prepare the corpus "
                "again with data/prepare.py overwrite=true, and look at it with show=3"
            )


def mask_fault(row: MaskedRow, before_K: Tensor, stops_E: Tensor) -> str:
    """What is wrong with the mask of a row, or nothing."""
    tokens_L, mask_L = row.tokens_L.long(), row.mask_L.int()
    if len(tokens_L) != len(mask_L):
        return f"has {len(mask_L)} places for {len(tokens_L)} tokens"
    if not mask_L.any() or mask_L.all():
        return "is all ones: prompt and answer cannot be told apart" if mask_L.any() else "is all zeros: no answer"
    edges_L = torch.diff(mask_L, prepend=mask_L.new_zeros(1), append=mask_L.new_zeros(1))
    starts, ends = (edges_L == 1).nonzero()[:, 0].tolist(), (edges_L == -1).nonzero()[:, 0].tolist()
    is_stop_L = torch.isin(tokens_L, stops_E)
    for start, end in zip(starts, ends, strict=True):
        if not torch.equal(tokens_L[max(start - len(before_K), 0) : start], before_K):
            return f"is shifted: the answer at token {start} does not follow what the template puts before an answer"
        if is_stop_L[start : end - 1].any():
            return f"is shifted: the answer at token {start} goes on behind its end token"
        if not is_stop_L[end - 1] and (end < len(tokens_L) or row.ended):
            return f"is shifted: the answer at token {start} stops before its end token"
    return ""
