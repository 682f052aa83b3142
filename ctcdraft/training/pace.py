"""How fast a run goes and what it holds. It knows a clock and a meter; figures of one machine, never of the method."""

from __future__ import annotations

import resource
import sys
from time import perf_counter, process_time

import torch

MACHINE = ("tokens_per_second", "wall_seconds", "processor_seconds", "memory_bytes")  # in which equal runs may differ


class Pace:
    """Figures of one step, without the probes and checkpoints around it."""

    def __init__(self) -> None:
        self.began = perf_counter(), process_time()

    def metrics(self, tokens: int) -> dict[str, float]:
        """tokens_per_second: of text read, padding included. processor_seconds: of all threads of this process.
        memory_bytes: the most it ever held, on its device, or else at all."""
        wall, processor = perf_counter() - self.began[0], process_time() - self.began[1]
        return dict(zip(MACHINE, (tokens / wall, wall, processor, peak_memory()), strict=True))


def peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
