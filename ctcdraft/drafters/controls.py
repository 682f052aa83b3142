"""Two drafters that bracket every other: one that knows the answer, one that knows nothing. They have no weights.

A harness that is right gives the first tau = depth + 1 in every pass but the last of an answer, and the second about 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_int

MAX_RANDOM_DEPTH = 12  # words of a junk path


class Oracle:
    """Says what the base will say, `depth` words a pass. Who measures tells it the whole text beforehand, off the
    clock; a text it was not told of, it does not draft for."""

    uses_hidden_states = False

    def __init__(self, base: Any, depth: int) -> None:
        self.depth = check_int(depth, "oracle.depth")
        self.text_L: Tensor | None = None

    def set_text(self, text_L: Tensor) -> None:
        """text_L: prompt and answer. The one thing a drafter of ours keeps that it was not handed as memory."""
        self.text_L = text_L

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        here, text_L = len(context.tokens_L), self.text_L
        if text_L is None or not torch.equal(context.tokens_L, text_L[:here]):
            return TokenTree.only_root(context.root), None
        return TokenTree.chain(context.root, text_L[here : here + min(self.depth, context.depth)]), None


class RandomDrafter:
    """Random words in random trees of `size` paths: a function of the place in the text alone, so that it guesses the
    same whenever it is asked, and its small trees are the beginnings of its large ones."""

    uses_hidden_states = False

    def __init__(self, base: Any, size: int) -> None:
        self.words = base.vocabulary
        self.size = check_int(size, "junk.size")  # not `paths`: those are clocked as the tree

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        device, depth = context.tokens_L.device, max(context.depth, 0)
        own = torch.Generator(device).manual_seed(len(context.tokens_L))
        paths_PK = torch.randint(self.words, (self.size, MAX_RANDOM_DEPTH), generator=own, device=device)
        lengths_P = torch.randint(MAX_RANDOM_DEPTH + 1, (self.size,), generator=own, device=device).clamp(max=depth)
        return TokenTree.from_paths(context.root, paths_PK[:, : max(depth, 1)], lengths_P, limit=context.nodes), None


def give_oracle_text(drafter: Any, text_L: Tensor) -> None:
    """A drafter that wants to hear the text beforehand, hears it."""
    if isinstance(drafter, Oracle):
        drafter.set_text(text_L)
