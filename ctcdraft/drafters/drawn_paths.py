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
    draws = True
    transitions: Transitions = MERGING

    def __init__(self, chains: int) -> None:
        self.chains = at_least_one(chains, "drafter.paths")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        chance: Chance,
        listening: Listening | None = None,
    ) -> TokenTree:
        chains, depth = shared(self.chains, min(depth, len(log_probs_TC)), nodes)
        blank = log_probs_TC.shape[-1] - 1
        if listening is None:
            speech = Labels.none(log_probs_TC.double().exp(), blank, chains, self.transitions)
            return drawn_tree(root, speech, chains, depth, stops, chance)
        labels = Labels.none(heard_frames(listening)[0], blank, chains, self.transitions)
        return drawn_tree(root, Heard(labels, listening), chains, depth, stops, chance)


@dataclass(frozen=True)
class Heard:
    """Labels whose frames listen to them: a correction composed with the exact law."""

    labels: Labels
    listening: Listening

    def law(self) -> tuple[Tensor, Tensor]:
        return self.labels.law()

    def say(self, words_K: Tensor) -> Self:
        rows_K = torch.arange(len(words_K), device=words_K.device)
        if len(self.listening.memory_KR) == 1:  # the empty text, which all chains begin from
            rows_K = torch.zeros_like(rows_K)
        listening = self.listening.say(words_K, rows_K)
        return type(self)(self.labels.say(words_K, heard_frames(listening)), listening)


def heard_frames(listening: Listening) -> Tensor:
    """What K texts make of the frames: probabilities_KTC, the blank last."""
    factor_KV, scale_KT = listening.shares()
    words_KTV = listening.probs_TV * factor_KV[:, None] * scale_KT[..., None]
    blank_KT = listening.log_probs_TC[:, -1].exp() * scale_KT
    return torch.cat([words_KTV, blank_KT[..., None]], dim=-1)


class DrawnWords:
    """Chains of the frames' own words, one a frame, for heads that are read directly."""

    reads = "words"
    draws = True

    def __init__(self, chains: int) -> None:
        self.chains = at_least_one(chains, "drafter.paths")

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        chance: Chance,
        listening: Listening | None = None,
    ) -> TokenTree:
        chains, depth = shared(self.chains, min(depth, len(log_probs_TC)), nodes)
        speech = Asked(ByFrame(log_probs_TC, listening), root, chains)
        return drawn_tree(root, speech, chains, depth, stops, chance)
