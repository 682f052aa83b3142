"""Frames that listen: what they say once a text has been said. It knows a correction, not how paths are searched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from ctcdraft.nn.correction import Correction

# Scores so large that they leave float32 would rank words as certain or impossible, which they then are.
REACH = (-80, 80)


@dataclass(frozen=True)
class Listening:
    """One draft's frames and K texts after its root, all that a correction needs of them.

    The law: a frame's words get the correction's scores for the text collapsed from the frames before it, the
    blank's score stays, and the frame is normalised anew over all classes:

        p_t(w | text) = p_t(w) exp(c_text(w)) / Z_t(text)        p_t(blank | text) = p_t(blank) / Z_t(text)

    A frame that repeats the text's last word is no exception: that word has been said, so it is part of the text.
    log_probs_TC: the uncorrected frames, the blank last. probs_TV: their words' probabilities.
    """

    log_probs_TC: Tensor
    probs_TV: Tensor
    correction: Correction
    memory_KR: Tensor

    @classmethod
    def begin(cls, log_probs_TC: Tensor, correction: Correction, memory_1R: Tensor) -> Self:
        """The empty text."""
        return cls(log_probs_TC, log_probs_TC[:, :-1].exp(), correction, memory_1R)

    def say(self, words_K: Tensor, rows_K: Tensor) -> Self:
        """The texts of these rows (of the present ones), each with one word more."""
        return replace(self, memory_KR=self.correction.step(self.memory_KR[rows_K], words_K))

    def among(self, words_W: Tensor) -> Few:
        """The same texts, asked about these words alone."""
        # Summed up, for 1 - the sum of these words is rounding alone where frames are sure of one.
        others_T = self.probs_TV.index_fill(1, words_W, 0).sum(1) + self.log_probs_TC[:, -1].exp()
        table_WR = self.correction.out.weight[words_W]
        return Few(self.probs_TV[:, words_W], others_T, table_WR, self.correction, self.memory_KR)

    @cached_property
    def added_KV(self) -> Tensor:
        return self.correction(self.memory_KR).to(self.log_probs_TC.dtype)

    def shares(self) -> tuple[Tensor, Tensor]:
        """What the texts make of the frames: a factor_KV for the words and a scale_KT for all classes.

        p_t(w | text) = p_t(w) * factor * scale,   p_t(blank | text) = p_t(blank) * scale
        """
        factor_KV = self.added_KV.clamp(*REACH).exp()
        normaliser_KT = factor_KV @ self.probs_TV.T + self.log_probs_TC[:, -1].exp()
        return factor_KV, 1 / normaliser_KT

    def words(self, frame: int) -> Tensor:
        """Log-probabilities_KV of the words of one frame among themselves."""
        return (self.log_probs_TC[frame, :-1] + self.added_KV).log_softmax(dim=-1)

    def classes(self, frame: int) -> Tensor:
        """Scores_KC of one frame; not normalised, which makes no difference to their order."""
        blank_K1 = self.log_probs_TC[frame, -1:].expand(len(self.memory_KR), 1)
        return torch.cat([self.log_probs_TC[frame, :-1] + self.added_KV, blank_K1], dim=1)


@dataclass(frozen=True)
class Few:
    """Listening, for some words: a frame is normalised over these and what it gave to all others before it heard
    anything, others_T. table_WR: the correction's rows of these words."""

    probs_TW: Tensor
    others_T: Tensor
    table_WR: Tensor
    correction: Correction
    memory_KR: Tensor

    def say(self, words_K: Tensor, rows_K: Tensor) -> Self:
        return replace(self, memory_KR=self.correction.step(self.memory_KR[rows_K], words_K))

    def shares(self) -> tuple[Tensor, Tensor]:
        added_KW = (self.memory_KR @ self.table_WR.T).to(self.probs_TW.dtype)
        factor_KW = added_KW.clamp(*REACH).exp()
        return factor_KW, 1 / (factor_KW @ self.probs_TW.T + self.others_T)


@dataclass(frozen=True)
class Deaf:
    """K texts and frames that say the same behind all of them. like_KV, like_KT: the shares' shapes, all ones."""

    like_KV: Tensor
    like_KT: Tensor

    @classmethod
    def begin(cls, log_probs_TC: Tensor) -> Self:
        """The empty text."""
        return cls(torch.ones_like(log_probs_TC[:1, :-1]), torch.ones_like(log_probs_TC[None, :, 0]))

    def say(self, words_K: Tensor, rows_K: Tensor) -> Self:
        return type(self)(self.like_KV[rows_K], self.like_KT[rows_K])

    def among(self, words_W: Tensor) -> Self:
        return type(self)(self.like_KV[:, words_W], self.like_KT)

    def shares(self) -> tuple[Tensor, Tensor]:
        return self.like_KV, self.like_KT
