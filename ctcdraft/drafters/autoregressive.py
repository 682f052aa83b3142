"""The drafter that guesses nothing. The baseline thus runs through the same loop, clock and counter as every method."""

from __future__ import annotations

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.models.base_model import BaseLM


class Autoregressive:
    """A one-node tree every pass. Like every drafter it is made with the base first; it needs nothing of it."""

    uses_hidden_states = False

    def __init__(self, base: BaseLM) -> None:
        pass

    def draft(self, context: Context, memory: Tensor | None, rng: torch.Generator) -> tuple[TokenTree, Tensor]:
        """memory: the parents of a root, which are the same in every pass."""
        if memory is None:
            memory = TokenTree.only_root(context.root).parents_N
        return TokenTree(context.tokens_L[-1:], memory, height=0), memory
