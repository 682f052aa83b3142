"""The baseline: a drafter without draft tokens, so that it runs through the loop, clock and counter of every method."""

from __future__ import annotations

import torch

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.models.base_model import BaseLM


class Autoregressive:
    """A tree with one node, the root."""

    uses_hidden_states = False
    why_not_captured = None

    def __init__(self, base: BaseLM) -> None:
        pass  # every drafter is constructed with the base as first argument

    def draft(self, context: Context, memory: TokenTree | None, rng: torch.Generator) -> tuple[TokenTree, TokenTree]:
        # memory: the first tree, whose parents_N are those of all; in steps of fixed shapes its root is in one place.
        if memory is None:
            memory = TokenTree(context.root_1, TokenTree.only_root(context.root).parents_N, height=0)
        return memory if context.padded else TokenTree(context.root_1, memory.parents_N, height=0), memory
