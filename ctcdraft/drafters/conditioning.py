"""Label-conditioned frames: the frames of one anchor after K different draft prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from ctcdraft.nn.logit_correction import LogitCorrection

# exp of a correction outside this range overflows or vanishes in float32; such a token is certain or impossible anyway.
LOGIT_RANGE = (-80, 80)


@dataclass(frozen=True)
class ConditionedFrames:
    """The frames of one anchor, conditioned on K draft prefixes by a logit correction.

    The correction of a prefix is added to the token logits of every frame, the blank's logit stays, and the frame is
    normalised again over all classes:

        p_t(w | prefix) = p_t(w) exp(c_prefix(w)) / Z_t(prefix)        p_t(blank | prefix) = p_t(blank) / Z_t(prefix)

    This includes frames that repeat the last token of the prefix, because that token is part of the prefix.
    """

    log_probs_TC: Tensor  # without correction, the blank as last class
    token_probs_TV: Tensor  # the same as probabilities, kept because every level of a search multiplies them again
    blank_T: Tensor
    correction: LogitCorrection
    memory_KR: Tensor  # state of the correction after each prefix

    @classmethod
    def empty(cls, log_probs_TC: Tensor, correction: LogitCorrection, memory_1R: Tensor) -> Self:
        """Return the frames after the empty prefix."""
        return cls(log_probs_TC, log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].exp(), correction, memory_1R)

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        """Return the prefixes in these rows, each with one more token."""
        return replace(self, memory_KR=self.correction.step(self.memory_KR[rows_K], tokens_K))

    def concat(self, others: Self) -> Self:
        return replace(self, memory_KR=torch.cat([self.memory_KR, others.memory_KR]))

    @cached_property
    def correction_KV(self) -> Tensor:
        return self.correction(self.memory_KR).to(self.log_probs_TC.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return what the prefixes multiply the frames with: factor_KV of the tokens and scale_KT of all classes.

        p_t(w | prefix) = p_t(w) * factor * scale,   p_t(blank | prefix) = p_t(blank) * scale
        """
        factor_KV = self.correction_KV.clamp(*LOGIT_RANGE).exp_()
        normaliser_KT = (factor_KV @ self.token_probs_TV.T).add_(self.blank_T)
        return factor_KV, normaliser_KT.reciprocal_()

    def probs(self) -> Tensor:
        """Return the frames after every prefix: probabilities_KTC with the blank as last class."""
        factor_KV, scale_KT = self.factors()
        token_probs_KTV = self.token_probs_TV * factor_KV[:, None] * scale_KT[..., None]
        return torch.cat([token_probs_KTV, (self.blank_T * scale_KT)[..., None]], dim=-1)

    def token_log_probs(self, frame: int) -> Tensor:
        """Return log-probabilities_KV of one frame without its blank, normalised over the tokens."""
        return (self.log_probs_TC[frame, :-1] + self.correction_KV).log_softmax(dim=-1)

    def class_scores(self, frame: int) -> Tensor:
        """Return logits_KC of one frame, which rank the classes; they are not normalised."""
        blank_K1 = self.log_probs_TC[frame, -1:].expand(len(self.memory_KR), 1)
        return torch.cat([self.log_probs_TC[frame, :-1] + self.correction_KV, blank_K1], dim=1)


@dataclass(frozen=True)
class UnconditionedFrames:
    """The same interface for K prefixes that do not change the frames: all factors are one."""

    ones_KV: Tensor
    ones_KT: Tensor

    @classmethod
    def empty(cls, log_probs_TC: Tensor) -> Self:
        return cls(torch.ones_like(log_probs_TC[:1, :-1]), torch.ones_like(log_probs_TC[None, :, 0]))

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        return type(self)(self.ones_KV[rows_K], self.ones_KT[rows_K])

    def concat(self, others: Self) -> Self:
        return type(self)(torch.cat([self.ones_KV, others.ones_KV]), torch.cat([self.ones_KT, others.ones_KT]))

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.ones_KV, self.ones_KT
