"""A draft model that is itself decoded speculatively."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.base import refuse_non_drafter, uses_hidden_states
from ctcdraft.drafters.draft_model import DraftModel, DraftModelMemory
from ctcdraft.drafters.trees.dynamic import build_dynamic_tree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

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
