"""Progress of a long task in plain lines: the minutes left, and one line a minute where the output is redirected.

A terminal shows tqdm's bar, which draws over itself. In a file every line stays, so one is written at most once a
minute, and only when an item has been finished: a timer of its own would run beside work whose time is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic

from tqdm import tqdm

LINE_INTERVAL = 60.0  # seconds between two lines


class Progress:
    """Counts finished items and writes how long the remaining ones will take at the rate seen so far.

    Args:
        items: how many are left to do in this process.
        unit: what they are, in the plural: "answers".
        first: the estimate comes after so many items, on a terminal too.
        before: how many an earlier process has finished; they are counted in the lines, not in the rate.
        clock: seconds that never fall.
        write: takes a line without its end.
        redirected: whether a line is due every minute; None: where stdout or stderr is no terminal.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        first: int = 1,
        before: int = 0,
        clock: Callable[[], float] = monotonic,
        write: Callable[[str], object] | None = None,
        redirected: bool | None = None,
    ) -> None:
        self.total, self.unit, self.first, self.before = total, unit, first, before
        self.done = 0
        self._clock, self._write = clock, write or write_line
        self._redirected = not is_terminal() if redirected is None else redirected
        self._started_at = self._last_line_at = clock()
        self._estimated = False

    def begin(self) -> None:
        """Start the clock anew, after a warm-up that will not come again."""
        self._started_at = self._last_line_at = self._clock()

    def advance(self, items: int = 1) -> None:
        """Count finished items; write a line if the estimate is due, or a minute has passed since the last line."""
        self.done += items
        now = self._clock()
        first = not self._estimated and self.done >= self.first
        self._estimated |= first
        if self.done < self.total and (first or (self._redirected and now - self._last_line_at >= LINE_INTERVAL)):
            self._last_line_at = now
            self._write(self.line(now - self._started_at))

    def line(self, seconds: float) -> str:
        """Return the line of this state, `seconds` after the beginning."""
        remaining = self.total - self.done
        return (
            f"{self.before + self.done:,} of {self.before + self.total:,} {self.unit}, {format_minutes(seconds)} so "
            "far; "
            f"about {format_minutes(seconds / self.done * remaining)} for the remaining {remaining:,}"
        )


def format_minutes(seconds: float) -> str:
    """Return a duration as people read it.

    3 -> 0.1 minutes    473 -> 7.9 minutes    7200 -> 120 minutes
    """
    number = seconds / 60
    return f"{number:,.0f} minutes" if number >= 10 else f"{max(number, 0.1):.1f} minutes"


def write_line(line: str) -> None:
    """Print above a bar, and at once: a redirected output is buffered."""
    tqdm.write(line)
    sys.stdout.flush()


def is_terminal() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()
