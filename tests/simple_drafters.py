"""Drafters without weights: one that always drafts the response, one at random, one with CTC-like repeats."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ctcdraft.ctc.alignment import collapse
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters import controls


def oracle_drafter(text: torch.Tensor, depth: int) -> controls.Oracle:
    """Return an oracle that knows the whole text, prompt and response."""
    oracle = controls.Oracle(None, depth)
    oracle.set_text(text)
    return oracle


def random_drafter(vocabulary: int, size: int) -> controls.RandomDrafter:
    """Return a drafter of random trees, some deeper than the rest of the text."""
    return controls.RandomDrafter(SimpleNamespace(vocabulary=vocabulary), size)


class Stutter:
    """The response as frames with repeats, blanks and repeats of the root, then collapsed, as CTC emits it.

    Besides the true text the tree has wrong ones: the root again, every token twice, a token left out.
    """

    BLANK = -7

    def __init__(self, text: torch.Tensor, depth: int) -> None:
        self.text = text
        self.depth = depth

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        length = len(context.tokens_L)
        depth = min(self.depth, context.depth)
        truth = self.text[length : length + depth].tolist()
        if not truth:
            return TokenTree.only_root(context.root), None
        root = int(context.root)
        frames_of_text = [
            frame for token in truth for frame in (token, token, self.BLANK)
        ]  # a a - b b - : also a-blank-a
        doubled = [frame for token in truth for frame in (token, self.BLANK, token)]
        readings = [[root, self.BLANK, *frames_of_text], doubled, truth[1:], frames_of_text]
        width = max(map(len, readings))
        frames = torch.tensor([reading + [self.BLANK] * (width - len(reading)) for reading in readings])
        labels, lengths = collapse(frames, self.BLANK)
        return TokenTree.from_paths(context.root, labels, lengths.clamp(max=depth), limit=context.nodes), None
