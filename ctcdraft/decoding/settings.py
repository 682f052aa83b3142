"""What the decoding loop takes and returns: settings, the context of a draft, the drafter interface, step counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import unwarped_log_probs, warp
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import Verifier
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.renamed import CONTEXT_MEMBERS

LogitsProcessor = Callable[[Tensor], Tensor]  # logits_NV -> log-probabilities_NV


@dataclass(frozen=True)
class DecodingSettings:
    """How to decode; the same for every method that is compared.

    Args:
        max_new_tokens: length limit of a response.
        nodes: node limit of a tree, the root counted (1 is autoregression).
        temperature, top_k, top_p: see `warp`.
        verify: the acceptance rule.
        lossless: the output follows the base model's distribution.
        token_for_token: the output equals that of autoregression even where draft tokens were sampled.
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
        check_int(self.max_new_tokens, "decoding.max_new_tokens")
        check_int(self.nodes, "decoding.nodes")
        check_int(self.top_k, "decoding.top_k", least=0)
        check_float(self.temperature, "decoding.temperature")
        check_float(self.top_p, "decoding.top_p")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise InputError(
                f"decoding.temperature must be >= 0 and decoding.top_p in (0, 1], got temperature={self.temperature} "
                f"and top_p={self.top_p}"
            )

    def owes_token_identity(self, sampled: bool) -> bool:
        """Return whether a response must equal autoregression's token for token, not only in distribution.

        sampled: whether its draft tokens were sampled.
        """
        return self.temperature == 0 or self.token_for_token or (self.lossless and not sampled)

    def process_logits(self, logits_NV: Tensor) -> Tensor:
        """Return what verifiers read: log-probabilities_NV after temperature, top-k and top-p.

        At temperature 0 these are the logits themselves: of a one-hot distribution only the argmax matters, and
        writing -inf for all other tokens would cost more than the rest of the verification.
        """
        return logits_NV if self.temperature == 0 else self.process_draft_logits(logits_NV)

    def process_draft_logits(self, logits_NV: Tensor) -> Tensor:
        """Return log-probabilities_NV of a draft's logits, warped alike, one-hot at temperature 0.

        A method of its own so that the profiler can count its time as drafting.
        """
        return warp(logits_NV, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Context:
    """All inputs of a draft.

    Args:
        tokens_L: all committed tokens; the last one is the root.
        new_states_KD: the base's hidden states since the last draft (for the first draft: of the whole prompt), the
            newest last. The newest is the state at the anchor, the token before the root.
        remaining_tokens: how many more tokens max_new_tokens and the base's context allow.
        nodes: node limit of the tree, the root counted.
        logits_processor: temperature, top-k and top-p of this decoding run.
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
        """The depth limit of the tree: the base adds a bonus token below the deepest draft token."""
        return min(self.remaining_tokens, self.nodes) - 1

    def __getattr__(self, name: str) -> Any:  # called for names that do not exist
        now = CONTEXT_MEMBERS.get(name)
        raise AttributeError(f"Context has no {name}" + (f"; it is called {now} now" if now else ""))

    def extend(self, path: AcceptedPath, states_ND: Tensor) -> Self:
        """Return the context after committing the path. states_ND: hidden states of all nodes of the tree."""
        tokens_L = torch.cat([self.tokens_L, path.tokens_K])
        new_states_KD = states_ND if len(states_ND) == 1 else states_ND[path.path_K]
        # Written out: `dataclasses.replace` would add a thousandth to a step of autoregression on a small base.
        remaining = self.remaining_tokens - len(path.tokens)
        return type(self)(tokens_L, new_states_KD, remaining, self.nodes, self.logits_processor)


class Drafter(Protocol):
    """A draft method. `memory` starts as None for every text; a drafter returns what it needs in the next step."""

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]: ...


@dataclass(frozen=True)
class DecodeStep:
    """Counts of one decoding step, that is of one forward pass of the base over a tree."""

    committed: int  # new tokens, after the cut at the first stop token
    accepted: int  # accepted draft tokens
    rejected_child: bool  # the last accepted node had a child and the text went on: a draft token was rejected
    nodes: int  # of the tree, the root counted
    drafted: int  # depth of the tree


@dataclass(frozen=True)
class GenerationResult:
    """A response and how it was decoded."""

    tokens: tuple[int, ...]  # up to and including the first stop token
    passes: tuple[DecodeStep, ...]
    ended: bool  # with a stop token
    seconds_prefill: float
    seconds_decode: float
    drawn: bool = False  # whether any draft tokens were sampled


def conditional_acceptance_rates(steps: Sequence[DecodeStep]) -> list[float | None]:
    """Return alpha[k] from depth k = 1: steps that accepted depth k / steps that could have.

    A step could have if it accepted depth k - 1 and had a node below that. None where no step could.

    Accepted 2, 0 (a child was rejected), 0 (no child) of trees of depth 2   ->   [1/2, 1/1]
    """
    rates: list[float | None] = []
    for depth in range(1, max((step.drafted for step in steps), default=0) + 1):
        accepted = sum(step.accepted >= depth for step in steps)
        rejected = sum(step.accepted == depth - 1 and step.rejected_child for step in steps)
        rates.append(accepted / (accepted + rejected) if accepted + rejected else None)
    return rates
