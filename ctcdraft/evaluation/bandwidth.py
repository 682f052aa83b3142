"""What the machine could do at best: bytes a pass must stream, and bytes a second. It knows nothing of drafts."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from ctcdraft.evaluation.profiling import PhaseTimes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import storage_tensors

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # bytes: far beyond any cache, and milliseconds to copy

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # rows and columns: a fraction of a second on either


def weight_bytes(base: BaseLM) -> int:
    """Every parameter once a pass, but not the input embeddings, of which a pass reads N rows.

    Where head and embeddings are tied they are one parameter, and the head reads it whole.
    """
    parameters = {id(weight): weight for weight in base.lm.parameters()}
    head = base.head.weight
    looked_up = base.embedding.weight
    return sum(storage_bytes(weight) for weight in parameters.values() if weight is head or weight is not looked_up)


def storage_bytes(weight: Any) -> int:
    """Of a quantised weight the bytes of what it is made of: by its face, torchao's int8 is as wide as bfloat16."""
    return sum(part.numel() * part.element_size() for part in storage_tensors(weight))


def count_matmul_weights(base: BaseLM) -> int:
    """Weights that every node read is multiplied by: all but the embeddings, unless they are the head too.

    Counted by what a layer takes and gives, because quantised weights are packed, two and more in a byte.
    """
    count = 0
    for module in base.lm.modules():
        own = dict(module.named_parameters(recurse=False))
        if hasattr(module, "in_features"):
            own.pop("weight", None)
            count += module.in_features * module.out_features
        if module is not base.embedding:
            count += sum(weight.numel() for weight in own.values())
    return count


def copy_bandwidth(device: torch.device, rounds: int = 5) -> float:
    """Bytes a second of a large copy, read and written both counted: the best of some rounds after a first."""
    source = torch.ones(COPY_BYTES.get(device.type, 2**28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds + 1):
        began = perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return 2 * source.numel() / min(seconds[1:])


def matmul_rate(base: BaseLM, rounds: int = 5) -> float:
    """Operations a second of a square product in the base's dtype, an addition and a product each: the best of some."""
    device = base.device
    size = MATMUL_SIZE.get(device.type, 1024)
    left, right = torch.ones(2, size, size, dtype=base.dtype, device=device)
    seconds = []
    for _ in range(rounds + 1):
        began = perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return 2 * size**3 / min(seconds[1:])


def bandwidth_utilization(spent: PhaseTimes, weight_bytes: int, bandwidth: float) -> float | None:
    """How near the reads come to the memory's limit: the least possible time of a read / its measured time."""
    if not spent.passes or not spent.seconds["read"]:
        return None
    least = (weight_bytes * spent.passes + spent.kv_bytes) / bandwidth
    return least / spent.seconds["read"]
