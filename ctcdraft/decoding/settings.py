"""The decoding loop. It knows trees and verdicts; it has never heard of CTC, training or text.

What the counts of passes say of depths. It knows neither text nor clock, nor whose passes they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import warp
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import Verifier
from ctcdraft.errors import InputError, check_float, check_int

if TYPE_CHECKING:
    from ctcdraft.decoding.loop import Context

LogitsProcessor = Callable[[Tensor], Tensor]  # logits_NV -> log-probabilities_NV


@dataclass(frozen=True)
class DecodingSettings:
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
        check_int(self.max_new_tokens, "decoding.max_new_tokens")
        check_int(self.nodes, "decoding.nodes")
        check_int(self.top_k, "decoding.top_k", least=0)
        check_float(self.temperature, "decoding.temperature")
        check_float(self.top_p, "decoding.top_p")
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


class Drafter(Protocol):
    """Whatever guesses. `memory` starts as None for every text; what a drafter must remember it hands back."""

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]: ...


@dataclass(frozen=True)
class DecodeStep:
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
class GenerationResult:
    """The answer's tokens, first EOS included, and how they came about. drawn: some guess was, not computed."""

    tokens: tuple[int, ...]
    passes: tuple[DecodeStep, ...]
    ended: bool
    seconds_prefill: float
    seconds_decode: float
    drawn: bool = False


def conditional_acceptance_rates(steps: Sequence[DecodeStep]) -> list[float | None]:
    """From depth 1: passes that accepted depth k / passes that accepted depth k - 1 and had a node below it; None where
    nobody had.

    Accepted 2, 0 (open), 0 (nothing below) of trees 2 deep   ->   [1/2, 1/1]
    """
    rates: list[float | None] = []
    for depth in range(1, max((step.drafted for step in steps), default=0) + 1):
        accepted = sum(step.accepted >= depth for step in steps)
        refused = sum(step.accepted == depth - 1 and step.rejected_child for step in steps)
        rates.append(accepted / (accepted + refused) if accepted + refused else None)
    return rates
