"""How a step is taken: optimiser, schedule, clipping, precision. It knows parameters and a loss, not what they mean.

A drafter's forward pass compiled, and tried before any corpus. It knows torch.compile, and nothing of the pass.

The objective stays as it is: inductor's C++ for its recursion does not compile on a CPU (torch 2.13), and the words'
projection, which is most of it, is matrix products that nothing makes faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, isfinite, pi
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.distributed import Distributed
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError


class TorchEngine:
    """AdamW, on one device or, under torchrun, on one a process, with linear warm-up, cosine decay and clipping.

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
        peers: Distributed,
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.autocast = autocast
        self.peers = peers
        matrices, others = split_by_weight_decay(parameters)
        self.optimisers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimisers.append(self.for_matrices(matrices, learning_rate, betas, weight_decay))
        if others:  # all there is where only low-rank updates are trained
            self.optimisers.append(torch.optim.AdamW(others, lr=learning_rate, betas=betas, weight_decay=0.0))
        self.lr_lambda = lambda step: warmup_cosine(step, steps, warmup, final_share)
        self.betas = betas
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(one, self.lr_lambda) for one in self.optimisers]

    def for_matrices(
        self, matrices: list[nn.Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        return torch.optim.AdamW(matrices, lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def add_param_group(self, parameters: list[nn.Parameter], learning_rate: float) -> None:
        """Train these too, by AdamW at a rate of their own; clipped and averaged with all others."""
        self.parameters = [*self.parameters, *parameters]
        self.optimisers.append(torch.optim.AdamW(parameters, lr=learning_rate, betas=self.betas, weight_decay=0.0))
        self.schedules.append(torch.optim.lr_scheduler.LambdaLR(self.optimisers[-1], self.lr_lambda))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> float:
        """One optimiser step along the mean of the losses, this process's and its peers', of which one is alive at a
        time; returns the gradient's norm before clipping. If that is not finite, no step is taken, by nobody."""
        for loss in losses:
            with self.precision():
                value = loss() / len(losses)
            value.backward()
        self.peers.all_reduce_mean([p.grad for p in self.parameters if p.grad is not None])
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if isfinite(norm):
            self.clip(norm)
            for optimiser, schedule in zip(self.optimisers, self.schedules, strict=True):
                optimiser.step()
                schedule.step()
        self.zero_grad()
        return float(norm)

    def clip(self, norm: Tensor) -> None:
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        else:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)

    def precision(self) -> torch.autocast:
        """The precision of forward passes, the base's included: `with engine.precision(): ...`"""
        return torch.autocast(self.parameters[0].device.type, torch.bfloat16, enabled=self.autocast)

    @property
    def learning_rate(self) -> float:
        return float(self.schedules[0].get_last_lr()[0])

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimisers": [one.state_dict() for one in self.optimisers],
            "schedules": [one.state_dict() for one in self.schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts: list[Any] = [*self.optimisers, *self.schedules]
        for part, saved in zip(parts, [*state["optimisers"], *state["schedules"]], strict=True):
            part.load_state_dict(saved)


class MuonEngine(TorchEngine):
    """Muon (Jordan et al. 2024) for the matrices, AdamW for the rest: a head learns from fewer steps, which cost
    a little more each. The learning rate means what it means to AdamW: updates are scaled to its size."""

    def for_matrices(
        self, matrices: list[nn.Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            matrices, lr=learning_rate, momentum=betas[1], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )


def split_by_weight_decay(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest. Norms, biases and embeddings of slots are not decayed: they are scales and places."""
    matrices = [p for p in parameters if p.ndim == 2 and min(p.shape) >= 32]
    others = [p for p in parameters if not (p.ndim == 2 and min(p.shape) >= 32)]
    return matrices, others


def warmup_cosine(step: int, steps: int, warmup: int, final_share: float) -> float:
    """The share of the learning rate at a step: up linearly, then down a half cosine to final_share."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return final_share + (1 - final_share) * 0.5 * (1 + cos(pi * progress))


def compile_forward(drafter: DraftHead, backend: str, rehearsal: Callable[[], None]) -> None:
    """From now on `drafter(batch)` is compiled; names of weights, decoding and what is saved stay what they were.

    backend: one of torch.compile's. rehearsal: a forward and a backward pass, which went well before. In place, and
    for any sizes: batches differ in length, and each length would be compiled anew. InputError where it cannot be.
    """
    import torch._dynamo  # seconds, for those alone who want it

    try:
        drafter.compile(backend=backend, dynamic=True)
        rehearsal()
    except RuntimeError as error:
        backends = ", ".join(torch._dynamo.list_backends())
        raise InputError(
            f"trainer.compile={backend} cannot compile {type(drafter).__name__} here "
            f"({compile_error_reason(error)}); give "
            f"another backend of torch.compile ({backends}), or null to train without"
        ) from error


def compile_error_reason(error: RuntimeError) -> str:
    """backend='inductor' raised:, and what in the next line -> both; else the first line."""
    lines = str(error).strip().splitlines()
    return " ".join(lines[: 2 if lines[0].endswith("raised:") else 1]).rstrip(".")
