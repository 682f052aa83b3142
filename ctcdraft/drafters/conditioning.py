"""Frames that listen: what they say once a text has been said. It knows a correction, not how paths are searched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from ctcdraft.nn.logit_correction import LogitCorrection

# Scores so large that they leave float32 would rank words as certain or impossible, which they then are.
LOGIT_RANGE = (-80, 80)


@dataclass(frozen=True)
class ConditionedFrames:
    """One draft's frames and K texts after its root, all that a correction needs of them.

    The law: a frame's words get the correction's scores for the text collapsed from the frames before it, the
    blank's score stays, and the frame is normalised anew over all classes:

        p_t(w | text) = p_t(w) exp(c_text(w)) / Z_t(text)        p_t(blank | text) = p_t(blank) / Z_t(text)

    A frame that repeats the text's last word is no exception: that word has been said, so it is part of the text.
    log_probs_TC: the uncorrected frames, the blank last. probs_TV, blank_T: what their words and their blanks are
    said with.
    """

    log_probs_TC: Tensor
    token_probs_TV: Tensor
    blank_T: Tensor
    correction: LogitCorrection
    memory_KR: Tensor

    @classmethod
    def empty(cls, log_probs_TC: Tensor, correction: LogitCorrection, memory_1R: Tensor) -> Self:
        """The empty text."""
        return cls(log_probs_TC, log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].exp(), correction, memory_1R)

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        """The texts of these rows (of the present ones), each with one word more."""
        return replace(self, memory_KR=self.correction.step(self.memory_KR[rows_K], tokens_K))

    def concat(self, others: Self) -> Self:
        """These texts, and behind them the others, which hear the same frames."""
        return replace(self, memory_KR=torch.cat([self.memory_KR, others.memory_KR]))

    @cached_property
    def correction_KV(self) -> Tensor:
        return self.correction(self.memory_KR).to(self.log_probs_TC.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """What the texts make of the frames: a factor_KV for the words and a scale_KT for all classes.

        p_t(w | text) = p_t(w) * factor * scale,   p_t(blank | text) = p_t(blank) * scale
        """
        factor_KV = self.correction_KV.clamp(*LOGIT_RANGE).exp_()
        normaliser_KT = (factor_KV @ self.token_probs_TV.T).add_(self.blank_T)
        return factor_KV, normaliser_KT.reciprocal_()

    def token_log_probs(self, frame: int) -> Tensor:
        """Log-probabilities_KV of the words of one frame among themselves."""
        return (self.log_probs_TC[frame, :-1] + self.correction_KV).log_softmax(dim=-1)

    def class_scores(self, frame: int) -> Tensor:
        """Scores_KC of one frame; not normalised, which makes no difference to their order."""
        blank_K1 = self.log_probs_TC[frame, -1:].expand(len(self.memory_KR), 1)
        return torch.cat([self.log_probs_TC[frame, :-1] + self.correction_KV, blank_K1], dim=1)


@dataclass(frozen=True)
class UnconditionedFrames:
    """K texts and frames that say the same behind all of them. like_KV, like_KT: the shares' shapes, all ones."""

    ones_KV: Tensor
    ones_KT: Tensor

    @classmethod
    def empty(cls, log_probs_TC: Tensor) -> Self:
        """The empty text."""
        return cls(torch.ones_like(log_probs_TC[:1, :-1]), torch.ones_like(log_probs_TC[None, :, 0]))

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        return type(self)(self.ones_KV[rows_K], self.ones_KT[rows_K])

    def concat(self, others: Self) -> Self:
        return type(self)(torch.cat([self.ones_KV, others.ones_KV]), torch.cat([self.ones_KT, others.ones_KT]))

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.ones_KV, self.ones_KT
