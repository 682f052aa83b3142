"""A row printed in colour: prompts, responses, and the window of one anchor, as training reads them."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

import torch

from ctcdraft.corpus.token_store import Row, TokenSequences
from ctcdraft.corpus.windows import label_windows, valid_anchors

# ANSI codes: dim, green, reversed, yellow, magenta
COLOURS = {"prompt": "2", "answer": "32", "anchor": "7", "root": "1;33", "labels": "1;35"}


def paint(text: str, colour: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def legend() -> str:
    return " ".join(paint(name, name) for name in COLOURS)


def render_row(row: Row, tokenizer: Any, labels: int) -> str:
    """Return a row in colour, and the window of at most `labels` labels of its middle anchor."""
    padded = TokenSequences([row.tokens_L.long()], [row.spans]).pad_packs([[0]])
    tokens_1L, mask_1L = padded.tokens_BL, padded.mask_BL
    anchors_A = valid_anchors(mask_1L)[0].nonzero()[:, 0]
    colours = ["answer" if is_answer else "prompt" for is_answer in mask_1L[0].tolist()]
    window = "no anchor: the answer has fewer than two tokens"
    if len(anchors_A):
        anchor = int(anchors_A[len(anchors_A) // 2])
        root_11, labels_11S, lengths_11 = label_windows(
            tokens_1L, mask_1L, torch.tensor([[anchor]]), labels, padded.ended_BL
        )
        length = int(lengths_11)
        colours[anchor : anchor + 2 + length] = ["anchor", "root"] + ["labels"] * length
        anchor_text, root_text = (repr(tokenizer.decode(int(token))) for token in (tokens_1L[0, anchor], root_11))
        label_texts = [paint(repr(tokenizer.decode(token)), "labels") for token in labels_11S[0, 0, :length].tolist()]
        window = (
            f"anchor {anchor} {paint(anchor_text, 'anchor')}, root {paint(root_text, 'root')}: the draft head is "
            f"trained on the labels {' '.join(label_texts) or '(none: the answer was cut off here)'}"
        )
    ends = ", ".join("ended" if ended else "cut off" for *_, ended in row.spans)
    counts = f"{int(mask_1L.sum())} of {len(row.tokens_L)} tokens are answer, {ends}"
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
