"""Values of `trainer` in a config: checked before anything is loaded, and grouped for the parts that use them.

This module imports no torch, because a wrong value must be refused before imports that take seconds. It is the only
place where optimiser and checkpoint keys of `trainer` are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from ctcdraft.errors import InputError, check_float, check_int

COUNTS = (
    "steps", "rows", "anchors", "max_length", "probe_every", "checkpoint_every", "warmup", "accumulate", "keep",
    "patience",
)  # fmt: skip


@dataclass(frozen=True)
class OptimizerSettings:
    """Learning-rate schedule, weight decay, clipping and precision of an engine.

    Args:
        steps: optimiser steps of the whole run, over which the learning rate decays.
        learning_rate: highest learning rate, reached after `warmup` steps.
        final_share: learning rate of the last step, as a share of the highest.
        betas: of AdamW; Muon takes the second as its momentum.
        weight_decay: of matrices; norms, biases and embeddings are not decayed.
        clip_norm: largest norm of the whole gradient.
        clip_value: where set, largest absolute value of each gradient entry, in place of `clip_norm`.
        autocast: run matrix products in bfloat16; weights stay float32.
    """

    steps: int
    learning_rate: float
    warmup: int
    final_share: float
    betas: tuple[float, float]
    weight_decay: float
    clip_norm: float
    clip_value: float | None
    autocast: bool

    @classmethod
    def from_config(cls, trainer: Any) -> Self:
        """Return the settings of a `trainer` node."""
        values = {field.name: trainer[field.name] for field in fields(cls)}
        return cls(**values | {"betas": tuple(trainer["betas"])})


@dataclass(frozen=True)
class CheckpointPolicy:
    """When the state of a run is saved, and when a run that diverges stops.

    Args:
        checkpoint_every: steps between two saved states.
        checkpoint_minutes: save also after so many minutes; None: by steps alone.
        keep: number of the newest states that stay on disk.
        patience: consecutive steps with a gradient that is not finite after which the run stops. None of them is taken.
    """

    checkpoint_every: int
    checkpoint_minutes: float | None
    keep: int
    patience: int

    @classmethod
    def from_config(cls, trainer: Any) -> Self:
        """Return the policy of a `trainer` node."""
        return cls(**{field.name: trainer[field.name] for field in fields(cls)})


def refuse_impossible(trainer: Mapping[str, Any], seed: Any) -> None:
    """Raise InputError for the first value with which no run can be trained. trainer: as in configs/train.yaml."""
    check_int(seed, "seed", least=0)
    for key in COUNTS:
        check_int(trainer[key], f"trainer.{key}")
    check_int(trainer["probe_prompts"], "trainer.probe_prompts", least=0)
    for key in ("pack", "threads"):
        if trainer[key] is not None:
            check_int(trainer[key], f"trainer.{key}")
    for key in ("learning_rate", "clip_norm", *(["clip_value"] if trainer["clip_value"] is not None else [])):
        if not check_float(trainer[key], f"trainer.{key}") > 0:
            raise InputError(f"trainer.{key} must be > 0, got {trainer[key]}")
    for key in ("weight_decay", "final_share"):
        if check_float(trainer[key], f"trainer.{key}") < 0:
            raise InputError(f"trainer.{key} must be >= 0, got {trainer[key]}")
    if not isinstance(trainer["compile"], str | None):
        raise InputError(
            f"trainer.compile must be a backend of torch.compile such as inductor, or null, got {trainer['compile']}"
        )
    betas = trainer["betas"]
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(0 <= check_float(beta, "trainer.betas") < 1 for beta in betas):
        raise InputError(f"trainer.betas must be two numbers >= 0 and < 1, got {betas}")
    minutes = trainer["checkpoint_minutes"]
    if minutes is not None and not check_float(minutes, "trainer.checkpoint_minutes") > 0:
        raise InputError(f"trainer.checkpoint_minutes must be > 0, or null for steps alone, got {minutes}")
    # Last: the default of autocast asks torch what the device can do, and that import takes seconds.
    for key in ("prefetch", "autocast"):
        if not isinstance(trainer[key], bool):
            raise InputError(f"trainer.{key} must be true or false, got {trainer[key]}")
