"""What a training step costs, counted and not timed. It knows a drafter and an objective by their operations alone."""

from __future__ import annotations

from collections.abc import Callable
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
BYTES_PER_TRAINED_PARAMETER = 16  # bytes: weight, gradient and AdamW's two moments, in float32; Muon has one moment


def count_saved_bytes(forward: Callable[[], ForwardResult]) -> tuple[ForwardResult, int]:
    """What `forward` makes, and the bytes it keeps for its backward pass: every tensor once, parameters not at all."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            saved[id(owner)] = owner  # held, so that no other tensor can come to have its id
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(owner.nbytes for owner in saved.values())


def step_flops_and_bytes(drafter: DraftHead, objective: Objective, batch: Batch) -> tuple[float, int, tuple[int, ...]]:
    """Operations of one step, bytes its forward pass keeps, and the shape of the frames' states_BATD.

    Tensors on the meta device do: the code of a real step runs, and computes nothing.
    """
    drafter.zero_grad(set_to_none=True)
    # Attention written out: not every fused kernel is counted, and each keeps what it likes.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:

        def forward() -> tuple[Any, Tensor]:
            emissions = drafter(batch)
            return emissions, objective(emissions, batch).value

        (emissions, value), saved_bytes = count_saved_bytes(forward)
        value.backward()
    drafter.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()), saved_bytes, tuple(emissions.states_BATD.shape)


def meta_batch(base: BaseLM, rows: int, length: int, anchors: int, labels: int) -> Batch:
    """The sizes of a batch; its tensors hold nothing."""
    with torch.device("meta"):
        tokens_BL = torch.empty(rows, length, dtype=torch.long)
        states_BLD = torch.empty(rows, length, base.width * len(base.taps), dtype=base.dtype)
        windows_BA = torch.empty(rows, anchors, dtype=torch.long)
        labels_BAS = torch.empty(rows, anchors, labels, dtype=torch.long)
    return Batch(tokens_BL, states_BLD, windows_BA, windows_BA, labels_BAS, windows_BA, position_ids_BL=tokens_BL)


def peak_memory_parts(size: ModelStats, trained: int, batch: Batch, kept: int, emission_bytes: int) -> dict[str, int]:
    """Bytes at the peak, by what they are for. The base reads before the head steps, so their sum is a bound."""
    rows, length = batch.tokens_BL.shape
    return {
        "weights": size.weight_bytes,
        "head with gradients and moments": trained * BYTES_PER_TRAINED_PARAMETER,
        "reading": size.activation_bytes(rows, length),
        "states": batch.states_BLD.nbytes,
        "step": kept,
        "logits": min(emission_bytes, CHUNK_BYTES),
    }


def describe_memory(size: ModelStats, trained: int, batch: Batch, kept: int, emission_bytes: int) -> str:
    """The same in words."""
    rows, length = batch.tokens_BL.shape
    parts = peak_memory_parts(size, trained, batch, kept, emission_bytes)
    what = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    return f"at most about {format_bytes(sum(parts.values()))} at the peak: {what} ({rows} rows of {length:,} tokens)"


def describe_disk(trained: int) -> str:
    """Of a run: the head, and the state to resume from, which is the head again and its two moments."""
    return f"about {format_bytes(trained * BYTES_PER_TRAINED_PARAMETER)} for the run"
