"""Decoding settings, and the records of a response: what each step committed, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ctcdraft.decoding.sampling import warp
from ctcdraft.decoding.verification import Verifier, plain_function
from ctcdraft.errors import check_float, check_int, check_temperature

LogitsProcessor = Callable[[Tensor], Tensor]  # logits_NV -> log-probabilities_NV


@dataclass(frozen=True)
class DecodingSettings:
    """How to decode; the same for every method that is compared."""

    max_new_tokens: int  # length limit of a response
    nodes: int  # limit of a tree's nodes, the root counted: 1 is autoregression
    temperature: float  # this and the next two: see `warp`
    top_k: int
    top_p: float
    verify: Verifier
    lossless: bool  # the output follows the base model's distribution
    token_for_token: bool = True  # the output equals that of autoregression even where draft tokens were sampled

    def __post_init__(self) -> None:
        # For callers from Python, as the schema checks configs; and nodes=auto, which evaluate.py alone resolves.
        check_int(self.max_new_tokens, "decoding.max_new_tokens")
        check_int(self.nodes, "decoding.nodes")
        check_int(self.top_k, "decoding.top_k", least=0)
        check_temperature(self.temperature, "decoding.temperature")
        check_float(self.top_p, "decoding.top_p", above=0, most=1)
        object.__setattr__(self, "verify", plain_function(self.verify))

    def owes_token_identity(self, sampled: bool) -> bool:
        """Return whether a response must equal autoregression's token for token, not only in distribution.

        sampled: whether its draft tokens were sampled.
        """
        exact = self.temperature == 0 and getattr(self.verify, "exact_when_greedy", True)
        return exact or self.token_for_token or (self.lossless and not sampled)

    def process_logits(self, logits_NV: Tensor) -> Tensor:
        """Return what verifiers read: log-probabilities_NV after temperature, top-k and top-p.

        At temperature 0 these are the logits themselves: of a one-hot distribution only the argmax matters, and
        writing -inf for all other tokens would cost more than the rest of the verification.
        """
        return logits_NV if self.temperature == 0 else self.process_draft_logits(logits_NV)

    # A method of its own so that the profiler can count its time as drafting.
    def process_draft_logits(self, logits_NV: Tensor) -> Tensor:
        """Return log-probabilities_NV of a draft's logits, warped alike, one-hot at temperature 0."""
        return warp(logits_NV, self.temperature, self.top_k, self.top_p)


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
