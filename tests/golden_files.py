"""Outputs of reference implementations, run outside of the repository; tests/golden/README.md says how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter

GOLDEN = Path(__file__).parent / "golden"


def load_golden(name: str) -> dict[str, Tensor]:
    """Return the tensors of a golden file, which must say what was run, at which commit and under which license."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        assert {"source", "commit", "license", "run"} <= set(file.metadata())
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def configured_drafter(method: str, base: Any, *overrides: str) -> Any:
    """Return an untrained drafter of configs/drafter, so that a changed setting there no longer fits the reference."""
    return build_drafter(compose_config("train", f"drafter={method}", *overrides).drafter, base)


@torch.no_grad()
def load_mapped(module: nn.Module, tensors: Mapping[str, Tensor], mapping: Mapping[str, str]) -> None:
    """Write the reference's weights into a module. mapping: their names -> our names.

    Every weight of the reference must be mapped, and every trainable weight of ours filled.
    """
    ours = {name: value for name, value in module.named_parameters() if value.requires_grad}
    assert set(mapping) == set(tensors), set(mapping) ^ set(tensors)
    assert sorted(mapping.values()) == sorted(ours), set(mapping.values()) ^ set(ours)
    for theirs, name in mapping.items():
        assert tensors[theirs].shape == ours[name].shape, (theirs, name)
        ours[name].copy_(tensors[theirs])
