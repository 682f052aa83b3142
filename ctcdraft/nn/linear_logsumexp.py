"""Fused linear log-sum-exp: token log-probabilities with exact gradients, without logits of the size of the vocabulary.

The lm_head is frozen, so a loss needs only a few rows of its weights W and one number per hidden state h, the
log-normaliser log sum_v exp(W_v h + b_v), whose gradient is the expected row sum_v p_v W_v. Both are accumulated
block by block while the logits exist, so nothing of the size of the vocabulary is kept, and nothing is computed twice.

With a logit correction (nn/logit_correction.py) the score of token v is W_v h + b_v + O_v m for the memory m of a label
prefix, and every frame needs a log-normaliser after every prefix (`pairwise_logsumexp`). It is a product of two tables
of exponentials, which needs T + P rows of logits instead of T * P. O is trained, so the gradient cannot be computed in
the forward pass: the backward pass computes the logits again, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows x tokens of logits in memory at once: on a CPU about what the cache of a core holds, so that exponentials need
# no access to memory; on an accelerator what keeps it busy.
BLOCKS = {"cpu": (512, 1024)}
LARGE_BLOCK = (8192, 8192)


class LinearLogSumExp(torch.autograd.Function):
    """log_normaliser_R of `fused_linear_logsumexp`; the gradient of the states is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, states_RD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        rows, _ = BLOCKS.get(states_RD.device.type, LARGE_BLOCK)
        sum_dtype = torch.promote_types(states_RD.dtype, torch.float32)
        lm_head_VD = lm_head_VD.to(matmul_dtype(lm_head_VD))  # once: autocast would do it for every block
        normaliser_R = states_RD.new_empty(len(states_RD), dtype=sum_dtype)
        expected_RD = torch.empty_like(states_RD, dtype=sum_dtype) if ctx.needs_input_grad[0] else None
        for start in range(0, len(states_RD), rows):
            part = slice(start, start + rows)
            into = None if expected_RD is None else expected_RD[part].zero_()
            normaliser_R[part] = blockwise_logsumexp(states_RD[part], lm_head_VD, bias_V, sum_dtype, into)
        ctx.save_for_backward(expected_RD)
        ctx.states_dtype = states_RD.dtype
        return normaliser_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (expected_RD,) = ctx.saved_tensors
        return (grad_R[:, None] * expected_RD).to(ctx.states_dtype), None, None


def blockwise_logsumexp(
    states_RD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None, sum_dtype: torch.dtype, expected_RD: Tensor | None
) -> Tensor:
    """Return the log-normalisers_R, a block of tokens at a time; write the expected rows into expected_RD, if given."""
    _, block_size = BLOCKS.get(states_RD.device.type, LARGE_BLOCK)
    states_RD = states_RD.to(lm_head_VD.dtype)
    max_R1 = states_RD.new_full((len(states_RD), 1), torch.finfo(sum_dtype).min, dtype=sum_dtype)
    total_R1 = torch.zeros_like(max_R1)
    for start in range(0, len(lm_head_VD), block_size):
        block_VD = lm_head_VD[start : start + block_size]
        block_bias_V = None if bias_V is None else bias_V[start : start + block_size]
        logits_RV = F.linear(states_RD, block_VD, block_bias_V).to(sum_dtype)
        # Rescaled whenever a larger logit turns up, so that no exponential overflows.
        new_max_R1 = torch.maximum(max_R1, logits_RV.amax(dim=-1, keepdim=True))
        rescale_R1, max_R1 = (max_R1 - new_max_R1).exp_(), new_max_R1
        logits_RV.sub_(max_R1).exp_()
        total_R1.mul_(rescale_R1).add_(logits_RV.sum(dim=-1, keepdim=True))
        if expected_RD is not None:
            expected_RD.mul_(rescale_R1).add_(logits_RV.to(lm_head_VD.dtype) @ block_VD)
    if expected_RD is not None:
        expected_RD.div_(total_R1)
    return (total_R1.log_() + max_R1)[:, 0]


