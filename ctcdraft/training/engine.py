"""Optimiser steps: AdamW or Muon, learning-rate schedule, clipping, precision, and the compiled forward pass.

An engine takes one step along the mean loss of several batches, whose rows the processes of a run share. Only the
drafter's forward pass is compiled: inductor's C++ code for the objective's alignment recursion does not compile on a
CPU (torch 2.13), and the lm_head projection, which costs most, is matrix products that compiling makes no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from math import cos, isfinite, pi
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ctcdraft.distributed import Distributed
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.objectives.base import Loss
from ctcdraft.objectives.step_counts import shared_step
from ctcdraft.training.muon import CPUMuon


@dataclass(frozen=True)
class OptimizerSettings:
    """Schedule, weight decay, clipping and precision of an engine: keys of `trainer`, documented in configs/train.yaml.

    `clip_value`, where set, bounds each gradient entry in place of `max_grad_norm`. Muon uses the second of `betas` as
    its momentum. Norms, biases and the embeddings of frame positions are not decayed.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    min_lr_ratio: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    clip_value: float | None
    autocast: bool

    @classmethod
    def from_config(cls, trainer: Any) -> Self:
        values = {field.name: trainer[field.name] for field in fields(cls)}
        return cls(**values | {"betas": tuple(trainer["betas"])})


