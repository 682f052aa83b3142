"""Drafters that bracket the loop: one that always knows, one that never does, one that stutters. No weights."""

from __future__ import annotations

import torch

from ctcdraft.ctc.alignment import collapse
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree


class Oracle:
    """Says what the base will say: it holds the whole text (prompt and answer) beforehand."""

    def __init__(self, text: torch.Tensor, depth: int) -> None:
        self.text = text
        self.depth = depth

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        here = len(context.tokens_L)
        assert torch.equal(context.tokens_L, self.text[:here])
        return TokenTree.chain(context.root, self.text[here : here + min(self.depth, context.depth)]), None


class Junk:
    """Random trees, some with guesses below the end of the text."""

    def __init__(self, words: int, size: int) -> None:
        self.words = words
        self.size = size

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        paths = torch.randint(self.words, (self.size, max(context.depth, 1)), generator=rng)
        lengths = torch.randint(context.depth + 1, (self.size,), generator=rng)
        return TokenTree.from_paths(context.root, paths, lengths, limit=min(self.size, context.nodes)), None


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
