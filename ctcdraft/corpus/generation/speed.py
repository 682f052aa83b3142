"""The time that answers take on this machine, from a short trial.

The trial generates a few tokens after prompts as long as the corpus's own texts, in a batch that grows to the size of
the real ones. A step of a batch costs about as much as a step of one row where reading the weights is the limit, and
rows times as much where arithmetic is; so a trial of fewer rows bounds the time and does not predict it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter

from ctcdraft import hardware

TRIAL_STEPS = 4  # tokens generated after each prompt, beyond the first
TRIAL_GROWTH = 4  # times as many rows in the next trial
MAX_TRIAL_SECONDS = 10.0  # seconds that the next trial may take, should it take GROWTH times as long as the last one


@dataclass(frozen=True)
class GenerationSpeed:
    """rows: of the batch that was tried; batch: of the real ones. length: tokens of each prompt in it. read_seconds: of
    one prompt token in it; step_seconds: of one more token in every row."""

    rows: int
    batch: int
    length: int
    read_seconds: float
    step_seconds: float

    def hours(self, read: float, steps: float, share: float = 1.0) -> tuple[float, float]:
        """Return the least and the most that a share of so many prompt tokens and steps of a whole batch takes.

        Both are equal where the trial had as many rows as a batch. Of fewer rows: a whole batch takes no less than the
        one that was tried, and no more than as many of those as it is made of.
        """
        times = self.batch / self.rows
        reading, saying = (share * one / 3600 for one in (read * self.read_seconds, steps * self.step_seconds))
        return reading / times + saying, reading + saying * times

    def describe(self, hours: tuple[float, float], each: str) -> str:
        """Return the hours in words; each: whose they are, behind the number."""
        least, most = map(hardware.format_hours, hours)
        if self.rows == self.batch:
            return f"at most about {most}{each} ({self})"
        return (
            f"at most about {least}{each} if {self.batch} rows take no longer than {self.rows}, and {most} if they "
            f"take {self.batch / self.rows:.3g} times as long ({self}; more rows would have taken long to try)"
        )

    def __str__(self) -> str:
        of = "" if self.rows == self.batch else f" of {self.batch}"
        return (
            f"a trial of {self.rows}{of} rows of {self.length:,} tokens: {self.read_seconds * 1e3:.3g} ms a prompt "
            f"token, {self.step_seconds * 1e3:.3g} ms for a token in every row"
        )


def turns_of_all_batches(turns: Sequence[int], rows: int) -> int:
    """Return how many turns all batches go through: a batch lasts as long as its longest dialogue, and a small one as
    long as a full one. turns: of every dialogue; batches are made of those of most turns first.

    turns of 1, 3 and 1, two rows a batch   ->   3 of the first batch, 1 of the second
    """
    return sum(sorted(turns, reverse=True)[::rows])


def repeat_to_length(prompts: Sequence[Sequence[int]], rows: int, length: int) -> list[list[int]]:
    """Return prompts for so many rows, each repeated up to so many tokens; what they say takes no time.

    [1, 2, 3] and [4], three rows of four tokens   ->   1 2 3 1, 4 4 4 4, 1 2 3 1
    """
    return [[*islice(cycle(prompt), max(1, length))] for prompt in islice(cycle(prompts), rows)]


def measure_speed(
    say: Callable[[list[list[int]], int], object], prompts: Sequence[Sequence[int]], context: int
) -> GenerationSpeed:
    """Return the pace of `say(prompts, n)`, which generates n tokens after each prompt as one batch.

    prompts: one for each row of a real batch. Batches of fewer rows come first, and the largest that is affordable
    counts; of every size a first call is thrown away, in which kernels are chosen and weights come from the disk.
    """
    rows = [list(prompt[-max(1, context - 1 - TRIAL_STEPS) :]) for prompt in prompts]
    size = 1
    while True:
        batch = rows[:size]
        say(batch, 2)
        first, whole = timed_call(say, batch, 1), timed_call(say, batch, 1 + TRIAL_STEPS)
        if size == len(rows) or TRIAL_GROWTH * (2 * first + whole) > MAX_TRIAL_SECONDS:
            length = max(map(len, batch))
            # On a tiny base noise may exceed a step; then a step is taken to last as long as the average one.
            step = (whole - first) / TRIAL_STEPS if whole > first else whole / (1 + TRIAL_STEPS)
            return GenerationSpeed(size, len(rows), length, first / (size * length), step)
        size = min(TRIAL_GROWTH * size, len(rows))


def timed_call(say: Callable[[list[list[int]], int], object], batch: list[list[int]], tokens: int) -> float:
    began = perf_counter()
    say(batch, tokens)
    return perf_counter() - began