def fused_linear_logsumexp(states_XD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return log sum_v exp(logit_v) over the tokens, [X], for any leading axes X.

    Logits are computed in the dtype of lm_head_VD, which is frozen; the sum is float32 (float64 for float64 states).
    """
    refuse_trainable(lm_head_VD)
    return LinearLogSumExp.apply(states_XD.flatten(0, -2), lm_head_VD, bias_V).view(states_XD.shape[:-1])


def refuse_trainable(lm_head_VD: Tensor) -> None:
    if lm_head_VD.requires_grad:
        raise ValueError("the lm_head requires a gradient, which these scores do not compute; freeze it")


def autocast_disabled(device: torch.device) -> AbstractContextManager[Any]:
    # Autocast does not exist on the meta device of a dry run.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def token_logits(states_XTD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None, tokens_XS: Tensor) -> Tensor:
    """Return the logits of a few tokens in every frame, [X, T, S], float32 or better."""
    sum_dtype, half = torch.promote_types(states_XTD.dtype, torch.float32), matmul_dtype(lm_head_VD)
    with autocast_disabled(states_XTD.device):
        rows_XSD = lm_head_VD[tokens_XS].to(half).to(sum_dtype)
        logits_XTS = states_XTD.to(half).to(sum_dtype) @ rows_XSD.transpose(-1, -2)
        if bias_V is not None:
            logits_XTS = logits_XTS + bias_V[tokens_XS][..., None, :]
    # Rounded as those that `fused_linear_logsumexp` sums, or a token's share of that sum could exceed 1; the gradient
    # is that of the unrounded values.
    return logits_XTS + (logits_XTS.to(half).to(sum_dtype) - logits_XTS).detach()


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a product with these weights: their own, or autocast's."""
    device = weight.device.type
    if device != "meta" and weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def blank_logits(states_XTD: Tensor, blank_D: Tensor, blank_bias: Tensor) -> Tensor:
    """Return the blank's logit in every frame, [X, T], float32 or better."""
    sum_dtype = torch.promote_types(states_XTD.dtype, torch.float32)
    with autocast_disabled(states_XTD.device):
        return states_XTD.to(sum_dtype) @ blank_D.to(sum_dtype) + blank_bias


def label_and_blank_log_probs(
    states_XTD: Tensor,
    lm_head_VD: Tensor,
    bias_V: Tensor | None,
    blank_D: Tensor,
    blank_bias: Tensor,
    labels_XS: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities over V + 1 classes of the labels [X, T, S] and of the blank [X, T] in every frame."""
    # In this order: backward sums the three gradients of the states in the reverse order of these calls, and another
    # order changes their last bits, so that a recorded run could not be reproduced bit for bit.
    logsumexp_XT = fused_linear_logsumexp(states_XTD, lm_head_VD, bias_V)
    blank_XT = blank_logits(states_XTD, blank_D, blank_bias)
    normaliser_XT = torch.logaddexp(logsumexp_XT, blank_XT)
    labels_XTS = token_logits(states_XTD, lm_head_VD, bias_V, labels_XS)
    return labels_XTS - normaliser_XT[..., None], blank_XT - normaliser_XT


class PairwiseInputs(NamedTuple):
    """Hidden states of frames and the frozen lm_head; memories of prefixes and the trained table."""

    states_XTD: Tensor
    memories_XPR: Tensor
    table_VR: Tensor
    lm_head_VD: Tensor
    bias_V: Tensor | None
    sum_dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Self:
        """Return the inputs in the dtypes of products, given those of the lm_head and of the table."""
        (states_XTD, memories_XPR, table_VR, lm_head_VD, bias_V), (head, table) = tensors, dtypes
        bias_V, sums = None if bias_V is None else bias_V.to(head), torch.promote_types(states_XTD.dtype, torch.float32)
        return cls(states_XTD.to(head), memories_XPR.to(table), table_VR.to(table), lm_head_VD.to(head), bias_V, sums)

    def chunks(self) -> Iterator[tuple[slice, PairwiseInputs]]:
        """Yield slices of X with as many rows of logits as a block has, and their inputs."""
        rows, _ = BLOCKS.get(self.lm_head_VD.device.type, LARGE_BLOCK)
        size = max(1, rows // (self.states_XTD.shape[1] + self.memories_XPR.shape[1]))
        for start in range(0, len(self.states_XTD), size):
            part = slice(start, start + size)
            yield part, self._replace(states_XTD=self.states_XTD[part], memories_XPR=self.memories_XPR[part])

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of tokens and their logits of frames [X, T, V] and of prefixes [X, P, V], to be overwritten."""
        _, size = BLOCKS.get(self.lm_head_VD.device.type, LARGE_BLOCK)
        for start in range(0, len(self.lm_head_VD), size):
            block = slice(start, start + size)
            bias_V = None if self.bias_V is None else self.bias_V[block]
            frame_logits_XTV = F.linear(self.states_XTD, self.lm_head_VD[block], bias_V)
            prefix_logits_XPV = F.linear(self.memories_XPR, self.table_VR[block])
            yield block, frame_logits_XTV.to(self.sum_dtype), prefix_logits_XPV.to(self.sum_dtype)


class PairwiseLogSumExp(torch.autograd.Function):
    """normaliser_XTP of `pairwise_logsumexp`, with gradients for states, memories and table."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        _, _, table_VR, lm_head_VD, _ = tensors
        ctx.dtypes = matmul_dtype(lm_head_VD), matmul_dtype(table_VR)
        with autocast_disabled(lm_head_VD.device):
            parts = [accumulate_sums(chunk) for _, chunk in PairwiseInputs.of(tensors, ctx.dtypes).chunks()]
        total_XTP, max_XT1, max_XP1 = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(*tensors, total_XTP, max_XT1, max_XP1)
        return total_XTP.log() + max_XT1 + max_XP1.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XTP: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, total_XTP, max_XT1, max_XP1 = ctx.saved_tensors
        inputs, smallest = PairwiseInputs.of(tensors, ctx.dtypes), torch.finfo(total_XTP.dtype).tiny
        # The smallest number stands for zero, which no token has a share of.
        shares_XTP = torch.where(total_XTP > smallest, grad_XTP / total_XTP, 0)
        table_grad_VR = torch.zeros_like(inputs.table_VR, dtype=shares_XTP.dtype)
        with autocast_disabled(inputs.lm_head_VD.device):
            parts = [
                pairwise_gradients(chunk, (max_XT1[part], max_XP1[part]), shares_XTP[part], table_grad_VR)
                for part, chunk in inputs.chunks()
            ]
        states_grad_XTD, memories_grad_XPR = map(torch.cat, zip(*parts, strict=True))
        gradients = zip((states_grad_XTD, memories_grad_XPR, table_grad_VR), tensors[:3], strict=True)
        return *(gradient.to(tensor.dtype) for gradient, tensor in gradients), None, None


def pairwise_logsumexp(
    states_XTD: Tensor, memories_XPR: Tensor, table_VR: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None
) -> Tensor:
    """Return log sum_v exp(W_v h_t + b_v + O_v m_p) over tokens, [X, T, P], float32 (float64 for float64 states)."""
    refuse_trainable(lm_head_VD)
    return PairwiseLogSumExp.apply(states_XTD, memories_XPR, table_VR, lm_head_VD, bias_V)


def accumulate_sums(inputs: PairwiseInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of exponentials [X, T, P], lowered by the maxima of frames and prefixes, and these maxima."""
    sum_dtype, (windows, frames, _) = inputs.sum_dtype, inputs.states_XTD.shape
    prefixes, lowest = inputs.memories_XPR.shape[1], torch.finfo(sum_dtype).min
    total_XTP = inputs.states_XTD.new_zeros(windows, frames, prefixes, dtype=sum_dtype)
    max_XT1 = total_XTP.new_full((windows, frames, 1), lowest)
    max_XP1 = total_XTP.new_full((windows, prefixes, 1), lowest)
    for _, frame_logits_XTV, prefix_logits_XPV in inputs.blocks():
        before_XT1, max_XT1 = max_XT1, torch.maximum(max_XT1, frame_logits_XTV.amax(dim=-1, keepdim=True))
        before_XP1, max_XP1 = max_XP1, torch.maximum(max_XP1, prefix_logits_XPV.amax(dim=-1, keepdim=True))
        total_XTP.mul_((before_XT1 - max_XT1).exp_()).mul_((before_XP1 - max_XP1).exp_().mT)
        total_XTP.baddbmm_(frame_logits_XTV.sub_(max_XT1).exp_(), prefix_logits_XPV.sub_(max_XP1).exp_().mT)
    # Where the two maxima belong to different tokens the sum may underflow: the smallest number stands for zero.
    return total_XTP.clamp_(min=torch.finfo(sum_dtype).tiny), max_XT1, max_XP1


def pairwise_gradients(
    inputs: PairwiseInputs, maxima: tuple[Tensor, Tensor], shares_XTP: Tensor, grad_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of states and memories, given those of the sums; add the table's to grad_VR."""
    (states_XTD, memories_XPR, table_VR, lm_head_VD, _, sum_dtype), (max_XT1, max_XP1) = inputs, maxima
    states_grad_XTD = torch.zeros_like(states_XTD, dtype=sum_dtype)
    memories_grad_XPR = torch.zeros_like(memories_XPR, dtype=sum_dtype)
    for block, frame_logits_XTV, prefix_logits_XPV in inputs.blocks():
        frame_logits_XTV.sub_(max_XT1).exp_()
        prefix_logits_XPV.sub_(max_XP1).exp_()
        by_frame_XTV = (shares_XTP @ prefix_logits_XPV).mul_(frame_logits_XTV)
        by_prefix_XPV = (shares_XTP.mT @ frame_logits_XTV).mul_(prefix_logits_XPV).to(memories_XPR.dtype)
        states_grad_XTD += by_frame_XTV.to(states_XTD.dtype) @ lm_head_VD[block]
        memories_grad_XPR += by_prefix_XPV @ table_VR[block]
        grad_VR[block] += by_prefix_XPV.flatten(0, 1).T @ memories_XPR.flatten(0, 1)
    return states_grad_XTD, memories_grad_XPR
