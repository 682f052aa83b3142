"""How fast a run goes and what it holds. It knows a clock and a meter; figures of one machine, never of the method.

Time that the unfinished runs of a sweep or a search will take: their number times the mean of those that ran.

One line a minute of a training run whose output is redirected; a terminal has tqdm's bar.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import torch

from ctcdraft.progress import Progress, format_minutes, write_line

MACHINE_METRICS = (
    "tokens_per_second",
    "wall_seconds",
    "processor_seconds",
    "memory_bytes",
)  # in which equal runs may differ


class StepTimer:
    """Figures of one step, without the probes and checkpoints around it."""

    def __init__(self) -> None:
        self.began = perf_counter(), process_time()

    def metrics(self, tokens: int) -> dict[str, float]:
        """tokens_per_second: of text read, padding included. processor_seconds: of all threads of this process.
        memory_bytes: the most it ever held, on its device, or else at all."""
        wall, processor = perf_counter() - self.began[0], process_time() - self.began[1]
        return dict(zip(MACHINE_METRICS, (tokens / wall, wall, processor, peak_memory()), strict=True))


def peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class RemainingTime:
    """Counts runs of about the same length.

    Args:
        runs: how many there are in all.
        jobs: how many of them run side by side.
    """

    def __init__(self, runs: int, jobs: int = 1) -> None:
        self.runs, self.jobs = runs, jobs
        self._ended: list[float | None] = []  # an append is atomic: trials end in threads

    def run_ended(self, seconds: float | None) -> str:
        """Return what is left after one more run; seconds: None of one that failed or had nothing to do."""
        self._ended.append(seconds)
        ended = list(self._ended)
        measured, left = [each for each in ended if each is not None], self.runs - len(ended)
        count = f"{len(ended)} of {self.runs} done"
        if left <= 0 or not measured:
            return count
        return f"{count}, about {format_minutes(mean(measured) * left / min(self.jobs, left))} for the remaining {left}"


class ProgressLines:
    """The steps of this process, with the loss and the tokens a second of the newest.

    "120 of 2,000 steps, 1.0 minutes so far; about 15.7 minutes for the remaining 1,880; loss 3.210, 812 tokens/s"
    """

    def __init__(self, first: int, steps: int, clock: Callable[[], float]) -> None:
        self._figures: Mapping[str, Any] = {}
        # No estimate before the first minute: the plan has just told one.
        self._progress = Progress(steps - first, "steps", first=steps + 1, before=first, clock=clock, write=self._write)

    def step_done(self, figures: Mapping[str, Any]) -> None:
        """Count a step, with its figures; write a line if a minute has passed since the last."""
        self._figures = figures
        self._progress.advance()

    def _write(self, line: str) -> None:
        write_line(f"{line}; loss {self._figures['loss']:.3f}, {self._figures['tokens_per_second']:,.0f} tokens/s")
