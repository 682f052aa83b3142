"""Two drafters in a row: the second goes on where the first ends. It knows trees, contexts and who reads states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.base import BaseLM
from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.drafter import draws, reads_states, refuse_outsider
from ctcdraft.errors import InputError


@dataclass(frozen=True)
class CascadeMemory:
    """What each part remembers; waiting_KD: base states that the second has not been shown yet."""

    first: Any
    second: Any
    pending_states_KD: Tensor


class Cascade(nn.Module):
    """The horizontal cascade of Cascade Speculative Drafting (Chen et al. 2024): the first drafter takes the
    nearer positions, where a wrong guess costs most, and the second goes on below its deepest guess.

    later: nodes kept for the second. It must read words alone to go on below a guess; one that reads states
    takes over only where the first has nothing to say at all.
    """

    def __init__(self, base: BaseLM, first: Drafter, second: Drafter, later: int) -> None:
        super().__init__()
        if later < 1:
            raise InputError(f"drafter.later={later}: the second drafter of a cascade needs at least one node")
        for role, part in (("first", first), ("second", second)):
            refuse_unfit(role, part)
        self.first, self.second = first, second
        self.later = later
        self.stops = torch.tensor(sorted(base.stop_token_ids), device=base.device)

    has_nested_trees = False  # the second drafter has its share of nodes whatever the size

    @property
    def uses_hidden_states(self) -> bool:
        return reads_states(self.first) or reads_states(self.second)

    def draft(
        self, context: Context, memory: CascadeMemory | None, rng: torch.Generator
    ) -> tuple[TokenTree, CascadeMemory]:
        before = memory or CascadeMemory(None, None, context.new_states_KD[:0])
        waiting_KD = torch.cat([before.pending_states_KD, context.new_states_KD])
        nearer = replace(context, nodes=max(context.nodes - self.later, 1))
        tree, first = self.first.draft(nearer, before.first, rng)
        if len(tree) == 1:
            tree, second = self.second.draft(replace(context, new_states_KD=waiting_KD), before.second, rng)
            return tree, CascadeMemory(first, second, waiting_KD[:0])
        if reads_states(self.second):
            return tree, CascadeMemory(first, before.second, waiting_KD)
        tree, second = self.extend_tree(context, tree, before.second, rng)
        return tree, CascadeMemory(first, second, waiting_KD[:0])

    def extend_tree(self, context: Context, tree: TokenTree, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        """The second drafter below the deepest guess; the first of these is the one its drafter listed first."""
        deepest = tree.depths_N.argmax()
        path_K = tree.ancestors_NN[deepest].nonzero()[1:, 0]
        draft_tokens_K = tree.tokens_N[path_K]
        if torch.isin(draft_tokens_K[-1], self.stops):
            return tree, memory
        tokens_L = torch.cat([context.tokens_L, draft_tokens_K])
        remaining, nodes = context.remaining_tokens - len(path_K), context.nodes - len(tree) + 1
        later = replace(context, tokens_L=tokens_L, new_states_KD=context.new_states_KD[:0], remaining_tokens=remaining, nodes=nodes)
        below, memory = self.second.draft(later, memory, rng)
        return graft(tree, deepest, below), memory


def refuse_unfit(role: str, part: Any) -> None:
    """What could not go on in a cascade, before anything is asked. Where a first one draws to say nothing and a second
    speaks in its place, words would come out by no law at all."""
    refuse_outsider(part)
    if draws(part):
        raise InputError(
            f"the {role} part of a cascade draws its guesses, and a cascade has no law of its own for drawn ones; let "
            "both its parts draft without chance (RUN@prefix_search, RUN@best)"
        )


def graft(tree: TokenTree, node: Tensor, below: TokenTree) -> TokenTree:
    """`below` hung into the tree, its root being the node.

    a - b  with  b - c - d  at b   ->   a - b - c - d          (parents -1 0, and -1 0 1   ->   -1 0 1 2)
    """
    if tree.draft_probs_NV is not None or below.draft_probs_NV is not None:
        raise InputError("a cascade has no law of its own for drawn guesses; let both its parts draft without chance")
    shifted_N = torch.where(below.parents_N[1:] == 0, node, below.parents_N[1:] + len(tree) - 1)
    tokens_N = torch.cat([tree.tokens_N, below.tokens_N[1:]])
    return TokenTree(tokens_N, torch.cat([tree.parents_N, shifted_N]), tree.height + below.height)
