"""The decoding loop. It knows trees and verdicts; it has never heard of CTC, training or text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import Noise, plain, scramble, warp
from ctcdraft.decoding.tree import Commit, TokenTree
from ctcdraft.decoding.verify import Verifier
from ctcdraft.errors import InputError, number, whole

Law = Callable[[Tensor], Tensor]  # logits_NV -> log-probabilities_NV


@dataclass(frozen=True)
class Settings:
    """How to decode; the same for every drafter that is compared.

    nodes: how many nodes a tree may have, the root counted (1 is autoregression). lossless: what comes out has the
    base's law. token_for_token: even where guesses were drawn, it is autoregression's own sample.
    """

    max_new_tokens: int
    nodes: int
    temperature: float
    top_k: int
    top_p: float
    verify: Verifier
    lossless: bool
    token_for_token: bool = True

    def __post_init__(self) -> None:
        whole(self.max_new_tokens, "decoding.max_new_tokens")
        whole(self.nodes, "decoding.nodes")
        whole(self.top_k, "decoding.top_k", least=0)
        number(self.temperature, "decoding.temperature")
        number(self.top_p, "decoding.top_p")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InputError(
                f"decoding.temperature={self.temperature}, top_k={self.top_k} and top_p={self.top_p} are no law; "
                "temperature and top_k start at 0, top_p lies above 0 and reaches to 1"
            )

    def owes_token_identity(self, drawn: bool) -> bool:
        """Whether an answer owes autoregression every token, and not its law alone. drawn: guesses were."""
        return self.temperature == 0 or self.token_for_token or (self.lossless and not drawn)

    def process_logits(self, logits_NV: Tensor) -> Tensor:
        """What verifiers read: log-probabilities_NV after all bending.

        At temperature 0 the logits as they are: of a one-hot law only the best word matters, and to write all the
        others as impossible costs more than the rest of the verdict.
        """
        if self.temperature == 0:
            return logits_NV
        return warp(logits_NV, self.temperature, self.top_k, self.top_p)

    def process_draft_logits(self, logits_NV: Tensor) -> Tensor:
        """Log-probabilities_NV of a draft's logits, bent alike, one-hot at temperature 0; a clock books them with the
        draft."""
        return warp(logits_NV, self.temperature, self.top_k, self.top_p)


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
    logits_processor: Law = plain

    @property
    def root(self) -> Tensor:
        return self.tokens_L[-1]

    @property
    def depth(self) -> int:
        """How deep a tree may be: the base adds a word of its own below the deepest guess."""
        return min(self.remaining_tokens, self.nodes) - 1

    def extend(self, commit: Commit, states_ND: Tensor) -> Self:
        tokens_L = torch.cat([self.tokens_L, commit.tokens_K])
        fresh_KD = states_ND if len(states_ND) == 1 else states_ND[commit.path_K]
        # Written out: `dataclasses.replace` would cost autoregression a thousandth of a small base's pass.
        return type(self)(tokens_L, fresh_KD, self.remaining_tokens - len(commit.tokens), self.nodes, self.logits_processor)


class Drafter(Protocol):
    """Whatever guesses. `memory` starts as None for every text; what a drafter must remember it hands back."""

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]: ...


@dataclass(frozen=True)
class Pass:
    """One reading of the base: tokens committed (after the cut at EOS), guesses accepted, what was offered.

    open: a guess hung below the last accepted node, and the text went on. nodes: of the tree, root counted. drafted:
    its depth.
    """

    committed: int
    accepted: int
    rejected_child: bool
    nodes: int
    drafted: int


@dataclass(frozen=True)
class Generation:
    """The answer's tokens, first EOS included, and how they came about. drawn: some guess was, not computed."""

    tokens: tuple[int, ...]
    passes: tuple[Pass, ...]
    ended: bool
    seconds_prefill: float
    seconds_decode: float
    drawn: bool = False


@torch.inference_mode()
def generate(
    base: Any, drafter: Drafter, prompt_L: Tensor, settings: Settings, stop_token_ids: Collection[int], seed: int
) -> Generation:
    """Decode one answer to prompt_L (at least one token, shorter than the base's context).

    The drafter's random stream and the verifier's are different ones; the verifier's is keyed by (seed,
    position) and hence the same for every drafter.
    """
    noise = Noise(seed) if settings.temperature > 0 else None
    rng = torch.Generator(prompt_L.device).manual_seed(int(scramble(torch.tensor(seed))))
    cache = base.new_cache(rows(prompt_L, settings))
    began = perf_counter()
    context = prefill(base, cache, prompt_L, settings, noise)
    response = context.tokens_L[len(prompt_L) :].tolist()  # on a GPU this waits for the prefill
    prefilled = perf_counter()
    passes: list[Pass] = []
    memory, drawn = None, False
    while context.remaining_tokens > 0 and response[-1] not in stop_token_ids:
        tree, memory = drafter.draft(context, memory, rng)
        drawn |= tree.draft_probs_NV is not None
        refuse_too_large(drafter, context.nodes, "nodes", len(tree))
        start = cache.length
        read = base.read_tree(tree, cache)
        verdict = settings.verify(tree, settings.process_logits(read.logits_NV), noise, start)
        commit = Commit.of(tree, verdict)
        refuse_too_large(drafter, context.depth, "depth", commit.drafted)
        cache.keep_path(start, commit.path_K)
        context = context.extend(commit, read.states_ND)
        new = cut(commit.tokens, stop_token_ids)
        response.extend(new)
        accepted = min(len(commit.tokens) - 1, len(new))
        # Below an end that was accepted nothing counts: what hung there was not refused.
        is_open = commit.has_rejected_child and len(new) > accepted
        passes.append(Pass(len(new), accepted, is_open, len(tree), commit.drafted))
    ended = response[-1] in stop_token_ids
    return Generation(tuple(response), tuple(passes), ended, prefilled - began, perf_counter() - prefilled, drawn)


def rows(prompt_L: Tensor, settings: Settings) -> int:
    """Of keys and values, the most that an answer to prompt_L needs."""
    return len(prompt_L) + settings.max_new_tokens + settings.nodes


def refuse_too_large(drafter: Drafter, most: int, what: str, found: int) -> None:
    """Raise InputError for a tree beyond its budget, which no cache row and no count of ours has room for."""
    if found > most:
        raise InputError(
            f"{type(drafter).__name__} drafted a tree of {what} {found} where context.{what} allows {most}; a drafter "
            "must keep to its context"
        )


def prefill(base: Any, cache: Any, prompt_L: Tensor, settings: Settings, noise: Noise | None) -> Context:
    """Read the prompt and let the base say the first token. It is no pass and counts in no tau."""
    read = base.read(prompt_L, cache)
    last = TokenTree.only_root(prompt_L[-1])
    verdict = settings.verify(last, settings.process_logits(read.logits_NV), noise, len(prompt_L) - 1)
    tokens_L = torch.cat([prompt_L, verdict.bonus.reshape(1)])
    remaining = min(settings.max_new_tokens, base.context_length - len(prompt_L)) - 1
    return Context(tokens_L, read.states_ND, remaining, settings.nodes, settings.process_draft_logits)


def cut(tokens: tuple[int, ...], stop_token_ids: Collection[int]) -> tuple[int, ...]:
    """Tokens up to and including the first stop: what a draft said beyond it never counts."""
    for index, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: index + 1]
    return tokens
