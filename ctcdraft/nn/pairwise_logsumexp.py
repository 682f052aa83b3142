"""The log-normaliser of every frame after every label prefix, without logits for all T x P pairs.

With a logit correction (nn/logit_correction.py) the score of token v is W_v h + b_v of a frame's hidden state h plus
O_v m of a prefix's memory m. log sum_v exp(score) is computed as a product of two tables of exponentials, which needs
T + P rows of logits instead of T * P. O is trained, so unlike in nn/linear_logsumexp.py the gradient cannot be computed
in the forward pass: the backward pass computes the logits again, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctcdraft.nn.linear_logsumexp import BLOCKS, LARGE_BLOCK, autocast_disabled, matmul_dtype, refuse_trainable

MatmulDtypes = tuple[torch.dtype, torch.dtype]  # in which products with the lm_head and with the table are computed


class PairwiseInputs(NamedTuple):
    """Hidden states of frames and the frozen lm_head; memories of prefixes and the trained table."""

    states_XTD: Tensor
    memories_XPR: Tensor
    table_VR: Tensor
    lm_head_VD: Tensor
    bias_V: Tensor | None

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.states_XTD.dtype, torch.float32)

    def chunks(self) -> Iterator[slice]:
        """Yield slices of X with as many rows of logits as a block has."""
        rows, _ = BLOCKS.get(self.lm_head_VD.device.type, LARGE_BLOCK)
        size = max(1, rows // (self.states_XTD.shape[1] + self.memories_XPR.shape[1]))
        return (slice(start, start + size) for start in range(0, len(self.states_XTD), size))

    def of(self, chunk: slice) -> PairwiseInputs:
        return self._replace(states_XTD=self.states_XTD[chunk], memories_XPR=self.memories_XPR[chunk])

    def blocks(self, dtypes: MatmulDtypes) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of tokens and their logits of frames [X, T, V] and of prefixes [X, P, V], to be overwritten."""
        head_dtype, table_dtype = dtypes
        states_XTD, memories_XPR = self.states_XTD.to(head_dtype), self.memories_XPR.to(table_dtype)
        _, size = BLOCKS.get(self.lm_head_VD.device.type, LARGE_BLOCK)
        for start in range(0, len(self.lm_head_VD), size):
            block = slice(start, start + size)
            bias_V = None if self.bias_V is None else self.bias_V[block].to(head_dtype)
            frame_logits_XTV = F.linear(states_XTD, self.lm_head_VD[block].to(head_dtype), bias_V)
            prefix_logits_XPV = F.linear(memories_XPR, self.table_VR[block].to(table_dtype))
            yield block, frame_logits_XTV.to(self.sum_dtype), prefix_logits_XPV.to(self.sum_dtype)


class ScaledSums(NamedTuple):
    """Sums of exponentials total_XTP, lowered by the largest logit of their frame and of their prefix against overflow.

    Where these maxima belong to different tokens and the sum underflows, the smallest number stands for zero.
    """

    total_XTP: Tensor
    max_XT1: Tensor
    max_XP1: Tensor

    def of(self, chunk: slice) -> ScaledSums:
        return ScaledSums(*(one[chunk] for one in self))


