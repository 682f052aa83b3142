"""The decoding loop: draft a token tree, read it with the base model, verify it, keep the accepted path.

Every method runs through `generate`, autoregression (a tree of one node) included; only the drafter differs. So all
methods share one loop, one clock and one count of tokens. Nothing is mutated but the KV cache: the text so far is the
`Context`, and a drafter's state between steps is the `memory` that it returns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.sampling import GumbelNoise, splitmix64_finalise, unwarped_log_probs
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, GenerationResult, LogitsProcessor
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.errors import InputError
from ctcdraft.renamed import CONTEXT_MEMBERS


@torch.inference_mode()
def generate(
    base: Any,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    stop_token_ids: Collection[int],
    seed: int,
    max_steps: int | None = None,
) -> GenerationResult:
    """Decode one response to prompt_L (at least one token, shorter than the base's context).

    max_steps: end after so many decoding steps, for measurements; None: no limit.
    """
    if uses_fixed_shapes(base, drafter, settings):
        return base.static_shapes.generate(base, drafter, prompt_L, settings, stop_token_ids, seed, max_steps)
    # The verifier's random numbers are keyed by (seed, position), hence the same for every drafter; a drafter samples
    # from a stream of its own. At temperature 0 the base's distribution is one-hot and needs no noise.
    noise = GumbelNoise(seed) if settings.temperature > 0 else None
    draft_rng = torch.Generator(prompt_L.device).manual_seed(int(splitmix64_finalise(torch.tensor(seed))))
    cache = base.new_cache(cache_rows_needed(prompt_L, settings))
    started = perf_counter()
    context = prefill(base, cache, prompt_L, settings, noise)
    response = context.tokens_L[len(prompt_L) :].tolist()  # waits for a GPU, so that the next line clocks it
    prefilled = perf_counter()

    steps: list[DecodeStep] = []
    memory, sampled = None, False
    while context.remaining_tokens > 0 and response[-1] not in stop_token_ids and len(steps) != max_steps:
        # Draft. The root of the tree is the newest token, which the base has chosen but not read.
        tree, memory = drafter.draft(context, memory, draft_rng)
        refuse_over_budget(drafter, context.nodes, "nodes", len(tree))

        # Read all nodes in one forward pass. Its time is that of reading the weights from memory, so it costs little
        # more than one over a single token: this is where the speed-up comes from.
        root_position = cache.length
        output = base.read_tree(tree, cache)  # appends the keys and values of all nodes

        # Verify: the accepted path from the root, and the bonus token that the base samples after it.
        result = settings.verify(tree, settings.process_logits(output.logits_NV), noise, root_position)
        path = AcceptedPath.of(tree, result)  # the loop's only transfer to the host in a step
        refuse_over_budget(drafter, context.depth, "depth", path.drafted)  # on the device until that transfer

        # Commit. Rejected nodes leave the cache, or later tokens would attend to them.
        cache.keep_path(root_position, path.path_K)
        context = context.extend(path, output.states_ND)
        steps.append(commit(path, len(tree), response, stop_token_ids))
        sampled |= tree.draft_probs_NV is not None
    finished = perf_counter()
    return GenerationResult(
        tokens=tuple(response),
        passes=tuple(steps),
        ended=response[-1] in stop_token_ids,
        seconds_prefill=prefilled - started,
        seconds_decode=finished - prefilled,
        drawn=sampled,
    )


def prefill(base: Any, cache: Any, prompt_L: Tensor, settings: DecodingSettings, noise: GumbelNoise | None) -> Context:
    """Read the prompt and sample the first token of the response; it is no decoding step and does not count in tau."""
    output = base.read(prompt_L, cache)
    # The verification of a tree without draft tokens: the first token is sampled by the same code as all others.
    last_token = TokenTree.only_root(prompt_L[-1])
    result = settings.verify(last_token, settings.process_logits(output.logits_NV), noise, len(prompt_L) - 1)
    tokens_L = torch.cat([prompt_L, result.bonus.reshape(1)])
    remaining = min(settings.max_new_tokens, base.context_length - len(prompt_L)) - 1
    return Context(tokens_L, output.states_ND, remaining, settings.nodes, settings.process_draft_logits)


def commit(path: CommittedTokens, nodes: int, response: list[int], stop_token_ids: Collection[int]) -> DecodeStep:
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


def uses_fixed_shapes(base: Any, drafter: Any, settings: DecodingSettings) -> bool:
    """Return whether decoding steps have fixed shapes. Other verifiers than `match` ask the host, or need samples."""
    return base.static_shapes is not None and settings.verify is match and not why_not_captured(drafter)


def step_execution(base: Any, drafter: Any, settings: DecodingSettings) -> str:
    """Return how decoding steps of a drafter run, for a report: "exact shapes (its drafts need the host)"."""
    if uses_fixed_shapes(base, drafter, settings):
        return base.static_shapes.execution_mode(base.device, drafter)
    if base.static_shapes is None:
        return "exact shapes"
    return f"exact shapes ({why_not_captured(drafter) or 'its verifier needs the host'})"


def why_not_captured(drafter: Any) -> str | None:
    """Return why a drafter's steps cannot have fixed shapes; None where they can."""
    reason = getattr(drafter, "why_not_captured", "its class does not declare fixed shapes")
    return reason() if callable(reason) else reason


def refuse_over_budget(drafter: Drafter, limit: int, name: str, size: int) -> None:
    """Raise InputError for a tree beyond its budget: the cache and the counts are sized for its budget."""
    if size > limit:
        raise InputError(
            f"{type(drafter).__name__} drafted a tree of {name} {size} where context.{name} allows {limit}; a drafter "
            "must keep to its context"
        )


class CommittedTokens(Protocol):
    """The outcome of a step on the host: an AcceptedPath, or the report of a step of fixed shapes."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def has_rejected_child(self) -> bool: ...
    @property
    def drafted(self) -> int: ...


@dataclass(frozen=True)
class Context:
    """All inputs of a draft: the committed tokens, new hidden states of the base, and the limits of the tree."""

    tokens_L: Tensor  # the last one is the root
    # Of the base, since the last draft (for the first draft: of the whole prompt). The last row is the anchor's, which
    # is the token before the root: the root itself has not been read yet.
    new_states_KD: Tensor
    remaining_tokens: int  # how many more max_new_tokens and the base's context allow
    nodes: int  # limit of the tree's nodes, the root counted
    logits_processor: LogitsProcessor = unwarped_log_probs  # temperature, top-k and top-p of this decoding run
    min_path_prob: float = 0.0  # a search stops at the first node whose path is less probable under the draft

    padded = False  # whether trees must have a fixed size, and rows a fixed number; see StaticContext
    count_1 = None

    @property
    def root(self) -> Tensor:
        return self.tokens_L[-1]

    @property
    def root_1(self) -> Tensor:
        return self.tokens_L[-1:]

    @property
    def new_tokens_K(self) -> Tensor:
        """The tokens after those whose hidden states are new; the root is the last one."""
        return self.tokens_L[len(self.tokens_L) - len(self.new_states_KD) :]

    def newest(self, x_BKX: Tensor) -> Tensor:
        """Return the row of the newest token, [B, 1, X]."""
        return x_BKX[:, -1:]

    def new_cache(self, layers: int, rows: int, positions: int | None = None) -> KVCache:
        """Return an empty cache for a drafter's memory of this text, with so many rows beyond it.

        positions: position ids of the drafter (None: those of the base), which only fixed shapes can exceed.
        """
        return KVCache(layers, capacity=len(self.tokens_L) + self.remaining_tokens + rows)

    @property
    def depth(self) -> int:
        """The depth limit of the tree: the base adds a bonus token below the deepest draft token."""
        return min(self.remaining_tokens, self.nodes) - 1

    def __getattr__(self, name: str) -> Any:  # called for names that do not exist
        now = CONTEXT_MEMBERS.get(name)
        raise AttributeError(f"Context has no {name}" + (f"; it is called {now} now" if now else ""))

    def limited(self, new_states_KD: Tensor, nodes: int, min_path_prob: float) -> Self:
        """Return the context with these hidden states and limits; written out like `extend`."""
        return type(self)(
            self.tokens_L, new_states_KD, self.remaining_tokens, nodes, self.logits_processor, min_path_prob
        )

    def extend(self, path: AcceptedPath, states_ND: Tensor) -> Self:
        """Return the context after committing the path. states_ND: hidden states of all nodes of the tree."""
        tokens_L = torch.cat([self.tokens_L, path.tokens_K])
        new_states_KD = states_ND if len(states_ND) == 1 else states_ND[path.path_K]
        # Written out: `dataclasses.replace` would add a thousandth to a step of autoregression on a small base.
        remaining = self.remaining_tokens - len(path.tokens)
        return type(self)(tokens_L, new_states_KD, remaining, self.nodes, self.logits_processor, self.min_path_prob)


class Drafter(Protocol):
    """A draft method. `memory` starts as None for every text; a drafter returns what it needs in the next step."""

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]: ...
