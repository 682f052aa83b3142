"""Outputs of reference implementations, run outside of the repository; tests/golden/README.md says how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden"


def load_golden(name: str) -> dict[str, Tensor]:
    """Return the tensors of a golden file, which must say what was run, at which commit and under which license."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        assert {"source", "commit", "license", "run"} <= set(file.metadata())
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


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
