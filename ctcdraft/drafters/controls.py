"""Two control drafters without weights: one that is given the response, and one with random draft tokens.

They bracket every other drafter. In a correct measurement the first has tau = depth + 1 in every forward pass but the
last of a response, and the second about 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_int

MAX_RANDOM_DEPTH = 12


class Oracle:
    """Drafts the next `depth` tokens of a text that the evaluation gave it beforehand, outside the timed part."""

    uses_hidden_states = False
    why_not_captured = "its drafts need the host"

    def __init__(self, base: Any, depth: int) -> None:
        self.depth = check_int(depth, "oracle.depth")
        self.text_L: Tensor | None = None

    def set_text(self, text_L: Tensor) -> None:
        """Take a prompt with its response."""
        self.text_L = text_L  # no other drafter keeps state that is not in its memory

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        length, text_L = len(context.tokens_L), self.text_L
        # Decoding may have left the given text, for example in a near tie.
        if text_L is None or not torch.equal(context.tokens_L, text_L[:length]):
            return TokenTree.only_root(context.root), None
        return TokenTree.chain(context.root, text_L[length : length + min(self.depth, context.depth)]), None


class RandomDrafter:
    """Random tokens in random trees of `size` paths."""

    uses_hidden_states = False
    why_not_captured = "its drafts need the host"

    def __init__(self, base: Any, size: int) -> None:
        self.vocabulary = base.vocabulary
        self.size = check_int(size, "junk.size")

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        device, depth = context.tokens_L.device, max(context.depth, 0)
        # Seeded by the length alone: repeated calls draft the same, and a small tree is the beginning of a larger one.
        own_rng = torch.Generator(device).manual_seed(len(context.tokens_L))
        paths_PK = torch.randint(self.vocabulary, (self.size, MAX_RANDOM_DEPTH), generator=own_rng, device=device)
        lengths_P = torch.randint(MAX_RANDOM_DEPTH + 1, (self.size,), generator=own_rng, device=device).clamp(max=depth)
        return TokenTree.from_paths(context.root, paths_PK[:, : max(depth, 1)], lengths_P, limit=context.nodes), None


class FullTree:
    """Trees of exactly as many nodes as allowed, four below each, to time forward passes over them."""

    uses_hidden_states = False
    why_not_captured = None
    frames = 12  # levels of trees of any size

    def draft(self, context: Context, memory: TokenTree | None, rng: torch.Generator) -> tuple[TokenTree, TokenTree]:
        if memory is None or len(memory) != context.nodes:
            nodes_N, height, node = torch.arange(context.nodes, device=context.root_1.device), 0, context.nodes - 1
            while node:
                height, node = height + 1, (node - 1) // 4
            memory = TokenTree(torch.zeros_like(nodes_N), (nodes_N - 1) // 4, height)
        tokens_N = torch.cat([context.root_1, memory.tokens_N[1:]])
        return TokenTree(tokens_N, memory.parents_N, memory.height), memory


def find_oracle(drafter: Any) -> Oracle | None:
    """Return the drafter, or the one that it wraps (adaptive tree sizes), if that is an oracle."""
    inner = getattr(drafter, "drafter", drafter)
    return inner if isinstance(inner, Oracle) else None


def give_oracle_text(drafter: Any, text_L: Tensor) -> None:
    """Give a prompt with its response to a drafter that is an oracle; other drafters do not see it."""
    if oracle := find_oracle(drafter):
        oracle.set_text(text_L)
