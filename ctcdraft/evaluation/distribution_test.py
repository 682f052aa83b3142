"""Has what was said the base's law? For answers that owe autoregression its law, not its words. It knows no clock.

Lay the base's words side by side as intervals as long as their probabilities, in an order that is settled before the
word is said, and mark a chance point in the interval of the word that was said. Where words are drawn from the base's
law, whatever the text before them, these marks are uniform between 0 and 1 and independent (Rosenblatt 1952): counted
in equal cells they make a chi-square test that adds up over questions and shards.

Which faults it sees is a matter of the order. The most probable word first: a draft that says its best word and claims
to have drawn it. By q / p, what the draft's law makes of a word over what the base's does: a verifier that keeps too
many or too few of the drawn words, whichever words these are (own coins, stops that are mixed up).

Counts in equal cells, and how well they fit them. It knows numbers, not what was counted (law.py does).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings, Drafter
from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.decoding.verification import Verifier
from ctcdraft.models.base_model import BaseLM

CHUNK_ROWS = 64  # read from states to laws at once: a long answer over a large vocabulary would be gigabytes


def pit_histogram(
    base: BaseLM,
    prompt_L: Tensor,
    tokens: Sequence[int],
    settings: DecodingSettings,
    seed: int,
    drafts: Mapping[int, Tensor],
) -> PITHistogram:
    """Of one answer, by the base's law behind the answer's own beginning. drafts: the draft's law_V, by the place in
    the answer of the word it was drawn for; see `draft_laws`."""
    tokens_A = torch.tensor(tokens, device=base.device)
    text_L = torch.cat([prompt_L, tokens_A])[:-1]
    states_AD = base.hidden_states(text_L[None], torch.ones_like(text_L)[None])[0, len(prompt_L) - 1 :]
    rng, found, offset = random.Random(f"{seed} marks"), PITHistogram.empty(), 0
    for rows_RD, tokens_R in zip(states_AD.split(CHUNK_ROWS), tokens_A.split(CHUNK_ROWS), strict=True):
        # Of several taps the last layer's states come first; the head reads those alone.
        probs_RV = settings.process_logits(base.head(rows_RD[:, : base.width])).double().exp()
        drafted_rows = [row for row in range(len(tokens_R)) if offset + row in drafts]
        found += PITHistogram(count_pit_values(probs_RV, tokens_R, probs_RV, rng), [0] * HISTOGRAM_CELLS)
        if drafted_rows:
            draft_RV = torch.stack([drafts[offset + row] for row in drafted_rows]).to(base.device).double()
            probs_RV, tokens_R = probs_RV[drafted_rows], tokens_R[drafted_rows]
            found += PITHistogram(
                [0] * HISTOGRAM_CELLS, count_pit_values(probs_RV, tokens_R, draft_base_ratio(draft_RV, probs_RV), rng)
            )
        offset += len(rows_RD)
    return found


def count_pit_values(probs_RV: Tensor, tokens_R: Tensor, keys_RV: Tensor, rng: random.Random) -> list[int]:
    """The marks of words_R in the laws probs_RV, laid out by falling key, in cells."""
    counts = [0] * HISTOGRAM_CELLS
    before_R, own_R = pit_interval(probs_RV, tokens_R, keys_RV)
    for before, own in zip(before_R.tolist(), own_R.tolist(), strict=True):
        counts[min(int((before + rng.random() * own) * HISTOGRAM_CELLS), HISTOGRAM_CELLS - 1)] += 1
    return counts


def pit_interval(probs_RV: Tensor, tokens_R: Tensor, keys_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Where each word's interval begins, and its length; words of equal key lie in the order of their ids.

    0.2 0.5 0.3, word 0, the most probable first   ->   begins at 0.8 and is 0.2 long
    """
    tokens_R1 = tokens_R[:, None]
    key_R1 = keys_RV.gather(1, tokens_R1)
    ids_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    first_RV = (keys_RV > key_R1) | ((keys_RV == key_R1) & (ids_V < tokens_R1))
    return (probs_RV * first_RV).sum(1), probs_RV.gather(1, tokens_R1)[:, 0]


def draft_base_ratio(draft_RV: Tensor, probs_RV: Tensor) -> Tensor:
    """q / p, what the draft makes of each word over what the base does; greatest where the base says it never."""
    return torch.where(probs_RV > 0, draft_RV / probs_RV, torch.inf)


@dataclass(frozen=True)
class RecordingVerifier:
    """A verifier that remembers which law each word it decided on was drawn from. For untimed passes only: it waits
    for the device at every node. laws: by the word's position in the text."""

    verify: Verifier
    distributions: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        verdict = self.verify(tree, log_probs_NV, noise, root_position)
        if tree.draft_probs_NV is not None:
            for depth, node in enumerate(verdict.path_K[: int(verdict.length)].tolist()):
                probs_V = tree.draft_probs_NV[node]
                if probs_V.sum() > 0:  # else nothing was drawn behind this node
                    self.distributions[root_position + 1 + depth] = probs_V.float().cpu()
        return verdict


def draft_distributions(
    base: Any, drafter: Drafter, prompt_L: Tensor, settings: DecodingSettings, seed: int, tokens: Sequence[int]
) -> dict[int, Tensor]:
    """The law_V that was drawn from before each word of an answer, by the word's place in it: said once more, which
    with one seed is the same. What comes before a word settles its law, so the marks stay uniform.

    Where a device rounds otherwise the second time, laws are known as far as the text before them is the same.
    """
    listener = RecordingVerifier(settings.verify)
    repeated = generate(base, drafter, prompt_L, replace(settings, verify=listener), base.stop_token_ids, seed)
    pairs = enumerate(zip(tokens, repeated.tokens, strict=False))
    last = next((place for place, (one, other) in pairs if one != other), len(tokens) - 1)
    distributions = {position - len(prompt_L): probs_V for position, probs_V in listener.distributions.items()}
    return {place: probs_V for place, probs_V in distributions.items() if place <= last}


HISTOGRAM_CELLS = 20
MIN_TOKENS_FOR_P_VALUE = (
    100  # marks that a p-value asks for: chi-square's law is a limit, good from about five expected in a cell
)


@dataclass(frozen=True)
class PITHistogram:
    """How many tokens fell into each cell, in each of the two orders. by_draft: of those tokens alone before which a
    draft's law stood."""

    by_base: list[int]
    by_draft: list[int]

    @classmethod
    def empty(cls) -> Self:
        return cls([0] * HISTOGRAM_CELLS, [0] * HISTOGRAM_CELLS)

    def __add__(self, other: PITHistogram) -> PITHistogram:
        return PITHistogram(add_counts([self.by_base, other.by_base]), add_counts([self.by_draft, other.by_draft]))


@dataclass(frozen=True)
class ChiSquareFit:
    """How well counts fit equal cells. p_value: the chance of a fit no better, None for too few tokens to tell; tv:
    total variation."""

    tokens: int
    chi_square: float
    p_value: float | None
    tv: float

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Self | None:
        """None where nothing was counted.

        30 10 of two cells   ->   chi-square 10^2/20 + 10^2/20 = 10, tv 1/4
        """
        tokens = sum(counts)
        if not tokens:
            return None
        expected = tokens / len(counts)
        chi_square = sum((count - expected) ** 2 / expected for count in counts)
        half = torch.tensor([(len(counts) - 1) / 2, chi_square / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(half[0], half[1])) if tokens >= MIN_TOKENS_FOR_P_VALUE else None
        return cls(tokens, chi_square, p_value, sum(abs(count - expected) for count in counts) / tokens / 2)


def add_counts(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(cell) for cell in zip(*columns, strict=True)]
