"""Progress of training: time and memory of a step, one line per minute, remaining time of a sweep.

Lines are for redirected output; a terminal has tqdm's bar.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from statistics import mean
from time import perf_counter, process_time
from typing import Any

from ctcdraft.progress import Progress, format_minutes, write_line

MACHINE_METRICS = (
    "tokens_per_second",
    "wall_seconds",
    "processor_seconds",
    "memory_bytes",
)  # equal runs may differ in these


class StepTimer:
    """Time of one step, without the validation and checkpoint after it."""

    def __init__(self) -> None:
        self.began = perf_counter(), process_time()

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return MACHINE_METRICS since the start. tokens: that the step read, padding included.

        processor_seconds is the time of all threads; memory_bytes is the peak of the process, on a GPU if it uses one.
        """
        wall, processor = perf_counter() - self.began[0], process_time() - self.began[1]
        return dict(zip(MACHINE_METRICS, (tokens / wall, wall, processor, peak_memory()), strict=True))


def peak_memory() -> int:
    """Return the most bytes this process has held: allocated on its GPU if it uses one, else resident."""
    import torch  # here, because a command line is checked before torch is imported

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class RemainingTime:
    """Remaining time of a sweep: the number of unfinished runs times the mean time of those that ran.

    Args:
        runs: of the whole sweep.
        jobs: runs at the same time.
    """

    def __init__(self, runs: int, jobs: int = 1) -> None:
        self.runs, self.jobs = runs, jobs
        self._ended: list[float | None] = []  # an append is atomic: trials end in threads

    def run_ended(self, seconds: float | None) -> str:
        """Count a run and describe the rest. seconds: None for a run that failed or had nothing to do."""
        self._ended.append(seconds)
        ended = list(self._ended)
        measured, left = [each for each in ended if each is not None], self.runs - len(ended)
        count = f"{len(ended)} of {self.runs} done"
        if left <= 0 or not measured:
            return count
        return f"{count}, about {format_minutes(mean(measured) * left / min(self.jobs, left))} for the remaining {left}"


class ProgressLines:
    """One line per minute on the steps taken, the remaining time, and the loss and speed of the newest step.

    "120 of 2,000 steps, 1.0 minutes so far; about 15.7 minutes for the remaining 1,880; loss 3.210, 812 tokens/s"
    """

    def __init__(self, first: int, steps: int, clock: Callable[[], float]) -> None:
        self._metrics: Mapping[str, Any] = {}
        # No estimate in the first minute: the plan has just printed one.
        self._progress = Progress(steps - first, "steps", first=steps + 1, before=first, clock=clock, write=self._write)

    def step_done(self, metrics: Mapping[str, Any]) -> None:
        """Count a step; write a line if a minute has passed since the last one."""
        self._metrics = metrics
        self._progress.advance()

    def _write(self, line: str) -> None:
        write_line(f"{line}; loss {self._metrics['loss']:.3f}, {self._metrics['tokens_per_second']:,.0f} tokens/s")
