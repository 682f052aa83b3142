"""Two drafters in a row: the second goes on where the first ends. It knows trees, contexts and who reads states.

A draft model that another drafter drafts for. It knows the decoding loop, which serves it as it serves the base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.settings import Drafter
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.base import refuse_non_drafter, samples_drafts, uses_hidden_states
from ctcdraft.drafters.draft_model import DraftModel, DraftModelMemory
from ctcdraft.drafters.trees.dynamic import build_dynamic_tree
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM


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
            refuse_unfit_part(role, part)
        self.first, self.second = first, second
        self.later = later
        self.stops = torch.tensor(sorted(base.stop_token_ids), device=base.device)

    has_nested_trees = False  # the second drafter has its share of nodes whatever the size

    @property
    def uses_hidden_states(self) -> bool:
        return uses_hidden_states(self.first) or uses_hidden_states(self.second)

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
        if uses_hidden_states(self.second):
            return tree, CascadeMemory(first, before.second, waiting_KD)
        tree, second = self.extend_tree(context, tree, before.second, rng)
        return tree, CascadeMemory(first, second, waiting_KD[:0])

    def extend_tree(
        self, context: Context, tree: TokenTree, memory: Any, rng: torch.Generator
    ) -> tuple[TokenTree, Any]:
        """The second drafter below the deepest guess; the first of these is the one its drafter listed first."""
        deepest = tree.depths_N.argmax()
        path_K = tree.ancestors_NN[deepest].nonzero()[1:, 0]
        draft_tokens_K = tree.tokens_N[path_K]
        if torch.isin(draft_tokens_K[-1], self.stops):
            return tree, memory
        tokens_L = torch.cat([context.tokens_L, draft_tokens_K])
        remaining, nodes = context.remaining_tokens - len(path_K), context.nodes - len(tree) + 1
        later = replace(
            context, tokens_L=tokens_L, new_states_KD=context.new_states_KD[:0], remaining_tokens=remaining, nodes=nodes
        )
        below, memory = self.second.draft(later, memory, rng)
        return attach_subtree(tree, deepest, below), memory


def refuse_unfit_part(role: str, part: Any) -> None:
    """What could not go on in a cascade, before anything is asked. Where a first one draws to say nothing and a second
    speaks in its place, words would come out by no law at all."""
    refuse_non_drafter(part)
    if samples_drafts(part):
        raise InputError(
            f"the {role} part of a cascade draws its guesses, and a cascade has no law of its own for drawn ones; let "
            "both its parts draft without chance (RUN@prefix_search, RUN@best)"
        )


def attach_subtree(tree: TokenTree, node: Tensor, below: TokenTree) -> TokenTree:
    """`below` hung into the tree, its root being the node.

    a - b  with  b - c - d  at b   ->   a - b - c - d          (parents -1 0, and -1 0 1   ->   -1 0 1 2)
    """
    if tree.draft_probs_NV is not None or below.draft_probs_NV is not None:
        raise InputError("a cascade has no law of its own for drawn guesses; let both its parts draft without chance")
    shifted_N = torch.where(below.parents_N[1:] == 0, node, below.parents_N[1:] + len(tree) - 1)
    tokens_N = torch.cat([tree.tokens_N, below.tokens_N[1:]])
    return TokenTree(tokens_N, torch.cat([tree.parents_N, shifted_N]), tree.height + below.height)


class Staged(nn.Module):
    """A draft model that is itself drafted for (Spector and Re 2023; the vertical cascade of Chen et al. 2024).

    The first drafter guesses what the model will say, the model reads that in one pass and keeps its own words,
    and so on to its depth: the very chain it would have said alone, in fewer of its passes. Beside the chain
    stand the next best words of every position, as far as there are nodes.
    """

    def __init__(self, base: BaseLM, model: DraftModel, first: Drafter, first_nodes: int) -> None:
        super().__init__()
        if not isinstance(model, DraftModel):
            raise InputError(f"the model of a staged drafter is a draft_model; {type(model).__name__} reads no words")
        refuse_non_drafter(first)
        if uses_hidden_states(first):
            raise InputError(
                f"{type(first).__name__} reads the base's states, and the draft model has other ones; stage it with a "
                "drafter that reads words alone: prompt_lookup, a smaller draft_model, or a staged one"
            )
        self.model, self.first = model, first
        self.first_nodes = first_nodes

    uses_hidden_states = False

    def draft(
        self, context: Context, memory: tuple[DraftModelMemory, Any] | None, rng: torch.Generator
    ) -> tuple[TokenTree, Any]:
        depth = min(context.depth, self.model.frames, self.model.lm.context_length - len(context.tokens_L))
        if depth < 1:
            return TokenTree.only_root(context.root), memory
        reading, first = memory or (self.model.empty_memory(context), None)
        chain_K, laws_KV, reading, first = self.decode_chain(context.tokens_L, depth, reading, first, rng)
        step_function = KnownChainStepFunction(chain_K, laws_KV)
        tree = build_dynamic_tree(step_function, context.root, depth, context.nodes, 1, context.nodes, self.model.stops)
        return tree, (reading, first)

    def decode_chain(
        self, tokens_L: Tensor, depth: int, reading: DraftModelMemory, first: Any, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, DraftModelMemory, Any]:
        """The model's next `depth` words and the laws they came from: the decoding loop, the model as its base."""
        lm, cache, text_L, log_probs = self.model.lm, reading.cache, tokens_L, []
        cache.crop(reading.common_length(tokens_L))
        if cache.length < len(tokens_L) - 1:
            lm.read(tokens_L[cache.length : -1], cache)
        nothing_KD = torch.empty(0, lm.width, device=tokens_L.device)
        while (remaining := depth - len(text_L) + len(tokens_L)) > 0:
            tree, first = self.first.draft(Context(text_L, nothing_KD, remaining, self.first_nodes), first, rng)
            start = cache.length
            logits_NV = lm.read_tree(tree, cache).logits_NV[:, : self.model.vocabulary].float()
            commit = AcceptedPath.of(tree, match(tree, logits_NV, None, start))
            cache.keep_path(start, commit.path_K)
            log_probs.append(logits_NV[commit.path_K].log_softmax(dim=-1))
            text_L = torch.cat([text_L, torch.tensor(commit.tokens, device=text_L.device)])
        # The last word has not been read; what the base rejects of the others is forgotten at the next draft.
        return text_L[len(tokens_L) :], torch.cat(log_probs), DraftModelMemory(text_L[:-1], cache), first


class KnownChainStepFunction:
    """The laws along a chain that has been said; off the chain, behind a stop, nothing is possible."""

    def __init__(self, chain_K: Tensor, log_probs_KV: Tensor) -> None:
        self.chain_K = chain_K
        self.log_probs_KV = log_probs_KV
        self.level = 0

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        log_probs_KV = self.log_probs_KV[self.level, None]
        if self.level > 0:
            log_probs_KV = torch.where((tokens_K == self.chain_K[self.level - 1])[:, None], log_probs_KV, -torch.inf)
        self.level += 1
        return log_probs_KV
