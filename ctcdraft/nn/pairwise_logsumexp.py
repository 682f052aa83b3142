"""The log-normaliser of every frame behind every text, without a wall of logits. It knows no alignment and no loss.

With a correction (nn/correction.py) the score of word v is W_v h + b_v of a frame's state h plus O_v m of a text's
memory m, and log sum_v exp(score) is wanted for T x P pairs of them. As a product of two tables of exponentials that
takes T + P rows of logits, not T * P. O is learned, so its gradient cannot be formed ahead of the loss's own, as
nn/projection.py does for a frozen head: the backward pass makes the logits again, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctcdraft.nn.linear_logsumexp import BLOCKS, LARGE_BLOCK, autocast_disabled, matmul_dtype, refuse_trainable

MatmulDtypes = tuple[torch.dtype, torch.dtype]  # what the head and the table are multiplied in


class PairwiseInputs(NamedTuple):
    """What scores words: frames' states through the frozen head, texts' memories through the learned table."""

    states_XTD: Tensor
    memories_XPR: Tensor
    table_VR: Tensor
    words_VD: Tensor
    bias_V: Tensor | None

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The type of sums."""
        return torch.promote_types(self.states_XTD.dtype, torch.float32)

    def windows(self) -> Iterator[slice]:
        """As many at a time as a block has rows for."""
        rows, _ = BLOCKS.get(self.words_VD.device.type, LARGE_BLOCK)
        size = max(1, rows // (self.states_XTD.shape[1] + self.memories_XPR.shape[1]))
        return (slice(start, start + size) for start in range(0, len(self.states_XTD), size))

    def of(self, windows: slice) -> PairwiseInputs:
        return self._replace(states_XTD=self.states_XTD[windows], memories_XPR=self.memories_XPR[windows])

    def blocks(self, halves: MatmulDtypes) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some words at a time: which, and their logits of frames [X, T, V] and of texts [X, P, V], to overwrite."""
        head, table = halves
        states_XTD, memories_XPR = self.states_XTD.to(head), self.memories_XPR.to(table)
        _, size = BLOCKS.get(self.words_VD.device.type, LARGE_BLOCK)
        for start in range(0, len(self.words_VD), size):
            block = slice(start, start + size)
            bias_V = None if self.bias_V is None else self.bias_V[block].to(head)
            frame_logits_XTV = F.linear(states_XTD, self.words_VD[block].to(head), bias_V)
            prefix_logits_XPV = F.linear(memories_XPR, self.table_VR[block].to(table))
            yield block, frame_logits_XTV.to(self.accumulate_dtype), prefix_logits_XPV.to(self.accumulate_dtype)


class ScaledSums(NamedTuple):
    """total_XTP of exponentials whose logits were lowered by the greatest of their frame and of their text, so that
    none overflows. Where these two disagree by more than numbers span, the smallest number stands for zero."""

    total_XTP: Tensor
    most_XT1: Tensor
    most_XP1: Tensor

    def of(self, windows: slice) -> ScaledSums:
        return ScaledSums(*(one[windows] for one in self))


class PairwiseLogSumExp(torch.autograd.Function):
    """normaliser_XTP of `paired_normaliser`; the gradient goes to states, memories and table."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        scorers = PairwiseInputs(*given)
        ctx.halves = matmul_dtype(scorers.words_VD), matmul_dtype(scorers.table_VR)
        with autocast_disabled(scorers.words_VD.device):
            parts = [accumulate_sums(scorers.of(windows), ctx.halves) for windows in scorers.windows()]
        sums = ScaledSums(*map(torch.cat, zip(*parts, strict=True)))
        ctx.save_for_backward(*scorers, *sums)
        return sums.total_XTP.log() + sums.most_XT1 + sums.most_XP1.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, normaliser_XTP: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Of the incoming gradient, named after what it belongs to."""
        saved = ctx.saved_tensors
        scorers, sums = (
            PairwiseInputs(*saved[: len(PairwiseInputs._fields)]),
            ScaledSums(*saved[len(PairwiseInputs._fields) :]),
        )
        smallest = torch.finfo(sums.total_XTP.dtype).tiny  # it stands for zero, of which no word has a share
        shares_XTP = torch.where(sums.total_XTP > smallest, normaliser_XTP / sums.total_XTP, 0)
        table_VR = torch.zeros_like(scorers.table_VR, dtype=shares_XTP.dtype)
        with autocast_disabled(scorers.words_VD.device):
            moved = [
                pairwise_gradients(scorers.of(windows), ctx.halves, sums.of(windows), shares_XTP[windows], table_VR)
                for windows in scorers.windows()
            ]
        states_XTD, memories_XPR = map(torch.cat, zip(*moved, strict=True))
        learned = (states_XTD, scorers.states_XTD), (memories_XPR, scorers.memories_XPR), (table_VR, scorers.table_VR)
        states_XTD, memories_XPR, table_VR = (gradient.to(of.dtype) for gradient, of in learned)
        return states_XTD, memories_XPR, table_VR, None, None


def pairwise_logsumexp(
    states_XTD: Tensor, memories_XPR: Tensor, table_VR: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None
) -> Tensor:
    """log sum_v exp(W_v h_t + b_v + O_v m_p) over the words, [X, T, P], float32 (float64 for float64 states)."""
    refuse_trainable(lm_head_VD)
    normaliser_XTP: Tensor = PairwiseLogSumExp.apply(states_XTD, memories_XPR, table_VR, lm_head_VD, bias_V)
    return normaliser_XTP


def accumulate_sums(scorers: PairwiseInputs, halves: MatmulDtypes) -> ScaledSums:
    """Lowered anew whenever a greater logit turns up."""
    accumulate_dtype, (windows, frames, _), prefixes = (
        scorers.accumulate_dtype,
        scorers.states_XTD.shape,
        scorers.memories_XPR.shape[1],
    )
    total_XTP = scorers.states_XTD.new_zeros(windows, frames, prefixes, dtype=accumulate_dtype)
    most_XT1 = total_XTP.new_full((windows, frames, 1), torch.finfo(accumulate_dtype).min)
    most_XP1 = total_XTP.new_full((windows, prefixes, 1), torch.finfo(accumulate_dtype).min)
    for _, frame_logits_XTV, prefix_logits_XPV in scorers.blocks(halves):
        before_XT1, most_XT1 = most_XT1, torch.maximum(most_XT1, frame_logits_XTV.amax(dim=-1, keepdim=True))
        before_XP1, most_XP1 = most_XP1, torch.maximum(most_XP1, prefix_logits_XPV.amax(dim=-1, keepdim=True))
        total_XTP.mul_((before_XT1 - most_XT1).exp_()).mul_((before_XP1 - most_XP1).exp_().mT)
        total_XTP.baddbmm_(frame_logits_XTV.sub_(most_XT1).exp_(), prefix_logits_XPV.sub_(most_XP1).exp_().mT)
    return ScaledSums(total_XTP.clamp_(min=torch.finfo(accumulate_dtype).tiny), most_XT1, most_XP1)


def pairwise_gradients(
    scorers: PairwiseInputs, halves: MatmulDtypes, sums: ScaledSums, shares_XTP: Tensor, table_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the states and of the memories; that of the table is added to table_VR. shares_XTP: what one
    exponential of a pair is worth."""
    states_XTD = torch.zeros_like(scorers.states_XTD, dtype=scorers.accumulate_dtype)
    memories_XPR = torch.zeros_like(scorers.memories_XPR, dtype=scorers.accumulate_dtype)
    for block, frame_logits_XTV, prefix_logits_XPV in scorers.blocks(halves):
        frame_logits_XTV.sub_(sums.most_XT1).exp_()
        prefix_logits_XPV.sub_(sums.most_XP1).exp_()
        by_frame_XTV = (shares_XTP @ prefix_logits_XPV).mul_(frame_logits_XTV)
        by_text_XPV = (shares_XTP.mT @ frame_logits_XTV).mul_(prefix_logits_XPV)
        states_XTD += (by_frame_XTV.to(halves[0]) @ scorers.words_VD[block].to(halves[0])).to(scorers.accumulate_dtype)
        memories_XPR += by_text_XPV @ scorers.table_VR[block].to(scorers.accumulate_dtype)
        table_VR[block] += by_text_XPV.flatten(0, 1).T @ scorers.memories_XPR.flatten(0, 1).to(scorers.accumulate_dtype)
    return states_XTD, memories_XPR
