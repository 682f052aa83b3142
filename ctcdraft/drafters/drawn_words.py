"""Chains that are drawn word by word from a drafter's own laws: speculative sampling. It knows laws and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.drawn import drawn_tree
from ctcdraft.drafters.grow import Laws
from ctcdraft.errors import InputError


class DrawnWords:
    """For decoding=rejection: one chain as Leviathan and Chen draw it (2023), several as SpecInfer does.

    temperature: of the draft's laws; rejection is exact at any, and accepts most where it is the base's own.
    """

    def __init__(self, chains: int, temperature: float) -> None:
        if chains < 1 or temperature <= 0:
            raise InputError(
                f"drafter.growth.chains={chains} and temperature={temperature}: a drawn draft needs at least one chain "
                "and a temperature above 0"
            )
        self.chains = chains
        self.temperature = temperature

    def __call__(
        self, laws: Laws, root: Tensor, depth: int, nodes: int, stops: Sequence[int], rng: torch.Generator
    ) -> TokenTree:
        chains = max(min(self.chains, nodes - 1), 1)
        depth = min(depth, (nodes - 1) // chains)
        if depth < 1:
            return TokenTree.only_root(root)
        rows_K = torch.zeros(chains, dtype=torch.int64, device=root.device)
        first_1V = laws(root.reshape(1), rows_K[:1])
        speech = Spoken(laws, first_1V.expand(chains, -1), rows_K, self.temperature)
        return drawn_tree(root, speech, chains, depth, stops, rng)


@dataclass(frozen=True)
class Spoken:
    """K texts being said; a drafter of words never falls silent by itself. rows_K: of the last call, to go on from."""

    laws: Laws
    log_probs_KV: Tensor
    rows_K: Tensor
    temperature: float

    def law(self) -> tuple[Tensor, Tensor]:
        law_KV = (self.log_probs_KV.double() / self.temperature).softmax(dim=-1)
        return law_KV, law_KV.new_zeros(len(law_KV))

    def say(self, words_K: Tensor) -> Self:
        log_probs_KV = self.laws(words_K, self.rows_K)
        return type(self)(self.laws, log_probs_KV, torch.arange(len(words_K), device=words_K.device), self.temperature)
