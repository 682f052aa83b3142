"""The CTC loss of full logits, with its gradient in closed form: what benchmarks/projection.py compares.

Training never has full logits (ctcdraft/nn/linear_logsumexp.py), so the package does not need this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctcdraft.ctc.forward import log_likelihood

CHUNK_BYTES = {"cpu": 2**20}  # of logits at a time: on a CPU what the cache of a core holds
LARGE_CHUNK = 2**28


class CTCLoss(torch.autograd.Function):
    """-log P of `ctc_losses`. d loss / d logit = p - (share of the alignments that have this class in this frame).

    The numerator of p is computed while the logits are in the cache; the first backward pass turns it into the
    gradient in place, and any further one starts again from the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_XTC: Tensor, labels_XS: Tensor, lengths_X: Tensor, blank: int) -> Tensor:
        ctx.exponentials_XTC, total_XT1, max_XT1 = stable_exponentials(logits_XTC)
        at_XTS = labels_XS.clamp(min=0)[:, None].expand(-1, logits_XTC.shape[1], -1)
        normaliser_XT1 = total_XT1.log() + max_XT1
        label_XTS = (logits_XTC.gather(-1, at_XTS) - normaliser_XT1).requires_grad_()
        blank_XT = (logits_XTC[..., blank] - normaliser_XT1[..., 0]).requires_grad_()
        with torch.enable_grad():
            value_X = log_likelihood(label_XTS, blank_XT, labels_XS, lengths_X)
            shares = torch.autograd.grad(value_X.sum(), (label_XTS, blank_XT))
        ctx.save_for_backward(logits_XTC, total_XT1, at_XTS, value_X.isfinite(), *shares)
        ctx.blank = blank
        return -value_X.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_X: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_XTC, total_XT1, at_XTS, possible_X, label_XTS, blank_XT = ctx.saved_tensors
        grad_XTC, ctx.exponentials_XTC = ctx.exponentials_XTC, None
        if grad_XTC is None:
            grad_XTC = stable_exponentials(logits_XTC)[0]
        grad_X11 = grad_X.where(possible_X, 0)[:, None, None]
        grad_XTC *= grad_X11 / total_XT1
        grad_XTC.scatter_add_(-1, at_XTS, -grad_X11 * label_XTS)
        grad_XTC[..., ctx.blank] -= grad_X11[..., 0] * blank_XT
        return grad_XTC, None, None, None


def stable_exponentials(logits_XTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(logit - the frame's maximum) [X, T, C], its sum over classes and that maximum, both [X, T, 1]."""
    exponentials_XTC = torch.empty_like(logits_XTC)
    max_XT1 = logits_XTC.new_empty(*logits_XTC.shape[:2], 1)
    total_XT1 = torch.empty_like(max_XT1)
    bytes_per_window = logits_XTC[0].numel() * logits_XTC.itemsize
    size = max(1, CHUNK_BYTES.get(logits_XTC.device.type, LARGE_CHUNK) // bytes_per_window)
    for chunk, exponentials, most, total in zip(
        *(whole.split(size) for whole in (logits_XTC, exponentials_XTC, max_XT1, total_XT1)), strict=True
    ):
        torch.amax(chunk, dim=-1, keepdim=True, out=most)
        torch.sub(chunk, most, out=exponentials).exp_()
        torch.sum(exponentials, dim=-1, keepdim=True, out=total)
    return exponentials_XTC, total_XT1, max_XT1


def ctc_losses(logits_XTC: Tensor, labels_XS: Tensor, lengths_X: Tensor, blank: int) -> Tensor:
    """Return -log P_X(the frames collapse to the labels), summed over all alignments, from logits [X, T, C].

    Labels from lengths on are padding. Where no alignment exists the loss is inf and its gradient zero. float32 or
    float64.
    """
    losses_X: Tensor = CTCLoss.apply(logits_XTC, labels_XS, lengths_X, blank)
    return losses_X
