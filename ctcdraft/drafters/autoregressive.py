"""The baseline: a drafter without draft tokens, so that it runs through the loop, clock and counter of every method."""

from __future__ import annotations

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.models.base_model import BaseLM


class Autoregressive:
    """A tree with one node, the root."""

    uses_hidden_states = False
    why_not_captured = None

    def __init__(self, base: BaseLM) -> None:
        pass  # every drafter is constructed with the base as first argument

    def draft(self, context: Context, memory: Tensor | None, rng: torch.Generator) -> tuple[TokenTree, Tensor]:
        # memory: the tree's parents_N, reused because they are the same in every step.
        if memory is None:
            memory = TokenTree.only_root(context.root).parents_N
        return TokenTree(context.root_1, memory, height=0), memory
