"""Fused linear log-sum-exp: token log-probabilities with exact gradients, without logits of the size of the vocabulary.

The lm_head is frozen, so a loss needs only a few rows of its weights W and one number per hidden state h, the
log-normaliser log sum_v exp(W_v h + b_v), whose gradient is the expected row sum_v p_v W_v. Both are accumulated
block by block while the logits exist, so the logits can be dropped at once: nothing of the size of the vocabulary is
kept, and nothing is computed twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
        rows, block_size = BLOCKS.get(states_RD.device.type, LARGE_BLOCK)
        sum_dtype = torch.promote_types(states_RD.dtype, torch.float32)
        normaliser_R = states_RD.new_empty(len(states_RD), dtype=sum_dtype)
        expected_RD = torch.empty_like(states_RD, dtype=sum_dtype) if ctx.needs_input_grad[0] else None
        for start in range(0, len(states_RD), rows):
            part = slice(start, start + rows)
            into = None if expected_RD is None else expected_RD[part].zero_()
            normaliser_R[part] = blockwise_logsumexp(states_RD[part], lm_head_VD, bias_V, block_size, sum_dtype, into)
        ctx.save_for_backward(expected_RD)
        ctx.states_dtype = states_RD.dtype
        return normaliser_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (expected_RD,) = ctx.saved_tensors
        return (grad_R[:, None] * expected_RD).to(ctx.states_dtype), None, None


def blockwise_logsumexp(
    states_RD: Tensor,
    lm_head_VD: Tensor,
    bias_V: Tensor | None,
    block_size: int,
    sum_dtype: torch.dtype,
    expected_RD: Tensor | None,
) -> Tensor:
    """Return the log-normalisers_R, `block_size` tokens at a time; write the expected rows into expected_RD, if given.

    The sums are rescaled whenever a larger logit turns up, so no exponential ever overflows.
    """
    states_RD = states_RD.to(lm_head_VD.dtype)
    max_R1 = states_RD.new_full((len(states_RD), 1), torch.finfo(sum_dtype).min, dtype=sum_dtype)
    total_R1 = torch.zeros_like(max_R1)
    for start in range(0, len(lm_head_VD), block_size):
        block_VD = lm_head_VD[start : start + block_size]
        block_bias_V = None if bias_V is None else bias_V[start : start + block_size]
        logits_RV = F.linear(states_RD, block_VD, block_bias_V).to(sum_dtype)
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
    normaliser_R: Tensor = LinearLogSumExp.apply(states_XD.flatten(0, -2), lm_head_VD, bias_V)
    return normaliser_R.view(states_XD.shape[:-1])


def refuse_trainable(lm_head_VD: Tensor) -> None:
    if lm_head_VD.requires_grad:
        raise ValueError("the lm_head requires a gradient, which these scores do not compute; freeze it")


def autocast_disabled(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast; it does not exist on the meta device of a dry run."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def token_logits(states_XTD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None, tokens_XS: Tensor) -> Tensor:
    """Return the logits of a few tokens in every frame, [X, T, S], float32 or better.

    They are rounded as those that `fused_linear_logsumexp` sums, or a token's share of that sum could exceed 1. The
    gradient is that of the unrounded values.
    """
    sum_dtype, half = torch.promote_types(states_XTD.dtype, torch.float32), matmul_dtype(lm_head_VD)
    with autocast_disabled(states_XTD.device):
        rows_XSD = lm_head_VD[tokens_XS].to(half).to(sum_dtype)
        logits_XTS = states_XTD.to(half).to(sum_dtype) @ rows_XSD.transpose(-1, -2)
        if bias_V is not None:
            logits_XTS = logits_XTS + bias_V[tokens_XS][..., None, :]
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
    """Return log-probabilities over V + 1 classes of the labels [X, T, S] and of the blank [X, T] in every frame.

    They are float32 (float64 for float64 states).
    """
    # In this order: backward sums the three gradients of the states in the reverse order of these calls, and another
    # order changes their last bits, so that a recorded run could not be reproduced bit for bit.
    logsumexp_XT = fused_linear_logsumexp(states_XTD, lm_head_VD, bias_V)
    blank_XT = blank_logits(states_XTD, blank_D, blank_bias)
    normaliser_XT = torch.logaddexp(logsumexp_XT, blank_XT)
    labels_XTS = token_logits(states_XTD, lm_head_VD, bias_V, labels_XS)
    return labels_XTS - normaliser_XT[..., None], blank_XT - normaliser_XT
