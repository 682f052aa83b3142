"""Time that the unfinished runs of a sweep or a search will take: their number times the mean of those that ran."""

from __future__ import annotations

from statistics import mean

from ctcdraft.progress import minutes


class Remaining:
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
        return f"{count}, about {minutes(mean(measured) * left / min(self.jobs, left))} for the remaining {left}"
