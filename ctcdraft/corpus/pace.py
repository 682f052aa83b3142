"""How fast this machine answers, by a short trial. It knows batches and a clock, not what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

STEPS = 4  # words that are said after each prompt, beyond the first
PROMPT = 32  # tokens of a prompt that are read
ENOUGH = 0.5  # seconds: a trial that took as long is not made larger, so a slow machine is not kept busy


@dataclass(frozen=True)
class Pace:
    """rows: of the batch that was tried. read_seconds: of one prompt token in it; step_seconds: of one more word in
    every row. Texts were short, so long ones are a little slower."""

    rows: int
    read_seconds: float
    step_seconds: float

    def seconds(self, read: float, said: float) -> float:
        """What so many tokens of prompts and of answers take in batches like the one tried."""
        return read * self.read_seconds + said / self.rows * self.step_seconds

    def __str__(self) -> str:
        return (
            f"a trial of {self.rows} rows: {self.read_seconds * 1e3:.3g} ms a prompt token, "
            f"{self.step_seconds * 1e3:.3g} ms for a word in every row"
        )


def tried(
    say: Callable[[list[list[int]], int], object], prompts: Sequence[Sequence[int]], context: int, rows: int
) -> Pace:
    """say(prompts, n) says n words after each prompt as one batch, which grows to `rows` unless that takes long.

    The first, of one row, warms the machine for the others.
    """
    short = [list(prompt[-min(PROMPT, context // 2) :]) for prompt in prompts]
    size = 1
    while True:
        batch = [short[n % len(short)] for n in range(size)]
        first, all_words = clocked(say, batch, 1), clocked(say, batch, 1 + STEPS)
        if size >= rows or first + all_words > ENOUGH:
            read = size * max(map(len, batch))
            # On a tiny base noise may exceed a step; then a step is taken to last as long as the average one.
            step = (all_words - first) / STEPS if all_words > first else all_words / (1 + STEPS)
            return Pace(size, first / read, step)
        size = min(4 * size, rows)


def clocked(say: Callable[[list[list[int]], int], object], batch: list[list[int]], words: int) -> float:
    began = perf_counter()
    say(batch, words)
    return perf_counter() - began
