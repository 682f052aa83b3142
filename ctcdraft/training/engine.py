"""How a step is taken: optimiser, schedule, clipping, precision. It knows parameters and a loss, not what they mean."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn


class TorchEngine:
    """AdamW on one device, with linear warm-up, cosine decay and clipping.

    clip_norm bounds the norm of the whole gradient; clip_value, where it is set, bounds every entry instead
    (the paper's 0.5). autocast: bfloat16 in matrix products; the weights stay float32.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        steps: int,
        learning_rate: float,
        warmup: int,
        final_share: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip_norm: float,
        clip_value: float | None,
        autocast: bool,
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.autocast = autocast
        # Norms, biases and embeddings of slots are not decayed: they are scales and places, not maps.
        matrices = [p for p in parameters if p.ndim >= 2 and min(p.shape) > 32]
        others = [p for p in parameters if not (p.ndim >= 2 and min(p.shape) > 32)]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: warm_cosine(step, steps, warmup, final_share)
        )

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """One optimiser step; returns the gradient's norm before clipping."""
        device = self.parameters[0].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            value = loss()
        value.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        else:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)
        return norm.detach()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def state_dict(self) -> dict[str, Any]:
        return {"optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])


def warm_cosine(step: int, steps: int, warmup: int, final_share: float) -> float:
    """The share of the learning rate at a step: up linearly, then down a half cosine to final_share."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return final_share + (1 - final_share) * 0.5 * (1 + cos(pi * progress))
