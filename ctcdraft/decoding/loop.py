"""The decoding loop. It knows trees and verdicts; it has never heard of CTC, training or text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise, splitmix64_finalise, unwarped_log_probs
from ctcdraft.decoding.settings import DecodeStep, GenerationResult
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.errors import InputError

if TYPE_CHECKING:
    from ctcdraft.decoding.settings import DecodingSettings, Drafter, LogitsProcessor


@dataclass(frozen=True)
class Context:
    """Everything a drafter may know.

    tokens_L: all committed tokens; the last one is the root. fresh_KD: base states read since the last draft
    (the first time: the prompt's), the newest last; it is the state of the token before the root.
    room: tokens still allowed by max_new_tokens and by the base's context. nodes: the most a tree may have.
    law: how decoding bends a law before a word is drawn from it.
    """

    tokens_L: Tensor
    new_states_KD: Tensor
    remaining_tokens: int
    nodes: int
    logits_processor: LogitsProcessor = unwarped_log_probs

    @property
    def root(self) -> Tensor:
        return self.tokens_L[-1]

    @property
    def depth(self) -> int:
        """How deep a tree may be: the base adds a word of its own below the deepest guess."""
        return min(self.remaining_tokens, self.nodes) - 1

    def extend(self, commit: AcceptedPath, states_ND: Tensor) -> Self:
        tokens_L = torch.cat([self.tokens_L, commit.tokens_K])
        fresh_KD = states_ND if len(states_ND) == 1 else states_ND[commit.path_K]
        # Written out: `dataclasses.replace` would cost autoregression a thousandth of a small base's pass.
        return type(self)(
            tokens_L, fresh_KD, self.remaining_tokens - len(commit.tokens), self.nodes, self.logits_processor
        )


@torch.inference_mode()
def generate(
    base: Any,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    stop_token_ids: Collection[int],
    seed: int,
) -> GenerationResult:
    """Decode one answer to prompt_L (at least one token, shorter than the base's context).

    The drafter's random stream and the verifier's are different ones; the verifier's is keyed by (seed,
    position) and hence the same for every drafter.
    """
    noise = GumbelNoise(seed) if settings.temperature > 0 else None
    rng = torch.Generator(prompt_L.device).manual_seed(int(splitmix64_finalise(torch.tensor(seed))))
    cache = base.new_cache(cache_rows_needed(prompt_L, settings))
    began = perf_counter()
    context = prefill(base, cache, prompt_L, settings, noise)
    response = context.tokens_L[len(prompt_L) :].tolist()  # on a GPU this waits for the prefill
    prefilled = perf_counter()
    passes: list[DecodeStep] = []
    memory, drawn = None, False
    while context.remaining_tokens > 0 and response[-1] not in stop_token_ids:
        tree, memory = drafter.draft(context, memory, rng)
        drawn |= tree.draft_probs_NV is not None
        refuse_over_budget(drafter, context.nodes, "nodes", len(tree))
        start = cache.length
        read = base.read_tree(tree, cache)
        verdict = settings.verify(tree, settings.process_logits(read.logits_NV), noise, start)
        commit = AcceptedPath.of(tree, verdict)
        refuse_over_budget(drafter, context.depth, "depth", commit.drafted)
        cache.keep_path(start, commit.path_K)
        context = context.extend(commit, read.states_ND)
        new = truncate_at_stop(commit.tokens, stop_token_ids)
        response.extend(new)
        accepted = min(len(commit.tokens) - 1, len(new))
        # Below an end that was accepted nothing counts: what hung there was not refused.
        is_open = commit.has_rejected_child and len(new) > accepted
        passes.append(DecodeStep(len(new), accepted, is_open, len(tree), commit.drafted))
    ended = response[-1] in stop_token_ids
    return GenerationResult(tuple(response), tuple(passes), ended, prefilled - began, perf_counter() - prefilled, drawn)


def cache_rows_needed(prompt_L: Tensor, settings: DecodingSettings) -> int:
    """Of keys and values, the most that an answer to prompt_L needs."""
    return len(prompt_L) + settings.max_new_tokens + settings.nodes


def refuse_over_budget(drafter: Drafter, most: int, what: str, found: int) -> None:
    """Raise InputError for a tree beyond its budget, which no cache row and no count of ours has room for."""
    if found > most:
        raise InputError(
            f"{type(drafter).__name__} drafted a tree of {what} {found} where context.{what} allows {most}; a drafter "
            "must keep to its context"
        )


def prefill(base: Any, cache: Any, prompt_L: Tensor, settings: DecodingSettings, noise: GumbelNoise | None) -> Context:
    """Read the prompt and let the base say the first token. It is no pass and counts in no tau."""
    read = base.read(prompt_L, cache)
    last = TokenTree.only_root(prompt_L[-1])
    verdict = settings.verify(last, settings.process_logits(read.logits_NV), noise, len(prompt_L) - 1)
    tokens_L = torch.cat([prompt_L, verdict.bonus.reshape(1)])
    remaining = min(settings.max_new_tokens, base.context_length - len(prompt_L)) - 1
    return Context(tokens_L, read.states_ND, remaining, settings.nodes, settings.process_draft_logits)


def truncate_at_stop(tokens: tuple[int, ...], stop_token_ids: Collection[int]) -> tuple[int, ...]:
    """Tokens up to and including the first stop: what a draft said beyond it never counts."""
    for index, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: index + 1]
    return tokens
