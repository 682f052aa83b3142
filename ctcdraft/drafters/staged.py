"""A draft model that another drafter drafts for. It knows the decoding loop, which serves it as it serves the base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.base import BaseLM
from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import Commit, TokenTree
from ctcdraft.decoding.verify import match
from ctcdraft.drafters.draft_model import DraftModel, Reading
from ctcdraft.drafters.drafter import reads_states, refuse_outsider
from ctcdraft.drafters.grow import grow
from ctcdraft.errors import InputError


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
        refuse_outsider(first)
        if reads_states(first):
            raise InputError(
                f"{type(first).__name__} reads the base's states, and the draft model has other ones; stage it with a "
                "drafter that reads words alone: prompt_lookup, a smaller draft_model, or a staged one"
            )
        self.model, self.first = model, first
        self.first_nodes = first_nodes

    uses_hidden_states = False

    def draft(
        self, context: Context, memory: tuple[Reading, Any] | None, rng: torch.Generator
    ) -> tuple[TokenTree, Any]:
        depth = min(context.depth, self.model.frames, self.model.lm.context_length - len(context.tokens_L))
        if depth < 1:
            return TokenTree.only_root(context.root), memory
        reading, first = memory or (self.model.empty_memory(context), None)
        chain_K, laws_KV, reading, first = self.decode_chain(context.tokens_L, depth, reading, first, rng)
        step_function = KnownLaws(chain_K, laws_KV)
        tree = grow(step_function, context.root, depth, context.nodes, 1, context.nodes, self.model.stops)
        return tree, (reading, first)

    def decode_chain(
        self, tokens_L: Tensor, depth: int, reading: Reading, first: Any, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Reading, Any]:
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
            commit = Commit.of(tree, match(tree, logits_NV, None, start))
            cache.keep_path(start, commit.path_K)
            log_probs.append(logits_NV[commit.path_K].log_softmax(dim=-1))
            text_L = torch.cat([text_L, torch.tensor(commit.tokens, device=text_L.device)])
        # The last word has not been read; what the base rejects of the others is forgotten at the next draft.
        return text_L[len(tokens_L) :], torch.cat(log_probs), Reading(text_L[:-1], cache), first


class KnownLaws:
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
