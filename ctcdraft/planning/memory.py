"""Operations and memory of a training step, counted on real or meta tensors rather than timed.

On the meta device the code of a real step runs on shapes and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ctcdraft.batch import Batch
from ctcdraft.drafters.base import DraftHead
from ctcdraft.hardware import format_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.stats import ModelStats
from ctcdraft.nn.heads import CHUNK_BYTES
from ctcdraft.objectives.base import Objective

ForwardResult = TypeVar("ForwardResult")
BYTES_PER_TRAINED_PARAMETER = 16  # weight, gradient and AdamW's two moments in float32; Muon has one moment


def count_saved_bytes(forward: Callable[[], ForwardResult]) -> tuple[ForwardResult, int]:
    """Return the result of `forward`, and the bytes autograd saves for its backward pass.

    A tensor that is saved twice counts once; parameters do not count.
    """
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            saved[id(owner)] = owner  # kept alive, so that no other tensor can get its id
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(owner.nbytes for owner in saved.values())


def step_flops_and_bytes(drafter: DraftHead, objective: Objective, batch: Batch) -> tuple[float, int, tuple[int, ...]]:
    """Return operations of one step, bytes saved by its forward pass, and the shape of its frame states_BATD."""
    drafter.zero_grad(set_to_none=True)
    # Unfused attention: not every fused kernel is counted, and they save different tensors.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:

        def forward() -> tuple[Any, Tensor]:
            emissions = drafter(batch)
            return emissions, objective(emissions, batch).value

        (emissions, value), saved_bytes = count_saved_bytes(forward)
        value.backward()
    drafter.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()), saved_bytes, tuple(emissions.states_BATD.shape)


def meta_batch(base: BaseLM, rows: int, length: int, anchors: int, labels: int) -> Batch:
    """Return a batch of meta tensors, which has shapes and no values."""
    with torch.device("meta"):
        tokens_BL = torch.empty(rows, length, dtype=torch.long)
        states_BLD = torch.empty(rows, length, base.width * len(base.aux_layers), dtype=base.dtype)
        windows_BA = torch.empty(rows, anchors, dtype=torch.long)
        labels_BAS = torch.empty(rows, anchors, labels, dtype=torch.long)
    return Batch(tokens_BL, states_BLD, windows_BA, windows_BA, labels_BAS, windows_BA, position_ids_BL=tokens_BL)


@dataclass(frozen=True)
class StepMemory:
    """Memory of a training step; str() describes it.

    Args:
        size: of the base model.
        trained: number of trained parameters.
        batch: what the step reads.
        saved_bytes: saved by the head's forward pass for the backward pass.
        emission_bytes: of all emissions of the batch, which are computed in chunks.
    """

    size: ModelStats
    trained: int
    batch: Batch
    saved_bytes: int
    emission_bytes: int

    def parts(self) -> dict[str, int]:
        """Return bytes by purpose; their sum is a bound, as the base model's activations are freed before the step."""
        return {
            "weights": self.size.weight_bytes,
            "head with gradients and moments": self.trained * BYTES_PER_TRAINED_PARAMETER,
            "reading": self.size.activation_bytes(*self.batch.tokens_BL.shape),
            "states": self.batch.states_BLD.nbytes,
            "step": self.saved_bytes,
            "logits": min(self.emission_bytes, CHUNK_BYTES),
        }

    def __str__(self) -> str:
        (rows, length), parts = self.batch.tokens_BL.shape, self.parts()
        by_purpose = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
        total = format_bytes(sum(parts.values()))
        return f"at most about {total} at the peak: {by_purpose} ({rows} rows of {length:,} tokens)"


def describe_disk(trained: int) -> str:
    """Return the disk space of a run: the head, and a saved state with the head again and its two moments."""
    return f"about {format_bytes(trained * BYTES_PER_TRAINED_PARAMETER)} for the run"
