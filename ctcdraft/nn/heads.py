"""Heads from hidden states to token and blank logits, and emissions: the output of a drafter's training forward.

Emissions keep hidden states; objectives ask them for the few scores they need, so full logits_BATC never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ctcdraft.errors import InputError
from ctcdraft.nn.alignment_scores import AlignmentScores
from ctcdraft.nn.chunks import RealWindows, in_chunks
from ctcdraft.nn.compiled_step import compiled_logits
from ctcdraft.nn.draft_vocab import DraftVocabHead, head_rows, mask_absent_labels, restrict_rows
from ctcdraft.nn.frame_values import frame_values
from ctcdraft.nn.linear_logsumexp import (
    blank_logits,
    fused_linear_logsumexp,
    label_and_blank_log_probs,
    pairwise_logsumexp,
    token_logits,
)
from ctcdraft.nn.logit_correction import LogitCorrection


class TokenHead(nn.Module):
    """A head over tokens without a blank, computed in the lm_head's dtype."""

    def __init__(self, lm_head: Any) -> None:
        super().__init__()
        self.words: Any = lm_head  # a name in the state dicts of saved heads
        self.blank: int = lm_head.weight.shape[0]  # V, the class of the blank if there is one

    def of_frame(self, frame: int) -> Self:
        return self  # the same for all; see FrameHeads

    def forward(self, states_XD: Tensor) -> Tensor:
        return self.token_logits(states_XD)

    def token_logits(self, states_XD: Tensor) -> Tensor:
        """Return logits_XV. For hidden states of the base and the base's lm_head these are the base's own."""
        return self.words(states_XD.to(self.words.weight.dtype))


