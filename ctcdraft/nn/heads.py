"""From states to words and blank. It knows which class is the blank; not what is learned from the frames.

Words without a blank: what a drafter emits that is told the words before. It knows no alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ctcdraft.errors import InputError
from ctcdraft.nn.draft_vocab import DraftVocabHead, head_rows, mask_absent_labels, restrict_rows
from ctcdraft.nn.linear_logsumexp import blank_logits, fused_linear_logsumexp, label_and_blank_log_probs, token_logits
from ctcdraft.nn.logit_correction import LogitCorrection
from ctcdraft.nn.pairwise_logsumexp import pairwise_logsumexp

CHUNK_BYTES = 256 * 2**20  # of logits alive at once while labels are scored


class BlankHead(nn.Module):
    """The base's frozen head with one learned row more: class V is the blank, so no word is stolen for it.

    Only the blank's row and bias are trained. vocabulary: how many of the base's words it can say; None: all.
    """

    def __init__(self, words: Any, width: int, vocabulary: int | None = None) -> None:
        super().__init__()
        self.classes: int = words.weight.shape[0]
        self.words: Any = words if vocabulary is None else DraftVocabHead(words, vocabulary)
        self.blank_D = nn.Parameter(torch.randn(width) * 0.02)
        self.blank_bias = nn.Parameter(torch.zeros(1))  # no scalar: DeepSpeed cannot broadcast one

    @property
    def blank(self) -> int:
        """V, the index of the blank class."""
        return self.classes

    def forward(self, states_XD: Tensor) -> Tensor:
        """Logits_XC, C = V + 1. The words' part is computed in the base's dtype, the blank's in its own."""
        blank_X = states_XD @ self.blank_D + self.blank_bias
        return torch.cat([self.token_logits(states_XD), blank_X[..., None]], dim=-1)

    def token_logits(self, states_XD: Tensor) -> Tensor:
        """Logits_XV, computed in the base's dtype. For a state of the base itself these are the base's own."""
        return self.words(states_XD.to(self.words.weight.dtype))


@dataclass(frozen=True)
class AlignmentScores:
    """Log-probabilities over all C classes, float32: all that an objective which aligns may ask of emissions.

    label_BATS: of label s at frame t, where the s labels before it have been said. hold_BATS: of label s
    again, where it has just been said. blank_BATP: of the blank where p labels have been said, P = S + 1; or
    P = 1 where what has been said makes no difference, and then hold_BATS is label_BATS.
    """

    label_BATS: Tensor
    hold_BATS: Tensor
    blank_BATP: Tensor


