"""Scores of words without a wall of logits, and their exact gradient. It knows no alignment and no loss.

The words' head is frozen, so whatever a loss asks of it comes down to a few rows of its weights W and to one number
a state h, the log-normaliser: log sum_v exp(W_v h + b_v), whose gradient is the expected row, sum_v p_v W_v. Both
are summed up block by block while the logits are there, so the logits can go at once: nothing of the size of the
vocabulary is kept, and nothing is computed twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows x words of logits alive at once: on a CPU what the cache of a core nearly holds, so that exponentials cost no
# trip to memory; on an accelerator what keeps it busy.
BLOCKS = {"cpu": (512, 1024)}
LARGE_BLOCK = (8192, 8192)


class LinearLogSumExp(torch.autograd.Function):
    """log_normaliser_R of `log_normaliser`; the gradient goes to the states and is formed here, in the forward pass."""

    @staticmethod
    def forward(ctx: Any, states_RD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        rows, block_size = BLOCKS.get(states_RD.device.type, LARGE_BLOCK)
        accumulate_dtype = torch.promote_types(states_RD.dtype, torch.float32)
        normaliser_R = states_RD.new_empty(len(states_RD), dtype=accumulate_dtype)
        expected_RD = torch.empty_like(states_RD, dtype=accumulate_dtype) if ctx.needs_input_grad[0] else None
        for start in range(0, len(states_RD), rows):
            part = slice(start, start + rows)
            into = None if expected_RD is None else expected_RD[part].zero_()
            normaliser_R[part] = blockwise_logsumexp(
                states_RD[part], lm_head_VD, bias_V, block_size, accumulate_dtype, into
            )
        ctx.save_for_backward(expected_RD)
        ctx.states_dtype = states_RD.dtype
        return normaliser_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, normaliser_R: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Of the incoming gradient, named after what it belongs to."""
        (expected_RD,) = ctx.saved_tensors
        return (normaliser_R[:, None] * expected_RD).to(ctx.states_dtype), None, None


def blockwise_logsumexp(
    states_RD: Tensor,
    lm_head_VD: Tensor,
    bias_V: Tensor | None,
    block_size: int,
    accumulate_dtype: torch.dtype,
    expected_RD: Tensor | None,
) -> Tensor:
    """The log-normalisers_R over all words, `block_size` of them at a time; the expected rows into expected_RD, if
    wanted.

    What has been summed up is scaled whenever a greater logit turns up, so no exponential ever overflows.
    """
    states_RD = states_RD.to(lm_head_VD.dtype)
    most_R1 = states_RD.new_full((len(states_RD), 1), torch.finfo(accumulate_dtype).min, dtype=accumulate_dtype)
    total_R1 = torch.zeros_like(most_R1)
    for start in range(0, len(lm_head_VD), block_size):
        some_VD = lm_head_VD[start : start + block_size]
        some_V = None if bias_V is None else bias_V[start : start + block_size]
        logits_RV = F.linear(states_RD, some_VD, some_V).to(accumulate_dtype)
        greater_R1 = torch.maximum(most_R1, logits_RV.amax(dim=-1, keepdim=True))
        shrink_R1, most_R1 = (most_R1 - greater_R1).exp_(), greater_R1
        logits_RV.sub_(most_R1).exp_()
        total_R1.mul_(shrink_R1).add_(logits_RV.sum(dim=-1, keepdim=True))
        if expected_RD is not None:
            expected_RD.mul_(shrink_R1).add_(logits_RV.to(lm_head_VD.dtype) @ some_VD)
    if expected_RD is not None:
        expected_RD.div_(total_R1)
    return (total_R1.log_() + most_R1)[:, 0]


def fused_linear_logsumexp(states_XD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """log sum_v exp(logit_v) over the words, [X], for any leading axes X.

    Logits are computed in the dtype of words_VD, which is frozen; the sum is float32 (float64 for float64 states).
    """
    refuse_trainable(lm_head_VD)
    normaliser_R: Tensor = LinearLogSumExp.apply(states_XD.flatten(0, -2), lm_head_VD, bias_V)
    return normaliser_R.view(states_XD.shape[:-1])


def refuse_trainable(lm_head_VD: Tensor) -> None:
    if lm_head_VD.requires_grad:
        raise ValueError("the words' head is to be learned, but these scores give it no gradient; freeze it")


def autocast_disabled(device: torch.device) -> AbstractContextManager[Any]:
    """Without autocast, which a plan on paper (the meta device) does not know."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def token_logits(states_XTD: Tensor, lm_head_VD: Tensor, bias_V: Tensor | None, tokens_XS: Tensor) -> Tensor:
    """The logits of a few words at every frame, [X, T, S], float32 or better; rounded as those that `log_normaliser`
    sums, or a word's share of that sum could be above 1. Their gradient is that of what was not rounded."""
    accumulate_dtype, half = torch.promote_types(states_XTD.dtype, torch.float32), matmul_dtype(lm_head_VD)
    with autocast_disabled(states_XTD.device):
        rows_XSD = lm_head_VD[tokens_XS].to(half).to(accumulate_dtype)
        logits_XTS = states_XTD.to(half).to(accumulate_dtype) @ rows_XSD.transpose(-1, -2)
        if bias_V is not None:
            logits_XTS = logits_XTS + bias_V[tokens_XS][..., None, :]
    return logits_XTS + (logits_XTS.to(half).to(accumulate_dtype) - logits_XTS).detach()


def matmul_dtype(lm_head_VD: Tensor) -> torch.dtype:
    """The type in which a product with the head comes out: its own, or autocast's."""
    device = lm_head_VD.device.type
    if device != "meta" and lm_head_VD.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return lm_head_VD.dtype


def blank_logits(states_XTD: Tensor, blank_D: Tensor, blank_bias: Tensor) -> Tensor:
    """The blank's logit at every frame, [X, T], float32 or better."""
    accumulate_dtype = torch.promote_types(states_XTD.dtype, torch.float32)
    with autocast_disabled(states_XTD.device):
        return states_XTD.to(accumulate_dtype) @ blank_D.to(accumulate_dtype) + blank_bias


def label_and_blank_log_probs(
    states_XTD: Tensor,
    lm_head_VD: Tensor,
    bias_V: Tensor | None,
    blank_D: Tensor,
    blank_bias: Tensor,
    labels_XS: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, over all words and the blank, of the labels [X, T, S] and of the blank [X, T] at every frame.

    Scores are float32 (float64 for float64 states).
    """
    logsumexp_XT = fused_linear_logsumexp(states_XTD, lm_head_VD, bias_V)
    blank_XT = blank_logits(states_XTD, blank_D, blank_bias)
    normaliser_XT = torch.logaddexp(logsumexp_XT, blank_XT)
    labels_XTS = token_logits(states_XTD, lm_head_VD, bias_V, labels_XS)
    return labels_XTS - normaliser_XT[..., None], blank_XT - normaliser_XT