class BlankHead(TokenHead):
    """The base's frozen lm_head with one learned row and bias for class V, the blank.

    vocabulary: size of the draft vocabulary; None for all tokens of the base.
    """

    def __init__(self, lm_head: Any, width: int, vocabulary: int | None = None) -> None:
        super().__init__(lm_head if vocabulary is None else DraftVocabHead(lm_head, vocabulary))
        self.blank = lm_head.weight.shape[0]  # also with a draft vocabulary, so that class ids do not change
        self.blank_D = nn.Parameter(torch.randn(width) * 0.02)
        self.blank_bias = nn.Parameter(torch.zeros(1))  # not a scalar: DeepSpeed cannot broadcast one

    @property
    def dtype(self) -> torch.dtype:
        return self.blank_D.dtype

    def forward(self, states_XD: Tensor) -> Tensor:
        """Return logits_XC, C = V + 1. Token logits are computed in the base's dtype, the blank's in its own."""
        if (compiled_XC := compiled_logits(self, states_XD)) is not None:
            return compiled_XC
        if can_write_logits(self.words, states_XD):
            # V + 1 is seldom a multiple of 8, and cuBLAS takes four times as long for rows not aligned to 16 bytes.
            padded = -(-(self.blank + 1) // 8) * 8
            logits_XC = states_XD.new_empty(*states_XD.shape[:-1], padded)[..., : self.blank + 1]
            states_ND, logits_NC = states_XD.flatten(0, -2), logits_XC.flatten(0, -2)
            torch.mm(states_ND, self.words.weight.T, out=logits_NC[:, :-1])
            torch.addmv(self.blank_bias.expand(len(states_ND)), states_ND, self.blank_D, out=logits_NC[:, -1])
            return logits_XC
        blank_X = states_XD @ self.blank_D + self.blank_bias
        return torch.cat([self.token_logits(states_XD), blank_X[..., None]], dim=-1)


def can_write_logits(lm_head: Any, states_XD: Tensor) -> bool:
    """Return whether products may write a plain lm_head's logits where they belong, which saves two launches."""
    is_plain = type(lm_head) is nn.Linear and lm_head.bias is None and lm_head.weight.dtype == states_XD.dtype
    return is_plain and not states_XD.is_cpu and not torch.is_grad_enabled()


@dataclass(frozen=True)
class Emissions:
    """The frames of all anchors as hidden states, which are turned into scores on demand."""

    states_BATD: Tensor
    head: Any
    correction: LogitCorrection | None = None
    start_BAR: Any = None  # the correction's memory at the root
    kept_scores: list[Any] | None = None  # the last labels and their scores; None: they are not kept

    @property
    def blank(self) -> int:
        return self.head.blank

    def logits(self) -> Tensor:
        """Return the full, uncorrected logits_BATC: for decoding and tests only."""
        return self.head(self.states_BATD)

    def scores(self, labels_BAS: Tensor) -> AlignmentScores:
        """Return the scores of the labels in every frame (padding in labels_BAS is -1 and scored as class 0)."""
        if self.kept_scores and self.kept_scores[0] is labels_BAS:
            return self.kept_scores[1]
        real = RealWindows.of(labels_BAS)
        scores = self._select(real)._score_labels(real.select(labels_BAS)).restore(real)
        if self.kept_scores is not None:
            self.kept_scores[:] = labels_BAS, scores
        return scores

    def _select(self, real: RealWindows) -> Emissions:
        start_BAR = None if self.start_BAR is None else real.select(self.start_BAR)
        return replace(self, states_BATD=real.select(self.states_BATD), start_BAR=start_BAR)

    def _score_labels(self, labels_BAS: Tensor) -> AlignmentScores:
        if self.correction is not None:
            return self._corrected_scores(self.correction, labels_BAS)
        head, lm_head = self.head, self.head.words
        rows_XS, absent_XS = head_rows(lm_head, labels_BAS.flatten(0, 1))
        states_XTD, bias = self.states_BATD.flatten(0, 1), getattr(lm_head, "bias", None)
        label_XTS, blank_XT = label_and_blank_log_probs(
            states_XTD, lm_head.weight, bias, head.blank_D, head.blank_bias, rows_XS
        )
        label_BATS = mask_absent_labels(label_XTS, absent_XS).unflatten(0, labels_BAS.shape[:2])
        return AlignmentScores(label_BATS, label_BATS, blank_XT.unflatten(0, labels_BAS.shape[:2])[..., None])

    def label_log_probs(self, labels_BAS: Tensor) -> Tensor:
        """Return log-probability_BAS of label s in frame s given the labels before it, over tokens without blank."""
        lm_head = self.head.words
        if type(lm_head) not in (nn.Linear, DraftVocabHead) or lm_head.weight.requires_grad:
            return self.map_label_frames(partial(frame_values, gather_label_log_probs), labels_BAS)
        real = RealWindows.of(labels_BAS)
        return real.restore(self._select(real)._label_log_probs(real.select(labels_BAS)))

    def _label_log_probs(self, labels_BAS: Tensor) -> Tensor:
        """Return the same for an lm_head that is frozen, without logits of the size of the vocabulary."""
        lm_head = self.head.words
        states_Y1D = self.states_BATD[:, :, : labels_BAS.shape[2]].flatten(0, 2)[:, None]
        rows_Y1, absent_Y1 = head_rows(lm_head, labels_BAS.reshape(-1, 1))
        token_logits_Y11 = token_logits(states_Y1D, lm_head.weight, lm_head.bias, rows_Y1)
        if self.correction is None:
            normaliser_Y11 = fused_linear_logsumexp(states_Y1D, lm_head.weight, lm_head.bias)[..., None]
        else:  # a window is one label with its frame and its prefix: other pairs are not needed
            table = restrict_rows(lm_head, self.correction.out.weight)
            memories_BASR = self.correction.memories_along(self.start_BAR, labels_BAS)[:, :, :-1]
            memories_Y1R = self.correction.features(memories_BASR).flatten(0, 2)[:, None]
            token_logits_Y11 = token_logits_Y11 + token_logits(memories_Y1R, table, None, rows_Y1)
            normaliser_Y11 = pairwise_logsumexp(states_Y1D, memories_Y1R, table, lm_head.weight, lm_head.bias)
        return mask_absent_labels(token_logits_Y11 - normaliser_Y11, absent_Y1).view(labels_BAS.shape)

    def map_label_frames(self, measure: Callable[..., Tensor], labels_BAS: Tensor, *more_BA: Tensor) -> Tensor:
        """Return measure(logits_XSV, labels_XS, *more_X) of all windows X: for objectives with label s in frame s.

        logits_XSV: float32 logits of frame s over tokens without the blank, given the labels before it. measure returns
        one tensor_X, such as `frame_values` of its own measure. Windows without labels may be left out, and have zeros.
        """
        real = RealWindows.of(labels_BAS)
        labels_1XS, correction = real.select(labels_BAS), self.correction
        states_1XSD, start_BAR = real.select(self.states_BATD[:, :, : labels_BAS.shape[2]]), self.start_BAR
        memories: tuple[Tensor, ...] = ()
        if correction is not None:
            memories = (correction.memories_along(real.select(start_BAR), labels_1XS)[:, :, :-1],)

        def measure_chunk(states_XSD: Tensor, labels_XS: Tensor, *more_X: Tensor) -> Tensor:
            logits_XSV = self.head.token_logits(states_XSD).float()
            if correction is not None:
                logits_XSV = logits_XSV + correction(more_X[0]).float()
            return measure(logits_XSV, labels_XS, *more_X[len(memories) :])

        # Twice, because gradients, or logits of a teacher, are as many numbers again.
        size = 4 * 2 * labels_BAS.shape[2] * (self.blank + 1)
        more_1X = map(real.select, more_BA)
        return real.restore(in_chunks(measure_chunk, size, states_1XSD, labels_1XS, *memories, *more_1X))

    def _corrected_scores(self, correction: LogitCorrection, labels_BAS: Tensor) -> AlignmentScores:
        """Return scores of label-conditioned frames, whose normaliser depends on the number of labels before them."""
        lm_head_weight, bias = self.head.words.weight, getattr(self.head.words, "bias", None)
        table = restrict_rows(self.head.words, correction.out.weight)
        states_XTD = self.states_BATD.flatten(0, 1)
        memories_BAPR = correction.memories_along(self.start_BAR, labels_BAS)
        memories_XPR = memories_BAPR.flatten(0, 1)
        rows_XS, absent_XS = head_rows(self.head.words, labels_BAS.flatten(0, 1))
        logsumexp_XTP = pairwise_logsumexp(states_XTD, memories_XPR, table, lm_head_weight, bias)
        blank_XT = blank_logits(states_XTD, self.head.blank_D, self.head.blank_bias)
        normaliser_XTP = torch.logaddexp(logsumexp_XTP, blank_XT[..., None])
        label_XTS = token_logits(states_XTD, lm_head_weight, bias, rows_XS)
        added_XPS = token_logits(memories_XPR, table, None, rows_XS)
        # Label s begins after s labels and repeats after s + 1, so its own correction is on these two diagonals.
        before_X1S = added_XPS.diagonal(dim1=-2, dim2=-1)[:, None]
        after_X1S = added_XPS.diagonal(-1, dim1=-2, dim2=-1)[:, None]
        scores = (
            mask_absent_labels(label_XTS + before_X1S - normaliser_XTP[..., :-1], absent_XS),
            mask_absent_labels(label_XTS + after_X1S - normaliser_XTP[..., 1:], absent_XS),
            blank_XT[..., None] - normaliser_XTP,
        )
        label_BATS, hold_BATS, blank_BATP = (score.unflatten(0, labels_BAS.shape[:2]) for score in scores)
        return AlignmentScores(label_BATS, hold_BATS, blank_BATP, memories_BAPR)


def gather_label_log_probs(log_probs_XSV: Tensor, labels_XS: Tensor) -> Tensor:
    """Return the labels' own log-probabilities: a measure for `frame_values`."""
    return log_probs_XSV.gather(-1, labels_XS.clamp(min=0)[..., None])[..., 0]


@dataclass(frozen=True)
class TokenEmissions(Emissions):
    """Emissions without a blank; those of a sequential drafter are given the root and the true tokens before.

    `head` is the base's, for distillation from the base's hidden states.
    """

    own: Any = None  # the head that these hidden states belong to

    def logits(self) -> Tensor:
        return self.own(self.states_BATD)

    def scores(self, labels_BAS: Tensor) -> NoReturn:
        raise InputError(
            "this objective aligns labels with frames and blanks, but the frames of this drafter have no blank; use "
            "objective=cross_entropy or distill (for drafter=eagle eagle or eagle_ctc), or a drafter with "
            "drafter.own_heads=false"
        )

    def label_log_probs(self, labels_BAS: Tensor) -> Tensor:
        return self._of_own().label_log_probs(labels_BAS)

    def map_label_frames(self, measure: Callable[..., Tensor], labels_BAS: Tensor, *more_BA: Tensor) -> Tensor:
        return self._of_own().map_label_frames(measure, labels_BAS, *more_BA)

    def _of_own(self) -> Emissions:
        return Emissions(self.states_BATD, self.own, self.correction, self.start_BAR)
