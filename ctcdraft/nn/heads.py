"""From states to words and blank. It knows which class is the blank; not what is learned from the frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20  # of logits alive at once while labels are scored


class BlankHead(nn.Module):
    """The base's frozen head with one learned row more: class V is the blank, so no word is stolen for it.

    The head starts with the base's own vocabulary; only the blank's row and bias are trained.
    """

    def __init__(self, words: nn.Module, width: int) -> None:
        super().__init__()
        self.words: Any = words
        self.blank_D = nn.Parameter(torch.randn(width) * 0.02)
        self.blank_bias = nn.Parameter(torch.zeros(()))

    @property
    def blank(self) -> int:
        """V, the index of the blank class."""
        return self.words.weight.shape[0]

    def forward(self, states_XD: Tensor) -> Tensor:
        """Logits_XC, C = V + 1. The words' part is computed in the base's dtype, the blank's in its own."""
        blank_X = states_XD @ self.blank_D + self.blank_bias
        words_XV = self.words(states_XD.to(self.words.weight.dtype))
        return torch.cat([words_XV, blank_X[..., None]], dim=-1)


@dataclass(frozen=True)
class Scores:
    """All an objective may ask of emissions; float32. Subtract log_normaliser to get log-probabilities."""

    label_BATS: Tensor
    blank_BAT: Tensor
    log_normaliser_BAT: Tensor


@dataclass(frozen=True)
class Emissions:
    """What every frame of every anchor says, kept as states until somebody asks for scores."""

    states_BATD: Tensor
    head: BlankHead

    @property
    def blank(self) -> int:
        return self.head.blank

    def logits(self) -> Tensor:
        """Logits_BATC, whole: for decoding and tests only."""
        return self.head(self.states_BATD)

    def scores(self, labels_BAS: Tensor) -> Scores:
        """Scores of the labels at every frame (free slots of labels_BAS are -1 and score class 0).

        A row of 256 anchors x 8 frames x 32,001 classes is 262 MB, so logits live one chunk at a time and
        are computed again in the backward pass; where one chunk holds them all they are simply kept.
        """
        batch, anchors, frames, _ = self.states_BATD.shape
        states_XTD = rearrange(self.states_BATD, "b a t d -> (b a) t d")
        labels_XS = rearrange(labels_BAS, "b a s -> (b a) s").clamp(min=0)
        size = max(1, CHUNK_BYTES // (4 * frames * (self.blank + 1)))
        chunks = list(zip(states_XTD.split(size), labels_XS.split(size), strict=True))
        if len(chunks) == 1:
            parts = [self._score(*chunks[0])]
        else:
            parts = [checkpoint(self._score, *chunk, use_reentrant=False) for chunk in chunks]
        shaped = (torch.cat(column).unflatten(0, (batch, anchors)) for column in zip(*parts, strict=True))
        return Scores(*shaped)

    def _score(self, states_XTD: Tensor, labels_XS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_XTC = self.head(states_XTD).float()
        label_XTS = logits_XTC.gather(-1, labels_XS[:, None, :].expand(-1, states_XTD.shape[1], -1))
        return label_XTS, logits_XTC[..., -1], logits_XTC.logsumexp(dim=-1)
