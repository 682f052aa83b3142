"""What may stand under `trainer`, refused before anything is loaded. It knows keys and values, not who uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.errors import InputError, check_float, check_int


def refuse_impossible(trainer: Mapping[str, Any], seed: Any) -> None:
    """Raise InputError for the first value with which nothing can be trained. trainer: as in configs/train.yaml."""
    check_int(seed, "seed", least=0)
    counts = ["steps", "rows", "anchors", "max_length", "probe_every", "checkpoint_every", "warmup"]
    for key in [*counts, "accumulate", "keep", "patience"]:
        check_int(trainer[key], f"trainer.{key}")
    check_int(trainer["probe_prompts"], "trainer.probe_prompts", least=0)
    for key in ("pack", "threads"):
        if trainer[key] is not None:
            check_int(trainer[key], f"trainer.{key}")
    for key in ("learning_rate", "clip_norm", *(["clip_value"] if trainer["clip_value"] is not None else [])):
        if not check_float(trainer[key], f"trainer.{key}") > 0:
            raise InputError(f"trainer.{key}={trainer[key]} would learn nothing; it lies above 0")
    for key in ("weight_decay", "final_share"):
        if check_float(trainer[key], f"trainer.{key}") < 0:
            raise InputError(f"trainer.{key}={trainer[key]} is impossible; it is 0 or above")
    if not isinstance(trainer["compile"], str | None):
        raise InputError(
            f"trainer.compile={trainer['compile']} names no backend of torch.compile; it is inductor, or null for none"
        )
    betas = trainer["betas"]
    two = isinstance(betas, Sequence) and len(betas) == 2
    if not two or not all(0 <= check_float(beta, "trainer.betas") < 1 for beta in betas):
        raise InputError(f"trainer.betas={betas} is impossible; it is two numbers from 0 and below 1")
    minutes = trainer["checkpoint_minutes"]
    if minutes is not None and not check_float(minutes, "trainer.checkpoint_minutes") > 0:
        raise InputError(f"trainer.checkpoint_minutes={minutes} is impossible; it is above 0, or null for steps alone")
    # Last: the default of autocast asks torch what the device can do, and that import takes seconds.
    for key in ("prefetch", "autocast"):
        if not isinstance(trainer[key], bool):
            raise InputError(f"trainer.{key}={trainer[key]} is neither true nor false")