class PairwiseLogSumExp(torch.autograd.Function):
    """normaliser_XTP of `pairwise_logsumexp`, with gradients for states, memories and table."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        inputs = PairwiseInputs(*tensors)
        ctx.dtypes = matmul_dtype(inputs.lm_head_VD), matmul_dtype(inputs.table_VR)
        with autocast_disabled(inputs.lm_head_VD.device):
            parts = [accumulate_sums(inputs.of(chunk), ctx.dtypes) for chunk in inputs.chunks()]
        sums = ScaledSums(*map(torch.cat, zip(*parts, strict=True)))
        ctx.save_for_backward(*inputs, *sums)
        return sums.total_XTP.log() + sums.max_XT1 + sums.max_XP1.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XTP: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        count = len(PairwiseInputs._fields)
        inputs, sums = PairwiseInputs(*ctx.saved_tensors[:count]), ScaledSums(*ctx.saved_tensors[count:])
        smallest = torch.finfo(sums.total_XTP.dtype).tiny  # stands for zero, which no token has a share of
        shares_XTP = torch.where(sums.total_XTP > smallest, grad_XTP / sums.total_XTP, 0)
        table_grad_VR = torch.zeros_like(inputs.table_VR, dtype=shares_XTP.dtype)
        with autocast_disabled(inputs.lm_head_VD.device):
            parts = [
                pairwise_gradients(inputs.of(chunk), ctx.dtypes, sums.of(chunk), shares_XTP[chunk], table_grad_VR)
                for chunk in inputs.chunks()
            ]
        states_grad_XTD, memories_grad_XPR = map(torch.cat, zip(*parts, strict=True))
        gradients = zip((states_grad_XTD, memories_grad_XPR, table_grad_VR), inputs[:3], strict=True)
        return *(gradient.to(tensor.dtype) for gradient, tensor in gradients), None, None


def pairwise_logsumexp(
    states_XTD: Tensor, memories_XPR: Tensor, table_VR: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None
) -> Tensor:
    """Return log sum_v exp(W_v h_t + b_v + O_v m_p) over tokens, [X, T, P], float32 (float64 for float64 states)."""
    refuse_trainable(lm_head_VD)
    normaliser_XTP: Tensor = PairwiseLogSumExp.apply(states_XTD, memories_XPR, table_VR, lm_head_VD, bias_V)
    return normaliser_XTP


def accumulate_sums(inputs: PairwiseInputs, dtypes: MatmulDtypes) -> ScaledSums:
    """Return the sums over all tokens, rescaled whenever a larger logit turns up."""
    sum_dtype, (windows, frames, _) = inputs.sum_dtype, inputs.states_XTD.shape
    prefixes, lowest = inputs.memories_XPR.shape[1], torch.finfo(sum_dtype).min
    total_XTP = inputs.states_XTD.new_zeros(windows, frames, prefixes, dtype=sum_dtype)
    max_XT1 = total_XTP.new_full((windows, frames, 1), lowest)
    max_XP1 = total_XTP.new_full((windows, prefixes, 1), lowest)
    for _, frame_logits_XTV, prefix_logits_XPV in inputs.blocks(dtypes):
        before_XT1, max_XT1 = max_XT1, torch.maximum(max_XT1, frame_logits_XTV.amax(dim=-1, keepdim=True))
        before_XP1, max_XP1 = max_XP1, torch.maximum(max_XP1, prefix_logits_XPV.amax(dim=-1, keepdim=True))
        total_XTP.mul_((before_XT1 - max_XT1).exp_()).mul_((before_XP1 - max_XP1).exp_().mT)
        total_XTP.baddbmm_(frame_logits_XTV.sub_(max_XT1).exp_(), prefix_logits_XPV.sub_(max_XP1).exp_().mT)
    return ScaledSums(total_XTP.clamp_(min=torch.finfo(sum_dtype).tiny), max_XT1, max_XP1)


def pairwise_gradients(
    inputs: PairwiseInputs, dtypes: MatmulDtypes, sums: ScaledSums, shares_XTP: Tensor, table_grad_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of states and memories; add that of the table to table_grad_VR.

    shares_XTP: derivative of the loss by the sum of exponentials of a pair.
    """
    sum_dtype = inputs.sum_dtype
    states_grad_XTD = torch.zeros_like(inputs.states_XTD, dtype=sum_dtype)
    memories_grad_XPR = torch.zeros_like(inputs.memories_XPR, dtype=sum_dtype)
    for block, frame_logits_XTV, prefix_logits_XPV in inputs.blocks(dtypes):
        frame_logits_XTV.sub_(sums.max_XT1).exp_()
        prefix_logits_XPV.sub_(sums.max_XP1).exp_()
        by_frame_XTV = (shares_XTP @ prefix_logits_XPV).mul_(frame_logits_XTV)
        by_prefix_XPV = (shares_XTP.mT @ frame_logits_XTV).mul_(prefix_logits_XPV)
        states_grad_XTD += (by_frame_XTV.to(dtypes[0]) @ inputs.lm_head_VD[block].to(dtypes[0])).to(sum_dtype)
        memories_grad_XPR += by_prefix_XPV @ inputs.table_VR[block].to(sum_dtype)
        table_grad_VR[block] += by_prefix_XPV.flatten(0, 1).T @ inputs.memories_XPR.flatten(0, 1).to(sum_dtype)
    return states_grad_XTD, memories_grad_XPR
