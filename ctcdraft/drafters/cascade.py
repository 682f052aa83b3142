"""Compositions of drafters: two in a row, and a draft model that is itself decoded speculatively."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.base import refuse_non_drafter, samples_drafts, uses_hidden_states
from ctcdraft.drafters.draft_model import DraftModel, DraftModelMemory
from ctcdraft.drafters.trees.dynamic import build_dynamic_tree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.errors import InputError, check_int
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class CascadeMemory:
    first: Any
    second: Any
    pending_states_KD: Tensor  # hidden states that the second drafter has not been given yet


class Cascade(nn.Module):
    """The horizontal cascade of Cascade Speculative Drafting (Chen et al. 2024).

    The first drafter takes the nearer positions, where a rejected token costs most, and the second continues below its
    deepest node. Draft tokens have no hidden states: a second drafter that reads them is used only where the first
    drafts nothing. `later` nodes are kept for the second.
    """

    has_nested_trees = False  # the second drafter has its share of nodes whatever the size

    def __init__(self, base: BaseLM, first: Drafter, second: Drafter, later: int) -> None:
        super().__init__()
        for role, part in (("first", first), ("second", second)):
            refuse_unfit_part(role, part)
        self.first, self.second = first, second
        self.later = check_int(later, "drafter.later")
        self.stops = torch.tensor(sorted(base.stop_token_ids), device=base.device)

    @property
    def uses_hidden_states(self) -> bool:
        return uses_hidden_states(self.first) or uses_hidden_states(self.second)

    def draft(self, context: Context, memory: CascadeMemory | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        memory = memory or CascadeMemory(None, None, context.new_states_KD[:0])
        pending_KD = torch.cat([memory.pending_states_KD, context.new_states_KD])
        smaller = replace(context, nodes=max(context.nodes - self.later, 1))
        tree, first = self.first.draft(smaller, memory.first, rng)
        if len(tree) == 1:  # the first drafted nothing
            tree, second = self.second.draft(replace(context, new_states_KD=pending_KD), memory.second, rng)
            return tree, CascadeMemory(first, second, pending_KD[:0])
        if uses_hidden_states(self.second):
            return tree, CascadeMemory(first, memory.second, pending_KD)
        tree, second = self.extend_tree(context, tree, memory.second, rng)
        return tree, CascadeMemory(first, second, pending_KD[:0])

    def extend_tree(
        self, context: Context, tree: TokenTree, memory: Any, rng: torch.Generator
    ) -> tuple[TokenTree, Any]:
        """Return the tree continued by the second drafter below its deepest node, the first of equally deep ones."""
        deepest = tree.depths_N.argmax()
        path_K = tree.ancestors_NN[deepest].nonzero()[1:, 0]  # without the root
        draft_tokens_K = tree.tokens_N[path_K]
        if torch.isin(draft_tokens_K[-1], self.stops):
            return tree, memory  # nothing is drafted below a stop token
        extended = replace(
            context,
            tokens_L=torch.cat([context.tokens_L, draft_tokens_K]),
            new_states_KD=context.new_states_KD[:0],  # draft tokens have none
            remaining_tokens=context.remaining_tokens - len(path_K),
            nodes=context.nodes - len(tree) + 1,  # the root of the subtree is a node already
        )
        subtree, memory = self.second.draft(extended, memory, rng)
        return attach_subtree(tree, deepest, subtree), memory


def refuse_unfit_part(role: str, part: Any) -> None:
    """Raise InputError for a drafter that cannot be part of a cascade."""
    refuse_non_drafter(part)
    # A sampled draft may end by chance; if the second drafter continued there, its tokens would have no distribution
    # that rejection sampling could use.
    if samples_drafts(part):
        raise InputError(
            f"the {role} part of a cascade samples its draft tokens, and a cascade has no distribution for them; "
            "give both parts a tree that is not sampled (RUN@prefix_search, RUN@dynamic)"
        )


def attach_subtree(tree: TokenTree, node: Tensor, subtree: TokenTree) -> TokenTree:
    """Return the tree with a subtree whose root is an existing node.

    a - b  with  b - c - d  at b   ->   a - b - c - d          (parents -1 0, and -1 0 1   ->   -1 0 1 2)
    """
    if tree.draft_probs_NV is not None or subtree.draft_probs_NV is not None:
        raise InputError("a cascade has no distribution for sampled draft tokens; give both parts another tree")
    shifted_N = torch.where(subtree.parents_N[1:] == 0, node, subtree.parents_N[1:] + len(tree) - 1)
    tokens_N = torch.cat([tree.tokens_N, subtree.tokens_N[1:]])
    path_probs_N = None
    if tree.path_probs_N is not None and subtree.path_probs_N is not None:
        path_probs_N = torch.cat([tree.path_probs_N, tree.path_probs_N[node] * subtree.path_probs_N[1:]])
    parents_N, height = torch.cat([tree.parents_N, shifted_N]), tree.height + subtree.height
    return TokenTree(tokens_N, parents_N, height, path_probs_N=path_probs_N)


StagedMemory = tuple[DraftModelMemory, Any]  # of the draft model, and of its first drafter


class Staged(nn.Module):
    """A draft model decoded speculatively (Spector and Re 2023; the vertical cascade of Chen et al. 2024).

    The first drafter drafts for the model, which verifies in one forward pass and keeps its own tokens, and so on to
    its depth: the greedy chain of the model alone in fewer of its forward passes. The remaining nodes are the next
    best tokens at every position of the chain.
    """

    uses_hidden_states = False

    def __init__(self, base: BaseLM, model: DraftModel, first: Drafter, first_nodes: int) -> None:
        super().__init__()
        if not isinstance(model, DraftModel):
            raise InputError(f"the model of a staged drafter must be a draft_model, got {type(model).__name__}")
        refuse_non_drafter(first)
        if uses_hidden_states(first):
            raise InputError(
                f"{type(first).__name__} reads the base's hidden states, and the draft model has others; take a first "
                "drafter that reads tokens alone: prompt_lookup, a smaller draft_model, or a staged one"
            )
        self.model, self.first = model, first
        self.first_nodes = first_nodes

    def draft(self, context: Context, memory: StagedMemory | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        depth = min(context.depth, self.model.frames, self.model.lm.context_length - len(context.tokens_L))
        if depth < 1:
            return TokenTree.only_root(context.root), memory
        memory = memory or (self.model.empty_memory(context), None)
        step_function, memory = self.decode_chain(context.tokens_L, depth, memory, rng)
        request = TreeRequest(context.root, depth, context.nodes, self.model.stops)
        return build_dynamic_tree(step_function, request, width=1, children=context.nodes), memory

    def decode_chain(
        self, tokens_L: Tensor, depth: int, memories: StagedMemory, rng: torch.Generator
    ) -> tuple[KnownChainStepFunction, StagedMemory]:
        """Decode the model's next `depth` tokens: the decoding loop with the draft model as base."""
        memory, first = memories
        lm, cache, text_L, log_probs = self.model.lm, memory.cache, tokens_L, []
        cache.crop(memory.common_length(tokens_L))
        if cache.length < len(tokens_L) - 1:
            lm.read(tokens_L[cache.length : -1], cache)
        no_states_KD = torch.empty(0, lm.width, device=tokens_L.device)
        while (remaining := depth - len(text_L) + len(tokens_L)) > 0:
            tree, first = self.first.draft(Context(text_L, no_states_KD, remaining, self.first_nodes), first, rng)
            start = cache.length
            logits_NV = lm.read_tree(tree, cache).logits_NV[:, : self.model.vocabulary].float()
            commit = AcceptedPath.of(tree, match(tree, logits_NV, None, start))
            cache.keep_path(start, commit.path_K)
            log_probs.append(logits_NV[commit.path_K].log_softmax(dim=-1))
            text_L = torch.cat([text_L, torch.tensor(commit.tokens, device=text_L.device)])
        # The last token is not in the cache; of the others those that the base rejects are cropped by the next draft.
        chain = KnownChainStepFunction(text_L[len(tokens_L) :], torch.cat(log_probs))
        return chain, (DraftModelMemory(text_L[:-1], cache), first)


@dataclass
class KnownChainStepFunction:
    """The distributions along a decoded chain, as a step function."""

    chain_K: Tensor
    log_probs_KV: Tensor
    level: int = 0

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        log_probs_KV = self.log_probs_KV[self.level, None]
        if self.level > 0:
            # A row that left the chain, because a stop token is not continued, has no probable token.
            log_probs_KV = torch.where((tokens_K == self.chain_K[self.level - 1])[:, None], log_probs_KV, -torch.inf)
        self.level += 1
        return log_probs_KV
