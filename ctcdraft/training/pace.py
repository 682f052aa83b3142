"""How fast a run goes and what it holds. It knows a clock and a meter; figures of one machine, never of the method."""

from __future__ import annotations

import resource
import sys
from time import perf_counter

import torch

MACHINE = ("tokens_per_second", "memory_bytes")  # what two equal runs may differ in


class Pace:
    """Figures since it was last asked."""

    def __init__(self) -> None:
        self.since = perf_counter()

    def figures(self, tokens: int) -> dict[str, float]:
        """tokens_per_second: of text read, padding included; probes and checkpoints count as time that passed.
        memory_bytes: the most this process ever held, on its device, or else at all."""
        now = perf_counter()
        seconds, self.since = now - self.since, now
        return dict(zip(MACHINE, (tokens / seconds, peak_memory()), strict=True))


def peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
