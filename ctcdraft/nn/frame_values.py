"""Values of frames, such as distances from the base's distributions, with gradients made while their logits are cached.

A loss reads the logits of a frame many times: to normalise them, to compare them, for the gradient. On a CPU these
passes through memory cost more than the products that made the logits. So the values of a few windows are computed
together with their gradients, and the backward pass scales these. Elsewhere autograd computes all windows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS = {"cpu": 2**18}  # logits of a block, about what the cache of a core holds with all that is made of them

# (log-probabilities_XSV, *columns_X) -> values_X of windows, or values_XS or K values_XSK of frames, which depend on
# the frame alone. Columns get no gradient.
Measure = Callable[..., Tensor]


def frame_values(measure: Measure, logits_XSV: Tensor, *columns_X: Tensor) -> Tensor:
    """Return measure(log-probabilities_XSV, *columns_X)."""
    block = BLOCKS.get(logits_XSV.device.type, logits_XSV.numel())
    size = max(1, block // max(1, logits_XSV[:1].numel()))
    if size >= len(logits_XSV):
        return measure(logits_XSV.log_softmax(dim=-1), *columns_X)
    return FrameValues.apply(logits_XSV, measure, size, *columns_X)


class FrameValues(torch.autograd.Function):
    """values_X of `frame_values`, `size` windows at a time; their gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits_XSV: Tensor, measure: Measure, size: int, *columns_X: Tensor) -> Tensor:
        compute = measure_with_gradients if ctx.needs_input_grad[0] else measure_alone
        blocks = zip(*(column.split(size) for column in (logits_XSV, *columns_X)), strict=True)
        values, gradients = zip(*(compute(measure, *block) for block in blocks), strict=True)
        ctx.size, ctx.several = size, len(gradients[0])
        ctx.save_for_backward(*(gradient for several in gradients for gradient in several))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_X: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.saved_tensors
        logits_grad_XSV = gradients[0].new_empty(len(grad_X), *gradients[0].shape[1:])
        parts = zip(grad_X.split(ctx.size), logits_grad_XSV.split(ctx.size), strict=True)
        for number, (grad_Z, into_ZSV) in enumerate(parts):
            first, *others = gradients[number * ctx.several : (number + 1) * ctx.several]
            grad_ZSK = grad_Z.reshape(len(grad_Z), -1, ctx.several)
            torch.mul(first, grad_ZSK[..., :1], out=into_ZSV)
            for place, gradient_ZSV in enumerate(others, start=1):
                into_ZSV.addcmul_(gradient_ZSV, grad_ZSK[..., place, None])
        return logits_grad_XSV, *[None] * (len(ctx.needs_input_grad) - 1)


def measure_alone(measure: Measure, logits_XSV: Tensor, *columns_X: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    return measure(logits_XSV.log_softmax(dim=-1), *columns_X), ()


def measure_with_gradients(
    measure: Measure, logits_XSV: Tensor, *columns_X: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the values_X of a block and their gradients_XSV: one, or K of values_XSK."""
    # Hooks that keep everything as it is: those of a checkpoint would compute this block again for its own gradient.
    # Detached, or an output that its own operation saves would keep itself in memory forever.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept):
        logits_XSV = logits_XSV.detach().requires_grad_()
        values_X = measure(logits_XSV.log_softmax(dim=-1), *columns_X)
        several = values_X.unbind(-1) if values_X.ndim == logits_XSV.ndim else (values_X,)
        sums = [values.sum() for values in several]
        gradients = [torch.autograd.grad(total, logits_XSV, retain_graph=True)[0] for total in sums]
    return values_X.detach(), tuple(gradients)
