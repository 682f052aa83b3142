"""The decoding loop: draft a token tree, read it with the base model, verify it, keep the accepted path.

Every method, autoregression included, runs through `generate`; only the drafter differs. Nothing is mutated but the
KV cache: the drafter's state between steps is the `memory` it returns, and the text so far is the `Context`.
"""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise, splitmix64_finalise
from ctcdraft.decoding.settings import Context, DecodeStep, DecodingSettings, Drafter, GenerationResult
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.errors import InputError

__all__ = ["Context", "cache_rows_needed", "generate", "prefill", "refuse_over_budget"]


@torch.inference_mode()
def generate(
    base: Any,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    stop_token_ids: Collection[int],
    seed: int,
) -> GenerationResult:
    """Decode one response to prompt_L (at least one token, shorter than the base's context).

    The drafter and the verifier use different random streams. The verifier's is keyed by (seed, position), hence it
    is the same for every drafter.
    """
    noise = GumbelNoise(seed) if settings.temperature > 0 else None
    draft_rng = torch.Generator(prompt_L.device).manual_seed(int(splitmix64_finalise(torch.tensor(seed))))
    cache = base.new_cache(cache_rows_needed(prompt_L, settings))
    started = perf_counter()
    context = prefill(base, cache, prompt_L, settings, noise)
    response = context.tokens_L[len(prompt_L) :].tolist()  # on a GPU this waits for the prefill
    prefilled = perf_counter()
    steps: list[DecodeStep] = []
    memory, sampled = None, False
    while context.remaining_tokens > 0 and response[-1] not in stop_token_ids:
        tree, memory = drafter.draft(context, memory, draft_rng)
        refuse_over_budget(drafter, context.nodes, "nodes", len(tree))
        start = cache.length
        output = base.read_tree(tree, cache)
        result = settings.verify(tree, settings.process_logits(output.logits_NV), noise, start)
        path = AcceptedPath.of(tree, result)
        refuse_over_budget(drafter, context.depth, "depth", path.drafted)
        cache.keep_path(start, path.path_K)
        context = context.extend(path, output.states_ND)
        steps.append(commit(path, len(tree), response, stop_token_ids))
        sampled |= tree.draft_probs_NV is not None
    ended, finished = response[-1] in stop_token_ids, perf_counter()
    return GenerationResult(tuple(response), tuple(steps), ended, prefilled - started, finished - prefilled, sampled)


def prefill(base: Any, cache: Any, prompt_L: Tensor, settings: DecodingSettings, noise: GumbelNoise | None) -> Context:
    """Read the prompt and sample the first token of the response; it is no decoding step and does not count in tau."""
    output = base.read(prompt_L, cache)
    last_token = TokenTree.only_root(prompt_L[-1])
    result = settings.verify(last_token, settings.process_logits(output.logits_NV), noise, len(prompt_L) - 1)
    tokens_L = torch.cat([prompt_L, result.bonus.reshape(1)])
    remaining = min(settings.max_new_tokens, base.context_length - len(prompt_L)) - 1
    return Context(tokens_L, output.states_ND, remaining, settings.nodes, settings.process_draft_logits)


def commit(path: AcceptedPath, nodes: int, response: list[int], stop_token_ids: Collection[int]) -> DecodeStep:
    """Append the new tokens, up to and including the first stop token, to the response; return the step's counts."""
    stops = (index for index, token in enumerate(path.tokens, start=1) if token in stop_token_ids)
    tokens = path.tokens[: next(stops, None)]
    response.extend(tokens)
    accepted = min(len(path.tokens) - 1, len(tokens))
    # Draft tokens below an accepted stop token were not rejected: the text ended there.
    rejected_child = path.has_rejected_child and len(tokens) > accepted
    return DecodeStep(len(tokens), accepted, rejected_child, nodes, path.drafted)


def cache_rows_needed(prompt_L: Tensor, settings: DecodingSettings) -> int:
    """Return the most rows of keys and values that a response to prompt_L can need."""
    return len(prompt_L) + settings.max_new_tokens + settings.nodes


def refuse_over_budget(drafter: Drafter, limit: int, name: str, size: int) -> None:
    """Raise InputError for a tree beyond its budget: the cache and the counts have no room for it."""
    if size > limit:
        raise InputError(
            f"{type(drafter).__name__} drafted a tree of {name} {size} where context.{name} allows {limit}; a drafter "
            "must keep to its context"
        )
