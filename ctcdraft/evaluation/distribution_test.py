"""Goodness-of-fit test of sampled answers: do the tokens follow the base model's distribution?

For answers that promise the base model's distribution and not autoregression's tokens. Lay out the tokens of the
vocabulary as adjacent intervals in [0, 1), as long as the base model's probabilities, in an order that is fixed before
the token is sampled, and take a uniform random point in the interval of the sampled token (probability integral
transform, PIT). If tokens follow the base model's distribution, given any text before them, these points are uniform
and independent (Rosenblatt 1952). Counted in equal cells they give a chi-square test whose counts add up over
questions and shards.

The order decides which errors are visible. By falling base probability: a draft that proposes its best token and
claims to have sampled it. By q / p, draft over base probability: a verifier that accepts too many or too few draft
tokens, whichever they are.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Drafter, generate
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.models.base_model import BaseLM

HISTOGRAM_CELLS = 20
MIN_TOKENS_FOR_P_VALUE = 100  # five per cell: below, the chi-square distribution is a poor approximation
CHUNK_ROWS = 64  # hidden states to logits at once: a long answer over a large vocabulary would take gigabytes


def pit_histogram(
    base: BaseLM,
    prompt_L: Tensor,
    tokens: Sequence[int],
    settings: DecodingSettings,
    seed: int,
    drafts: Mapping[int, Tensor],
) -> PITHistogram:
    """Return the PIT histogram of one answer. drafts: see `draft_distributions`."""
    tokens_A = torch.tensor(tokens, device=base.device)
    text_L = torch.cat([prompt_L, tokens_A])[:-1]
    states_AD = base.hidden_states(text_L[None], torch.ones_like(text_L)[None])[0, len(prompt_L) - 1 :]
    rng, histogram, offset = random.Random(f"{seed} marks"), PITHistogram.empty(), 0
    for rows_RD, tokens_R in zip(states_AD.split(CHUNK_ROWS), tokens_A.split(CHUNK_ROWS), strict=True):
        # With auxiliary hidden-state layers the last layer's states come first; the lm_head reads only those.
        probs_RV = settings.process_logits(base.head(rows_RD[:, : base.width])).double().exp()
        drafted_rows = [row for row in range(len(tokens_R)) if offset + row in drafts]
        by_base, by_draft = count_pit_values(probs_RV, tokens_R, probs_RV, rng), [0] * HISTOGRAM_CELLS
        if drafted_rows:
            draft_RV = torch.stack([drafts[offset + row] for row in drafted_rows]).to(base.device).double()
            probs_RV, tokens_R = probs_RV[drafted_rows], tokens_R[drafted_rows]
            by_draft = count_pit_values(probs_RV, tokens_R, draft_base_ratio(draft_RV, probs_RV), rng)
        histogram += PITHistogram(by_base, by_draft)
        offset += len(rows_RD)
    return histogram


def count_pit_values(probs_RV: Tensor, tokens_R: Tensor, keys_RV: Tensor, rng: random.Random) -> list[int]:
    """Return the number of PIT values of tokens_R in each cell; intervals are ordered by falling key."""
    counts = [0] * HISTOGRAM_CELLS
    before_R, own_R = pit_interval(probs_RV, tokens_R, keys_RV)
    for before, own in zip(before_R.tolist(), own_R.tolist(), strict=True):
        counts[min(int((before + rng.random() * own) * HISTOGRAM_CELLS), HISTOGRAM_CELLS - 1)] += 1
    return counts


def pit_interval(probs_RV: Tensor, tokens_R: Tensor, keys_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each token's interval begins, and its length; tokens of equal key are ordered by id.

    0.2 0.5 0.3, token 0, by falling probability   ->   begins at 0.8 and is 0.2 long
    """
    tokens_R1 = tokens_R[:, None]
    key_R1 = keys_RV.gather(1, tokens_R1)
    ids_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    first_RV = (keys_RV > key_R1) | ((keys_RV == key_R1) & (ids_V < tokens_R1))
    return (probs_RV * first_RV).sum(1), probs_RV.gather(1, tokens_R1)[:, 0]


def draft_base_ratio(draft_RV: Tensor, probs_RV: Tensor) -> Tensor:
    """Return q / p, draft over base probability; infinite where the base probability is 0."""
    return torch.where(probs_RV > 0, draft_RV / probs_RV, torch.inf)


def draft_distributions(
    base: Any, drafter: Drafter, prompt_L: Tensor, settings: DecodingSettings, seed: int, tokens: Sequence[int]
) -> dict[int, Tensor]:
    """Return the distribution over V that each draft token of an answer was sampled from, by index in the answer.

    The answer is decoded once more with the same seed, untimed: recording synchronises with the device at every node.
    """
    distributions: dict[int, Tensor] = {}

    def verify(tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int) -> VerifyResult:
        result = settings.verify(tree, log_probs_NV, noise, root_position)
        if tree.draft_probs_NV is not None:
            first = root_position + 1 - len(prompt_L)
            for index, node in enumerate(result.path_K[: int(result.length)].tolist(), first):
                probs_V = tree.draft_probs_NV[node]
                if probs_V.sum() > 0:  # else nothing was sampled below this node
                    distributions[index] = probs_V.float().cpu()
        return result

    repeated = generate(base, drafter, prompt_L, replace(settings, verify=verify), base.stop_token_ids, seed)
    # If the device rounds differently the second time, distributions after the first different token are of another
    # text. Those up to it depend only on the text before their token, so their PIT values remain uniform.
    pairs = enumerate(zip(tokens, repeated.tokens, strict=False))
    last = next((index for index, (token, again) in pairs if token != again), len(tokens) - 1)
    return {index: probs_V for index, probs_V in distributions.items() if index <= last}


@dataclass(frozen=True)
class PITHistogram:
    """Number of tokens in each cell, for each of the two orders; `by_draft` counts only tokens with a sampled draft."""

    by_base: list[int]
    by_draft: list[int]

    @classmethod
    def empty(cls) -> Self:
        return cls([0] * HISTOGRAM_CELLS, [0] * HISTOGRAM_CELLS)

    def __add__(self, other: PITHistogram) -> PITHistogram:
        by_base = [sum(cell) for cell in zip(self.by_base, other.by_base, strict=True)]
        return PITHistogram(by_base, [sum(cell) for cell in zip(self.by_draft, other.by_draft, strict=True)])


@dataclass(frozen=True)
class ChiSquareFit:
    """Fit of counts to a uniform distribution: chi-square, its p-value (None for too few tokens), total variation."""

    tokens: int
    chi_square: float
    p_value: float | None
    tv: float

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Self | None:
        """Return the fit of these counts, or None if all are 0.

        30 10 of two cells   ->   chi-square 10^2/20 + 10^2/20 = 10, tv 1/4
        """
        tokens = sum(counts)
        if not tokens:
            return None
        expected = tokens / len(counts)
        chi_square = sum((count - expected) ** 2 / expected for count in counts)
        half = torch.tensor([(len(counts) - 1) / 2, chi_square / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(*half)) if tokens >= MIN_TOKENS_FOR_P_VALUE else None
        return cls(tokens, chi_square, p_value, sum(abs(count - expected) for count in counts) / tokens / 2)
