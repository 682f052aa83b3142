"""Draft tokens from two sources in one tree, normally a draft head and prompt lookup.

A node that both draft has a higher path probability than in either tree; all nodes are ranked together by their path
probability, and the best are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.acceptance import draft_path_probs
from ctcdraft.drafters.base import refuse_non_drafter, samples_drafts, uses_hidden_states
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM


class Merged(nn.Module):
    """Two drafters side by side; both draft in every step, and the most probable nodes of both trees are kept."""

    has_nested_trees = False  # a node may owe its rank to a part that drafts it only in a larger tree
    why_not_captured = "its drafts need the host"

    def __init__(self, base: BaseLM, first: Drafter, second: Drafter) -> None:
        super().__init__()
        for role, part in (("first", first), ("second", second)):
            refuse_non_drafter(part)
            # The choice of nodes would depend on the tokens sampled, which biases the output.
            if samples_drafts(part):
                raise InputError(
                    f"the {role} part of a merged drafter samples its draft tokens, and a merged tree has no "
                    "distribution for them; give both parts a tree that is not sampled (RUN@prefix_search, RUN@dynamic)"
                )
        self.first, self.second = first, second

    @property
    def uses_hidden_states(self) -> bool:
        return uses_hidden_states(self.first) or uses_hidden_states(self.second)

    def draft(self, context: Context, memory: tuple[Any, Any] | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        first_memory, second_memory = memory or (None, None)
        first, first_memory = self.first.draft(context, first_memory, rng)
        second, second_memory = self.second.draft(context, second_memory, rng)
        return merge_trees(first, second, context.nodes), (first_memory, second_memory)


def merge_trees(first: TokenTree, second: TokenTree, nodes: int) -> TokenTree:
    """Return the most probable nodes of two trees with one root.

    A node of both has the path probability 1 - (1 - q1)(1 - q2), as if the two were independent, which overestimates it
    on copied text (adaptive trees calibrate it). A node of one tree keeps its own, so none is more probable than its
    parent.

        root - a .5 - b .2     and     root - a .6     ->     root - a .8 - b .2
                                            - c .1                  - c .1
    """
    if len(second) == 1 and len(first) <= nodes:
        return first
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> node, numbered from 1 across both trees
    wrong: list[float] = []
    for tree in (first, second):
        merged = [0]
        parents, tokens = tree.parents_N[1:].tolist(), tree.tokens_N[1:].tolist()
        for parent, token, prob in zip(parents, tokens, draft_path_probs(tree), strict=True):
            node = known.setdefault((merged[parent], token), len(known) + 1)
            if node > len(wrong):
                wrong.append(1.0)
            wrong[node - 1] *= 1.0 - prob
            merged.append(node)
    return best_nodes(first, list(known), [1.0 - one for one in wrong], nodes)


def best_nodes(tree: TokenTree, edges: list[tuple[int, int]], probs: list[float], nodes: int) -> TokenTree:
    """Return the tree with this one's root and the `nodes` - 1 most probable edges (parent, token), numbered from 1."""
    bounded = [1.0]  # by the parent's, in spite of rounding
    for (parent, _), prob in zip(edges, probs, strict=True):
        bounded.append(min(prob, bounded[parent]))
    order = sorted(range(1, len(bounded)), key=lambda node: -bounded[node])[: nodes - 1]  # stable: parents come first
    place: Mapping[int, int] = {node: index for index, node in enumerate(chain([0], order), -1)}
    parents = [place[edges[node - 1][0]] for node in order]
    tokens = [edges[node - 1][1] for node in order]
    return TokenTree.from_lists(tree.tokens_N[0], tokens, parents, [bounded[node] for node in order])