@dataclass(frozen=True)
class Emissions:
    """What every frame of every anchor says, kept as states until somebody asks for scores."""

    states_BATD: Tensor
    head: BlankHead
    correction: LogitCorrection | None = None
    start_BAR: Any = None  # the correction's memory at the root

    @property
    def blank(self) -> int:
        return self.head.blank

    def logits(self) -> Tensor:
        """Logits_BATC, whole and uncorrected: for decoding and tests only."""
        return self.head(self.states_BATD)

    def memories(self, labels_BAS: Tensor) -> Tensor | None:
        """The correction's memories_BAPR behind the first 0 .. S labels; None without a correction."""
        return None if self.correction is None else self.correction.memories_along(self.start_BAR, labels_BAS)

    def scores(self, labels_BAS: Tensor) -> AlignmentScores:
        """Scores of the labels at every frame (free slots of labels_BAS are -1 and score class 0)."""
        if self.correction is None:
            label_BATS, blank_BAT = self._uncorrected_scores(labels_BAS)
            return AlignmentScores(label_BATS, label_BATS, blank_BAT[..., None])
        return AlignmentScores(*self._corrected_scores(self.correction, labels_BAS))

    def label_log_probs(self, labels_BAS: Tensor) -> Tensor:
        """Log-probability_BAS of label s at frame s, among the words alone, the labels before it having been said."""
        lm_head = self.head.words
        if type(lm_head) not in (nn.Linear, DraftVocabHead) or lm_head.weight.requires_grad:
            return self.map_label_frames(gather_label_log_probs, labels_BAS)
        states_Y1D = self.states_BATD[:, :, : labels_BAS.shape[2]].flatten(0, 2)[:, None]
        rows_Y1, absent_Y1 = head_rows(lm_head, labels_BAS.reshape(-1, 1))
        token_logits_Y11 = token_logits(states_Y1D, lm_head.weight, lm_head.bias, rows_Y1)
        if self.correction is None:
            normaliser_Y11 = fused_linear_logsumexp(states_Y1D, lm_head.weight, lm_head.bias)[..., None]
        else:
            table = restrict_rows(lm_head, self.correction.out.weight)
            memories_Y1R = self.correction.memories_along(self.start_BAR, labels_BAS)[:, :, :-1].flatten(0, 2)[:, None]
            token_logits_Y11 = token_logits_Y11 + token_logits(memories_Y1R, table, None, rows_Y1)
            normaliser_Y11 = pairwise_logsumexp(states_Y1D, memories_Y1R, table, lm_head.weight, lm_head.bias)
        return mask_absent_labels(token_logits_Y11 - normaliser_Y11, absent_Y1).view(labels_BAS.shape)

    def map_label_frames(self, measure: Callable[..., Tensor], labels_BAS: Tensor, *more_BA: Tensor) -> Tensor:
        """measure(words_XSV, labels_XS, *more_X) over all windows X: for objectives that say label s at frame s.

        log_probs_XSV: log-probabilities of frame s among the words alone, float32, where the labels before it have been
        said. measure returns one tensor_X.
        """
        labels = labels_BAS.shape[2]
        memories_BAPR = self.memories(labels_BAS)
        corrections = () if memories_BAPR is None else (memories_BAPR[:, :, :-1],)

        def measured(states_XSD: Tensor, labels_XS: Tensor, *more_X: Tensor) -> tuple[Tensor]:
            log_probs_XSV = self.head.token_logits(states_XSD).float()
            if self.correction is not None:
                log_probs_XSV = log_probs_XSV + self.correction(more_X[0]).float()
            return (measure(log_probs_XSV.log_softmax(dim=-1), labels_XS, *more_X[len(corrections) :]),)

        # As many logits again for what `more` may be turned into.
        columns = (self.states_BATD[:, :, :labels], labels_BAS, *corrections, *more_BA)
        return self._chunked(measured, 2 * labels, *columns)[0]

    def _chunked(self, score: Callable[..., tuple[Tensor, ...]], rows: int, *columns_BA: Tensor) -> list[Tensor]:
        """score(*columns_X) of all windows, with `rows` rows of logits a window, in chunks.

        A row of 256 anchors x 8 frames x 32,001 classes is 262 MB, so logits live one chunk at a time and
        are computed again in the backward pass; where one chunk holds them all they are simply kept.
        """
        batch, anchors = columns_BA[0].shape[:2]
        size = max(1, CHUNK_BYTES // (4 * rows * (self.blank + 1)))
        chunks = list(zip(*(rearrange(c, "b a ... -> (b a) ...").split(size) for c in columns_BA), strict=True))
        if len(chunks) == 1:
            parts = [score(*chunks[0])]
        else:
            parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        return [torch.cat(column).unflatten(0, (batch, anchors)) for column in zip(*parts, strict=True)]

    def _uncorrected_scores(self, labels_BAS: Tensor) -> tuple[Tensor, ...]:
        head, lm_head = self.head, self.head.words
        rows_XS, absent_XS = head_rows(lm_head, labels_BAS.flatten(0, 1))
        label_XTS, blank_XT = label_and_blank_log_probs(
            self.states_BATD.flatten(0, 1), lm_head.weight, getattr(lm_head, "bias", None), head.blank_D,
            head.blank_bias,
            rows_XS,
        )  # fmt: skip
        return tuple(
            score.unflatten(0, labels_BAS.shape[:2]) for score in (mask_absent_labels(label_XTS, absent_XS), blank_XT)
        )

    def _corrected_scores(self, correction: LogitCorrection, labels_BAS: Tensor) -> tuple[Tensor, ...]:
        """With a correction a frame's words depend on how many labels have been said before it."""
        lm_head_weight, bias = self.head.words.weight, getattr(self.head.words, "bias", None)
        table = restrict_rows(self.head.words, correction.out.weight)
        states_XTD = self.states_BATD.flatten(0, 1)
        memories_XPR = correction.memories_along(self.start_BAR, labels_BAS).flatten(0, 1)
        rows_XS, absent_XS = head_rows(self.head.words, labels_BAS.flatten(0, 1))
        logsumexp_XTP = pairwise_logsumexp(states_XTD, memories_XPR, table, lm_head_weight, bias)
        blank_XT = blank_logits(states_XTD, self.head.blank_D, self.head.blank_bias)
        normaliser_XTP = torch.logaddexp(logsumexp_XTP, blank_XT[..., None])
        label_XTS = token_logits(states_XTD, lm_head_weight, bias, rows_XS)
        added_XPS = token_logits(memories_XPR, table, None, rows_XS)
        before_X1S = added_XPS.diagonal(dim1=-2, dim2=-1)[:, None]
        after_X1S = added_XPS.diagonal(-1, dim1=-2, dim2=-1)[:, None]
        scores = (
            mask_absent_labels(label_XTS + before_X1S - normaliser_XTP[..., :-1], absent_XS),
            mask_absent_labels(label_XTS + after_X1S - normaliser_XTP[..., 1:], absent_XS),
            blank_XT[..., None] - normaliser_XTP,
        )
        return tuple(score.unflatten(0, labels_BAS.shape[:2]) for score in scores)


def gather_label_log_probs(log_probs_XSV: Tensor, labels_XS: Tensor) -> Tensor:
    """A measure for `map_label_frames`: the log-probability of the label itself."""
    return log_probs_XSV.gather(-1, labels_XS.clamp(min=0)[..., None])[..., 0]


class TokenHead(nn.Module):
    """A head over the words alone, computed in its own dtype."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words: Any = words

    @property
    def blank(self) -> int:
        """V: no class of this head, only the number of them."""
        return self.words.weight.shape[0]

    def forward(self, states_XD: Tensor) -> Tensor:
        return self.token_logits(states_XD)

    def token_logits(self, states_XD: Tensor) -> Tensor:
        """Logits_XV. For a state of the base itself, and the base's head, these are the base's own."""
        return self.words(states_XD.to(self.words.weight.dtype))


@dataclass(frozen=True)
class TokenEmissions(Emissions):
    """Frame t says word t, given the root and the true words before it: there is nothing to align.

    head: the base's, which the base's own states may be put through. own: the one these states belong to.
    """

    head: Any
    own: Any = None

    def logits(self) -> Tensor:
        """Logits_BATV."""
        return self.own(self.states_BATD)

    def scores(self, labels_BAS: Tensor) -> NoReturn:
        raise InputError(
            "this objective aligns labels with frames and blanks, but every frame of this drafter is told the words "
            "before it and has no blank; use objective=cross_entropy or distill, for drafter=eagle eagle or eagle_ctc"
        )

    def label_log_probs(self, labels_BAS: Tensor) -> Tensor:
        return Emissions(self.states_BATD, self.own).label_log_probs(labels_BAS)

    def map_label_frames(self, measure: Callable[..., Tensor], labels_BAS: Tensor, *more_BA: Tensor) -> Tensor:
        """As that of Emissions, by the head these states belong to."""
        return Emissions(self.states_BATD, self.own).map_label_frames(measure, labels_BAS, *more_BA)
