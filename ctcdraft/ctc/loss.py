"""The CTC loss of whole logits with its gradient in closed form. It knows logits; not where they come from.

Training never has whole logits (nn/projection.py); this is for those who do, and the ruler for those who do not.
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
    """-log P of `ctc_losses`. d loss / d logit = p - (share of the alignments that say this class at this frame).

    p, without its denominator, is formed while the logits are in the cache; the first backward pass turns it into
    the gradient where it lies, and any further one begins anew from the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_XTC: Tensor, labels_XS: Tensor, lengths_X: Tensor, blank: int) -> Tensor:
        ctx.exponentials_XTC, total_XT1, most_XT1 = stable_exponentials(logits_XTC)
        at_XTS = labels_XS.clamp(min=0)[:, None].expand(-1, logits_XTC.shape[1], -1)
        normaliser_XT1 = total_XT1.log() + most_XT1
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
    def backward(ctx: Any, loss_X: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Of the incoming gradient, named after what it belongs to."""
        logits_XTC, total_XT1, at_XTS, possible_X, label_XTS, blank_XT = ctx.saved_tensors
        moved_XTC, ctx.exponentials_XTC = ctx.exponentials_XTC, None
        if moved_XTC is None:
            moved_XTC = stable_exponentials(logits_XTC)[0]
        loss_X11 = loss_X.where(possible_X, 0)[:, None, None]
        moved_XTC *= loss_X11 / total_XT1
        moved_XTC.scatter_add_(-1, at_XTS, -loss_X11 * label_XTS)
        moved_XTC[..., ctx.blank] -= loss_X11[..., 0] * blank_XT
        return moved_XTC, None, None, None


def stable_exponentials(logits_XTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logit - the frame's greatest) [X, T, C], its sum over the classes and that greatest logit, both [X, T, 1]."""
    made_XTC = torch.empty_like(logits_XTC)
    most_XT1 = logits_XTC.new_empty(*logits_XTC.shape[:2], 1)
    total_XT1 = torch.empty_like(most_XT1)
    bytes_a_window = logits_XTC[0].numel() * logits_XTC.itemsize
    size = max(1, CHUNK_BYTES.get(logits_XTC.device.type, LARGE_CHUNK) // bytes_a_window)
    for chunk, made, most, total in zip(
        *(whole.split(size) for whole in (logits_XTC, made_XTC, most_XT1, total_XT1)), strict=True
    ):
        torch.amax(chunk, dim=-1, keepdim=True, out=most)
        torch.sub(chunk, most, out=made).exp_()
        torch.sum(made, dim=-1, keepdim=True, out=total)
    return made_XTC, total_XT1, most_XT1


def ctc_losses(logits_XTC: Tensor, labels_XS: Tensor, lengths_X: Tensor, blank: int) -> Tensor:
    """-log P(the frames collapse to the labels), summed over all alignments; [X], from logits [X, T, C].

    Labels from lengths on are padding. Where no alignment says the labels the loss is inf and its gradient zero.
    float32 or float64.
    """
    losses_X: Tensor = CTCLoss.apply(logits_XTC, labels_XS, lengths_X, blank)
    return losses_X
