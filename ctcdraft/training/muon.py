"""Muon on a CPU."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor


class CPUMuon(torch.optim.Muon):
    """torch's Muon, scaled to the size of AdamW's updates, with orthogonalised updates in the gradient's own dtype.

    `torch.optim.Muon` orthogonalises in bfloat16, which processors without instructions for it emulate: there this can
    take longer than the rest of a training step. Momentum is Nesterov's and `adjust_lr_fn` "match_rms_adamw".
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(mean, momentum)  # Nesterov's
                update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr * 0.2 * sqrt(max(weight.shape)))


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the matrix with singular values near 1, by Newton-Schulz iterations of a quintic (Jordan et al. 2024).

    Args:
        matrix: (rows, columns), of any floating dtype, which is that of the result.
    """
    a, b, c = coefficients
    wide = matrix.T if len(matrix) > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if len(matrix) > matrix.shape[1] else wide
