"""Drafters that bracket the loop: one that always knows, one that never does, one that stutters. No weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ctcdraft.ctc.alignment import collapse
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters import controls


def oracle_drafter(text: torch.Tensor, depth: int) -> controls.Oracle:
    """Says what the base will say: it is told the whole text (prompt and answer) at once."""
    told = controls.Oracle(None, depth)
    told.set_text(text)
    return told


def random_drafter(words: int, size: int) -> controls.RandomDrafter:
    """Random trees, some with guesses below the end of the text."""
    return controls.RandomDrafter(SimpleNamespace(vocabulary=words), size)


class Stutter:
    """An oracle's text said as frames with repeats, blanks and repeats of the root, then collapsed: what CTC emits.

    Beside the true reading it offers the wrong ones: the root again, each word doubled, a word left out.
    """

    BLANK = -7

    def __init__(self, text: torch.Tensor, depth: int) -> None:
        self.text = text
        self.depth = depth

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        here = len(context.tokens_L)
        depth = min(self.depth, context.depth)
        truth = self.text[here : here + depth].tolist()
        if not truth:
            return TokenTree.only_root(context.root), None
        root = int(context.root)
        spoken = [frame for word in truth for frame in (word, word, self.BLANK)]  # a a - b b - : also a-blank-a
        doubled = [frame for word in truth for frame in (word, self.BLANK, word)]
        readings = [[root, self.BLANK, *spoken], doubled, truth[1:], spoken]
        width = max(map(len, readings))
        frames = torch.tensor([reading + [self.BLANK] * (width - len(reading)) for reading in readings])
        labels, lengths = collapse(frames, self.BLANK)
        return TokenTree.from_paths(context.root, labels, lengths.clamp(max=depth), limit=context.nodes), None
