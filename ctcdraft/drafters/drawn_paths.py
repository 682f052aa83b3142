"""From frames to drawn chains: of labels, every alignment summed, or of the frames' own words. It knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ctcdraft.ctc.law import Labels
from ctcdraft.ctc.transitions import MERGING, Transitions
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.chance import Chance
from ctcdraft.drafters.direct import ByFrame
from ctcdraft.drafters.drawn import Asked, at_least_one, drawn_tree, shared
from ctcdraft.drafters.listening import Listening


class DrawnLabels:
    """Chains of labels from the exact CTC law: every alignment summed, and the end of the text a draw like others.

    chains: how many are drawn; each has its share of the nodes, and those that begin alike are merged.
    """

    reads = "alignments"
    samples_drafts = True
    topology: Transitions = MERGING

    def __init__(self, chains: int) -> None:
        self.chains = at_least_one(chains, "drafter.paths")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Chance,
        listening: Listening | None = None,
    ) -> TokenTree:
        chains, depth = shared(self.chains, min(depth, len(log_probs_TC)), nodes)
        blank = log_probs_TC.shape[-1] - 1
        if listening is None:
            sampler = Labels.empty(log_probs_TC.double().exp(), blank, chains, self.topology)
            return drawn_tree(root, sampler, chains, depth, stops, sampling)
        labels = Labels.empty(heard_frames(listening)[0], blank, chains, self.topology)
        return drawn_tree(root, Heard(labels, listening), chains, depth, stops, sampling)


@dataclass(frozen=True)
class Heard:
    """Labels whose frames listen to them: a correction composed with the exact law."""

    labels: Labels
    conditioned: Listening

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        return self.labels.next_distribution()

    def extend(self, tokens_K: Tensor) -> Self:
        rows_K = torch.arange(len(tokens_K), device=tokens_K.device)
        if len(self.conditioned.memory_KR) == 1:  # the empty text, which all chains begin from
            rows_K = torch.zeros_like(rows_K)
        conditioned = self.conditioned.extend(tokens_K, rows_K)
        return type(self)(self.labels.extend(tokens_K, heard_frames(conditioned)), conditioned)


def heard_frames(conditioned: Listening) -> Tensor:
    """What K texts make of the frames: probabilities_KTC, the blank last."""
    factor_KV, scale_KT = conditioned.factors()
    token_probs_KTV = conditioned.token_probs_TV * factor_KV[:, None] * scale_KT[..., None]
    blank_KT = conditioned.log_probs_TC[:, -1].exp() * scale_KT
    return torch.cat([token_probs_KTV, blank_KT[..., None]], dim=-1)


class DrawnWords:
    """Chains of the frames' own words, one a frame, for heads that are read directly."""

    reads = "words"
    samples_drafts = True

    def __init__(self, chains: int) -> None:
        self.chains = at_least_one(chains, "drafter.paths")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Chance,
        listening: Listening | None = None,
    ) -> TokenTree:
        chains, depth = shared(self.chains, min(depth, len(log_probs_TC)), nodes)
        sampler = Asked(ByFrame(log_probs_TC, listening), root, chains)
        return drawn_tree(root, sampler, chains, depth, stops, sampling)
