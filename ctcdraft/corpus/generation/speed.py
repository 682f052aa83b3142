"""Generation speed on this machine, measured by a short trial for the plan.

The trial generates a few tokens after prompts as long as the corpus's own, in batches that grow towards the real batch
size. One decoding step of a batch costs about as much as that of one row where memory bandwidth is the limit, and
proportionally to the rows where arithmetic is; so a trial with fewer rows gives bounds, not a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter

from ctcdraft import hardware

TRIAL_STEPS = 4  # tokens generated after each prompt, beyond the first
TRIAL_GROWTH = 4  # factor between the batch sizes of successive trials
MAX_TRIAL_SECONDS = 10.0  # for the next trial, if it takes TRIAL_GROWTH times as long as the last one


@dataclass(frozen=True)
class GenerationSpeed:
    """Measured speed.

    rows, batch: batch sizes of the trial and of the corpus. length: tokens of each prompt of the trial.
    read_seconds: per prompt token. step_seconds: per decoding step of all rows.
    """

    rows: int
    batch: int
    length: int
    read_seconds: float
    step_seconds: float

    def hours(self, read: float, steps: float, share: float = 1.0) -> tuple[float, float]:
        """Return lower and upper bound of the hours for a share of `read` prompt tokens and `steps` decoding steps.

        They are equal if the trial had as many rows as a batch. Otherwise a batch takes at least as long as the trial,
        and at most batch / rows times as long.
        """
        times = self.batch / self.rows
        reading, decoding = (share * one / 3600 for one in (read * self.read_seconds, steps * self.step_seconds))
        return reading / times + decoding, reading + decoding * times

    def describe(self, hours: tuple[float, float], each: str) -> str:
        """Return the bounds as text for the plan. each: inserted after the hours, such as " for each of 4 shards"."""
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
            f"a trial of {self.rows}{of} rows of {self.length:,} tokens: {self.read_seconds * 1e3:.3g} ms per prompt "
            f"token, {self.step_seconds * 1e3:.3g} ms per decoding step of all rows"
        )


def turns_of_all_batches(turns: Sequence[int], rows: int) -> int:
    """Return the sum over all batches of the turns of their longest sample; a small batch counts like a full one.

    turns of 1, 3 and 1, two rows per batch   ->   3 of the first batch, 1 of the second

    Args:
        turns: of every sample; batches are made in descending order of turns.
    """
    return sum(sorted(turns, reverse=True)[::rows])


def repeat_to_length(prompts: Sequence[Sequence[int]], rows: int, length: int) -> list[list[int]]:
    """Return `rows` prompts, each repeated to `length` tokens; their content does not affect the time.

    [1, 2, 3] and [4], three rows of four tokens   ->   1 2 3 1, 4 4 4 4, 1 2 3 1
    """
    return [[*islice(cycle(prompt), max(1, length))] for prompt in islice(cycle(prompts), rows)]


def measure_speed(
    generate: Callable[[list[list[int]], int], object], prompts: Sequence[Sequence[int]], context: int
) -> GenerationSpeed:
    """Return the speed of generate(prompts, n), which generates n tokens after each prompt as one batch.

    The result is that of the largest affordable batch size. The first call of every size is a warm-up, in which kernels
    are chosen and weights are read from disk.

    Args:
        prompts: one for each row of a real batch.
    """
    rows = [list(prompt[-max(1, context - 1 - TRIAL_STEPS) :]) for prompt in prompts]
    size = 1
    while True:
        batch = rows[:size]
        generate(batch, 2)
        first, whole = timed_call(generate, batch, 1), timed_call(generate, batch, 1 + TRIAL_STEPS)
        if size == len(rows) or TRIAL_GROWTH * (2 * first + whole) > MAX_TRIAL_SECONDS:
            length = max(map(len, batch))
            # On a tiny base model timing noise may exceed a step; then the average step is taken.
            step = (whole - first) / TRIAL_STEPS if whole > first else whole / (1 + TRIAL_STEPS)
            return GenerationSpeed(size, len(rows), length, first / (size * length), step)
        size = min(TRIAL_GROWTH * size, len(rows))


def timed_call(generate: Callable[[list[list[int]], int], object], batch: list[list[int]], tokens: int) -> float:
    start = perf_counter()
    generate(batch, tokens)
    return perf_counter() - start
