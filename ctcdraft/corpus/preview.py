"""A prepared answer for the eye: prompt, answer, and what the head must say at one anchor. It knows colours, no model.

Nothing is shown that training does not read: the window is cut by `label_windows`, from the same tokens and mask.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ctcdraft.corpus.answer_mask import MaskedRow
from ctcdraft.corpus.windows import label_windows, valid_anchors

PROMPT_COLOUR, ANSWER_COLOUR, ANCHOR_COLOUR, ROOT_COLOUR, LABEL_COLOUR = (
    "2",
    "32",
    "7",
    "1;33",
    "1;35",
)  # dim, green, reversed, yellow, magenta


def paint(text: str, colour: str) -> str:
    """The text in a colour; as it is where NO_COLOR is set."""
    return text if os.environ.get("NO_COLOR") else f"\x1b[{colour}m{text}\x1b[0m"


def legend() -> str:
    names = {
        "prompt": PROMPT_COLOUR,
        "answer": ANSWER_COLOUR,
        "anchor": ANCHOR_COLOUR,
        "root": ROOT_COLOUR,
        "labels": LABEL_COLOUR,
    }
    return " ".join(paint(name, colour) for name, colour in names.items())


def render_row(row: MaskedRow, tokenizer: Any, labels: int) -> str:
    """One answer in colour, and under it the window of its middle anchor in words.

    labels: how many words the head must say there, at most.
    """
    tokens_1L, mask_1L = row.tokens_L.long()[None], row.mask_L.int()[None]
    anchors_A = valid_anchors(mask_1L)[0].nonzero()[:, 0]
    colours = [ANSWER_COLOUR if inside else PROMPT_COLOUR for inside in row.mask_L.tolist()]
    window = "no anchor: the answer has fewer than two tokens"
    if len(anchors_A):
        anchor = int(anchors_A[len(anchors_A) // 2])
        ended_1L = torch.full_like(tokens_1L, row.ended, dtype=torch.bool)
        root_11, labels_11S, lengths_11 = label_windows(tokens_1L, mask_1L, torch.tensor([[anchor]]), labels, ended_1L)
        length = int(lengths_11)
        colours[anchor : anchor + 2] = [ANCHOR_COLOUR, ROOT_COLOUR]
        colours[anchor + 2 : anchor + 2 + length] = [LABEL_COLOUR] * length
        texts = [tokenizer.decode(token) for token in [int(tokens_1L[0, anchor]), int(root_11)]]
        must = [tokenizer.decode(token) for token in labels_11S[0, 0, :length].tolist()]
        window = (
            f"anchor {anchor} {paint(repr(texts[0]), ANCHOR_COLOUR)}, root {paint(repr(texts[1]), ROOT_COLOUR)}: the "
            "head must say "
            + (" ".join(paint(repr(word), LABEL_COLOUR) for word in must) or "nothing, for the answer was cut off here")
        )
    text = paint_tokens(tokens_1L[0].tolist(), colours, tokenizer)
    end = "ended" if row.ended else "cut off"
    counts = f"{int(mask_1L.sum())} of {len(row.tokens_L)} tokens are answer, {end}"
    return f"{row.id}: {counts}\n{text}\n{window}"


def paint_tokens(tokens: list[int], colours: list[str], tokenizer: Any) -> str:
    """The text of all tokens, a colour for every run; a run is decoded together, so that no letter is torn."""
    runs: list[tuple[str, list[int]]] = []
    for token, colour in zip(tokens, colours, strict=True):
        if not runs or runs[-1][0] != colour:
            runs.append((colour, []))
        runs[-1][1].append(token)
    before, parts = "", []
    for place, (colour, _) in enumerate(runs):
        # The difference of two decodings: alone, some tokenizers would drop the space that a run begins with.
        whole = tokenizer.decode([token for _, run in runs[: place + 1] for token in run])
        parts.append(paint(whole[len(before) :], colour))
        before = whole
    return "".join(parts)