class LossOf(nn.Module):
    """A function of no arguments as a module with trained parameters, whose gradients torch's DDP can then reduce."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        # Without an unused one, every process would print that DDP need not have looked for them.
        self.unused = nn.Parameter(parameters[0].new_zeros(1))

    def forward(self, loss: Callable[[], Loss]) -> tuple[Tensor, Tensor | None]:
        result = loss()
        return result.value, result.count


class TorchEngine:
    """AdamW with linear warm-up, cosine decay and clipping, on one device or, under torchrun, one device per process.

    Args:
        module: the draft head.
        parameters: its trained parameters.
        distributed: the processes whose gradients are averaged.
    """

    def __init__(
        self, module: nn.Module, parameters: list[nn.Parameter], settings: OptimizerSettings, distributed: Distributed
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.settings = settings
        self.distributed = distributed
        self.loss_of: nn.Module | None = None  # built in the first step, when all parameters are known
        # A lambda, because a state_dict of LambdaLR would hold the attributes of a callable that is no function.
        self.lr_factor = lambda step: warmup_cosine(step, settings)
        self.optimisers = self.build_optimizers(*split_by_weight_decay(parameters))
        self.schedules = [LambdaLR(optimizer, self.lr_factor) for optimizer in self.optimisers]

    def build_optimizers(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        optimisers = [self.matrix_optimizer(matrices)] if matrices else []
        return [*optimisers, *([self.adamw(others, self.settings.learning_rate)] if others else [])]

    def matrix_optimizer(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self.adamw(matrices, self.settings.learning_rate, self.settings.weight_decay)

    def adamw(
        self, parameters: list[nn.Parameter], learning_rate: float, weight_decay: float = 0.0
    ) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=learning_rate, betas=self.settings.betas, weight_decay=weight_decay)

    def add_param_group(self, parameters: list[nn.Parameter], learning_rate: float) -> None:
        """Train more parameters, by AdamW at a learning rate of their own; clipped and averaged with all others."""
        self.parameters = [*self.parameters, *parameters]
        self.optimisers.append(self.adamw(parameters, learning_rate))
        self.schedules.append(LambdaLR(self.optimisers[-1], self.lr_factor))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def data_parallel(self) -> nn.Module:
        """Return LossOf under torch's DDP, which reduces gradients over the processes while the backward pass runs."""
        loss_of = LossOf(self.parameters)
        if self.distributed.world_size == 1:
            return loss_of
        # A head may have parameters that an objective does not train; DDP would wait for their gradients.
        return DistributedDataParallel(loss_of, find_unused_parameters=True, gradient_as_bucket_view=True)

    def backward(self, losses: Sequence[Callable[[], Loss]]) -> list[Tensor]:
        """Compute the gradient of the mean loss over all processes; return its parts.

        The mean is over all labels of the step: a batch weighs by the count of its loss.
        """
        counts: list[Tensor] = []
        with shared_step(self.distributed):
            self.loss_of = self.loss_of or self.data_parallel()
            for number, loss in enumerate(losses, start=1):  # one at a time, so that one graph is in memory
                last = number == len(losses)
                with nullcontext() if last else getattr(self.loss_of, "no_sync", nullcontext)():
                    with self.precision():
                        value, count = self.loss_of(loss)
                    counts.append(torch.ones_like(value) if count is None else count)
                    (value if len(losses) == 1 else value * counts[-1]).backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if len(losses) > 1:
            torch._foreach_div_(gradients, torch.stack(counts).sum().clamp(min=1e-30))
        return gradients

    def step(self, losses: Sequence[Callable[[], Loss]]) -> float:
        """Take one optimiser step along the mean loss of all processes; return the gradient's norm before clipping.

        Where the gradient is not finite no process takes the step. losses: this process's, each called once.
        """
        gradients = self.backward(losses)
        norm = torch.nn.utils.get_total_norm(gradients)
        if isfinite(norm):
            self.clip(norm)
            for optimiser, schedule in zip(self.optimisers, self.schedules, strict=True):
                optimiser.step()
                schedule.step()
        self.zero_grad()
        return float(norm)

    def clip(self, norm: Tensor) -> None:
        if self.settings.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.settings.clip_value)
        else:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm)

    def precision(self) -> torch.autocast:
        """Return the context of forward passes, the base model's included: `with engine.precision(): ...`"""
        return torch.autocast(self.parameters[0].device.type, torch.bfloat16, enabled=self.settings.autocast)

    @property
    def learning_rate(self) -> float:
        return float(self.schedules[0].get_last_lr()[0])

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimisers": [one.state_dict() for one in self.optimisers],
            "schedules": [one.state_dict() for one in self.schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            self.restore_schedule(schedule, saved)

    def restore_schedule(self, schedule: LambdaLR, saved: dict[str, Any]) -> None:
        """Load a schedule; its optimiser gets the rate that the step has with the present number of steps."""
        schedule.load_state_dict(saved)
        factor = self.lr_factor(schedule.last_epoch)
        schedule._last_lr = [rate * factor for rate in schedule.base_lrs]
        for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate


class MuonEngine(TorchEngine):
    """Muon (Jordan et al. 2024) for weight matrices, AdamW for the rest.

    A head needs fewer steps, each of which costs a little more. Updates are scaled to the size of AdamW's, so that
    learning rates mean the same for both.
    """

    def matrix_optimizer(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind = CPUMuon if matrices[0].is_cpu else torch.optim.Muon
        return kind(
            matrices,
            lr=self.settings.learning_rate,
            momentum=self.settings.betas[1],
            weight_decay=self.settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )


def split_by_weight_decay(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return weight matrices, which are decayed, and the rest: norms, biases and the embeddings of frame positions."""
    matrices = [p for p in parameters if p.ndim == 2 and min(p.shape) >= 32]
    return matrices, [p for p in parameters if not (p.ndim == 2 and min(p.shape) >= 32)]


def warmup_cosine(step: int, settings: OptimizerSettings) -> float:
    """Return the learning rate of a step as a share of the highest: linear warm-up, then half a cosine period."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = min((step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1), 1.0)
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * 0.5 * (1 + cos(pi * progress))


def compile_forward(drafter: DraftHead, backend: str, rehearsal: Callable[[], None]) -> None:
    """Compile `drafter(batch)` in place; weight names, decoding and saved files do not change.

    Raises InputError where the backend of torch.compile cannot compile this drafter.

    Args:
        rehearsal: a forward and a backward pass that succeeded without compiling.
    """
    import torch._dynamo  # takes seconds, so only where it is needed

    try:
        # Dynamic shapes: batches differ in length, and each length would be compiled anew.
        drafter.compile(backend=backend, dynamic=True)
        rehearsal()
    except RuntimeError as error:
        lines = str(error).strip().splitlines()  # the first may be only "backend='inductor' raised:"
        reason = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1]).rstrip(".")
        backends = ", ".join(torch._dynamo.list_backends())
        raise InputError(
            f"trainer.compile={backend} cannot compile {type(drafter).__name__} here ({reason}); give another backend "
            f"of torch.compile ({backends}), or null to train without"
        ) from error
