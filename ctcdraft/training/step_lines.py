"""One line a minute of a training run whose output is redirected; a terminal has tqdm's bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ctcdraft.progress import Progress, written


class StepLines:
    """The steps of this process, with the loss and the tokens a second of the newest.

    "120 of 2,000 steps, 1.0 minutes so far; about 15.7 minutes for the remaining 1,880; loss 3.210, 812 tokens/s"
    """

    def __init__(self, first: int, steps: int, clock: Callable[[], float]) -> None:
        self._figures: Mapping[str, Any] = {}
        # No estimate before the first minute: the plan has just told one.
        self._progress = Progress(steps - first, "steps", first=steps + 1, before=first, clock=clock, write=self._write)

    def run_ended(self, figures: Mapping[str, Any]) -> None:
        """Count a step, with its figures; write a line if a minute has passed since the last."""
        self._figures = figures
        self._progress.advance()

    def _write(self, line: str) -> None:
        written(f"{line}; loss {self._figures['loss']:.3f}, {self._figures['tokens_per_second']:,.0f} tokens/s")
