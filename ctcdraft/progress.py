"""Progress lines of a long task: an estimate of the remaining minutes, and one line per minute in redirected output.

A terminal shows the progress bar of tqdm. In a file a line is written at most once per minute.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from time import monotonic

from tqdm import tqdm

LINE_INTERVAL = 60.0  # seconds between two lines


class Progress:
    """A count of finished items that writes how long the remaining ones will take at the rate so far.

    Args:
        total: items left to do in this process.
        unit: their name in the plural, such as "answers".
        first: number of items after which the first estimate is written, on a terminal too.
        before: items that an earlier process finished; they count in the lines, not in the rate.
        redirected: whether to write a line every minute; None: if stdout or stderr is not a terminal.
    """

    def __init__(
        self, total: int, unit: str, *, first: int = 1, before: int = 0, clock: Callable[[], float] = monotonic,
        write: Callable[[str], object] | None = None, redirected: bool | None = None,
    ) -> None:  # fmt: skip
        self.total, self.unit, self.first, self.before = total, unit, first, before
        self.done = 0
        self._clock, self._write = clock, write or write_line
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self._redirected = not terminal if redirected is None else redirected
        self._started_at = self._last_line_at = clock()
        self._estimated = False

    def begin(self) -> None:
        """Restart the clock, after a warm-up that does not count."""
        self._started_at = self._last_line_at = self._clock()

    def advance(self, items: int = 1) -> None:
        """Count finished items; write a line if the estimate is due, or a minute has passed since the last line."""
        # Lines come only with a finished item: a timer thread would disturb work whose time is measured.
        self.done += items
        now = self._clock()
        first = not self._estimated and self.done >= self.first
        self._estimated |= first
        if self.done < self.total and (first or (self._redirected and now - self._last_line_at >= LINE_INTERVAL)):
            self._last_line_at = now
            self._write(self.line(now - self._started_at))

    def line(self, seconds: float) -> str:
        """Return the progress line, `seconds` after the start."""
        remaining = self.total - self.done
        return (
            f"{self.before + self.done:,} of {self.before + self.total:,} {self.unit}, {format_minutes(seconds)} so "
            f"far; about {format_minutes(seconds / self.done * remaining)} for the remaining {remaining:,}"
        )


class RemainingTime:
    """Remaining time of a sweep with `jobs` runs at a time: unfinished runs times the mean time of those that ran."""

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
        seconds_left = statistics.mean(measured) * left / min(self.jobs, left)
        return f"{count}, about {format_minutes(seconds_left)} for the remaining {left}"


def format_minutes(seconds: float) -> str:
    """Format a duration:   3 -> 0.1 minutes    473 -> 7.9 minutes    7200 -> 120 minutes"""
    number = seconds / 60
    return f"{number:,.0f} minutes" if number >= 10 else f"{max(number, 0.1):.1f} minutes"


def write_line(line: str) -> None:
    tqdm.write(line)  # above the progress bar
    sys.stdout.flush()  # redirected output is buffered
