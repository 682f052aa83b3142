"""Checks of answer masks against the chat template, and a coloured preview of a response with one of its windows.

A row is one response behind its own prompt, so its mask is derived and not searched: zeros on the rendered prompt, ones
on the generated tokens. That holds for templates with and without generation markers, also for those that rewrite
earlier turns. But a wrong mask fails silently: a draft head trained on prompts, or one token beside the responses,
still learns something. So every mask is checked against its template again before training.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor

from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.corpus.token_store import Row
from ctcdraft.corpus.windows import label_windows, valid_anchors
from ctcdraft.errors import InputError

PROBE_PROMPTS = ("x", "Two words", "3 + 4 =", "Why?\n")  # user turns without a common ending
# ANSI codes: dim, green, reversed, yellow, magenta
COLOURS = {"prompt": "2", "answer": "32", "anchor": "7", "root": "1;33", "labels": "1;35"}


def generation_prompt_tokens(tokenizer: Any) -> list[int]:
    """Return the token ids of the template's generation prompt: the longest common ending of unlike prompts."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    backwards = [prompt_tokens(tokenizer, [{"role": "user", "content": text}])[::-1] for text in PROBE_PROMPTS]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*backwards, strict=False))
    return [tokens[0] for tokens in same][::-1]


def refuse_wrong_masks(rows: Iterable[Row], tokenizer: Any, stop_token_ids: Collection[int]) -> None:
    """Raise InputError unless every response follows the generation prompt and ends at its first stop token."""
    opening_K = torch.tensor(generation_prompt_tokens(tokenizer), dtype=torch.int64)
    stops_E = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
    for row in rows:
        fault = mask_fault(row, opening_K, stops_E)
        if fault:
            raise InputError(
                f"the answer mask of {row.id} {fault}; training on it would teach the wrong tokens: prepare the corpus "
                "again with data/prepare.py overwrite=true, and look at it with show=3"
            )


def mask_fault(row: Row, opening_K: Tensor, stops_E: Tensor) -> str:
    """Return what is wrong with the mask of a row, or an empty string."""
    tokens_L, mask_L = row.tokens_L.long(), row.mask_L.int()
    if len(tokens_L) != len(mask_L):
        return f"has {len(mask_L)} entries for {len(tokens_L)} tokens"
    if not mask_L.any() or mask_L.all():
        return "is all ones: prompt and answer cannot be told apart" if mask_L.any() else "is all zeros: no answer"
    edges_L = torch.diff(mask_L, prepend=mask_L.new_zeros(1), append=mask_L.new_zeros(1))
    starts, ends = (edges_L == 1).nonzero()[:, 0].tolist(), (edges_L == -1).nonzero()[:, 0].tolist()
    is_stop_L = torch.isin(tokens_L, stops_E)
    for start, end in zip(starts, ends, strict=True):
        if not torch.equal(tokens_L[max(start - len(opening_K), 0) : start], opening_K):
            return f"is shifted: the answer at token {start} does not follow the template's generation prompt"
        if is_stop_L[start : end - 1].any():
            return f"is shifted: the answer at token {start} continues after its end token"
        if not is_stop_L[end - 1] and (end < len(tokens_L) or row.ended):
            return f"is shifted: the answer at token {start} stops before its end token"
    return ""


def paint(text: str, colour: str) -> str:
    """Return the text in a colour of COLOURS, or plain where NO_COLOR is set."""
    return text if os.environ.get("NO_COLOR") else f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def legend() -> str:
    return " ".join(paint(name, name) for name in COLOURS)


def render_row(row: Row, tokenizer: Any, labels: int) -> str:
    """Return one prompt and response in colour, and the window of its middle anchor, cut by `label_windows`.

    Args:
        labels: labels of the window, at most.
    """
    tokens_1L, mask_1L = row.tokens_L.long()[None], row.mask_L.int()[None]
    anchors_A = valid_anchors(mask_1L)[0].nonzero()[:, 0]
    colours = ["answer" if is_answer else "prompt" for is_answer in row.mask_L.tolist()]
    window = "no anchor: the answer has fewer than two tokens"
    if len(anchors_A):
        anchor = int(anchors_A[len(anchors_A) // 2])
        ended_1L = torch.full_like(tokens_1L, row.ended, dtype=torch.bool)
        root_11, labels_11S, lengths_11 = label_windows(tokens_1L, mask_1L, torch.tensor([[anchor]]), labels, ended_1L)
        length = int(lengths_11)
        colours[anchor : anchor + 2 + length] = ["anchor", "root"] + ["labels"] * length
        anchor_text, root_text = (repr(tokenizer.decode(int(token))) for token in (tokens_1L[0, anchor], root_11))
        label_texts = [paint(repr(tokenizer.decode(token)), "labels") for token in labels_11S[0, 0, :length].tolist()]
        window = (
            f"anchor {anchor} {paint(anchor_text, 'anchor')}, root {paint(root_text, 'root')}: the draft head is "
            f"trained on the labels {' '.join(label_texts) or '(none: the answer was cut off here)'}"
        )
    counts = f"{int(mask_1L.sum())} of {len(row.tokens_L)} tokens are answer, {'ended' if row.ended else 'cut off'}"
    return f"{row.id}: {counts}\n{paint_tokens(tokens_1L[0].tolist(), colours, tokenizer)}\n{window}"


def paint_tokens(tokens: list[int], colours: list[str], tokenizer: Any) -> str:
    """Return the text of all tokens in colours, one decoding per run of a colour: characters can span tokens."""
    text, painted, end = "", [], 0
    for colour, run in groupby(colours):
        end += len(list(run))
        # The difference of two decodings: decoded alone, a run would lose its leading space with some tokenizers.
        longer = tokenizer.decode(tokens[:end])
        painted.append(paint(longer[len(text) :], colour))
        text = longer
    return "".join(painted)
