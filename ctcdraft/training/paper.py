"""The plan of a training whose base is not here: drafter and objective run on sizes alone. It measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from ctcdraft import duration
from ctcdraft.base import BaseLM
from ctcdraft.corpus.parts import Manifest
from ctcdraft.corpus.plan import states_bytes
from ctcdraft.corpus.work import Work
from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.machine import spelled
from ctcdraft.objectives.objective import Objective
from ctcdraft.rate import UNKNOWN, Rate
from ctcdraft.size import Size
from ctcdraft.training.cost import batch_without_values, counted, disk, held, memory
from ctcdraft.training.plan import reading, unread


@dataclass(frozen=True)
class Told:
    """A corpus in numbers: its answers, and their tokens with the prompts before them. source: who says so."""

    answers: int
    tokens: int
    longest: int
    source: str

    @classmethod
    def from_manifest(cls, manifest: Manifest, longest: int) -> Self:
        counts = manifest["counts"]
        return cls(counts["answers"], counts["tokens"], longest, f"as prepared for {manifest['base']['base']}")

    @classmethod
    def from_work(cls, work: Work) -> Self:
        return cls(work.turns, work.tokens, work.longest, "at most, as planned above")


@dataclass(frozen=True)
class Laid:
    """How the answers lie in a batch. rows of `length` tokens, of which each has `anchors` windows, with so many
    answers behind one another in each; longest: of all rows, which sets the memory."""

    rows: int
    length: int
    longest: int
    anchors: int
    answers_per_row: int

    @classmethod
    def of(cls, base: BaseLM, labels: int, corpus: Told, settings: Any) -> Self:
        """The mean row sets operations, the longest one memory. A pack is taken to be as full as whole mean answers
        make it."""
        longest = min(settings.max_length, base.context_length, corpus.longest)
        mean = max(1, min(longest, corpus.tokens // corpus.answers))
        answers_a_row = 1 if settings.pack is None else max(1, settings.pack // mean)
        length = max(labels + 2, answers_a_row * mean)
        longest = max(longest, settings.pack or 0, length)
        rows = min(settings.rows, ceil(corpus.answers / answers_a_row))
        return cls(rows, length, longest, min(settings.anchors, length), answers_a_row)


@dataclass(frozen=True)
class Operations:
    """Of a batch for the head (step), for the base to read that batch (live), and to read the corpus once."""

    step: float
    online_reading: float
    corpus_reading: float

    @classmethod
    def of(cls, base: BaseLM, corpus: Told, shape: Laid, step: float) -> Self:
        size, context = Size.of(base), shape.length / 2
        return cls(step, size.prefill_flops(shape.rows * shape.length, context), size.prefill_flops(corpus.tokens, context))

    def seconds(self, batches: int, rate: Rate) -> tuple[float, float] | None:
        """Of so many batches in one process, with states=live and with stored; None where the rate is not known.

        Several processes share the batches, while one of them reads the corpus for all.
        """
        live, stored = rate.seconds(batches * (self.step + self.online_reading)), rate.seconds(batches * self.step + self.corpus_reading)
        return None if live is None or stored is None else (live, stored)


def operations(base: BaseLM, drafter: DraftHead, objective: Objective, corpus: Told, settings: Any) -> Operations:
    """The part of a plan that hours are made of."""
    shape = Laid.of(base, objective.labels, corpus, settings)
    batch = batch_without_values(base, shape.rows, shape.length, shape.anchors, objective.labels)
    return Operations.of(base, corpus, shape, counted(drafter, objective, batch)[0])


def peak_bytes(base: BaseLM, drafter: DraftHead, objective: Objective, corpus: Told, settings: Any) -> int:
    """The part of a plan that a card's memory is held to: of the longest rows, as `plan` says it in words."""
    batch_shape = Laid.of(base, objective.labels, corpus, settings)
    largest = batch_without_values(base, batch_shape.rows, batch_shape.longest, batch_shape.anchors, objective.labels)
    _, saved_bytes, shape = counted(drafter, objective, largest)
    trained = sum(value.numel() for value in drafter.trainable_parameters())
    emission_bytes = batch_shape.rows * batch_shape.anchors * shape[2] * (base.vocabulary + 1) * 4
    return sum(held(Size.of(base), trained, largest, saved_bytes, emission_bytes).values())


def plan(
    base: BaseLM, drafter: DraftHead, objective: Objective, corpus: Told, settings: Any, rate: Rate, world: int = 1
) -> str:
    """settings: steps, accumulate, rows, anchors, pack and max_length, as under `trainer`. world: how many processes
    share the batches of a step; memory is that of each, and hours are those that all of them take together."""
    size, batch_shape = Size.of(base), Laid.of(base, objective.labels, corpus, settings)
    batches = settings.steps * settings.accumulate
    batch = batch_without_values(base, batch_shape.rows, batch_shape.length, batch_shape.anchors, objective.labels)
    step, _, shape = counted(drafter, objective, batch)
    largest = batch_without_values(base, batch_shape.rows, batch_shape.longest, batch_shape.anchors, objective.labels)
    _, saved_bytes, _ = counted(drafter, objective, largest)
    needed = Operations.of(base, corpus, batch_shape, step)
    trained = sum(value.numel() for value in drafter.trainable_parameters())
    emission_bytes = batch_shape.rows * batch_shape.anchors * shape[2] * (base.vocabulary + 1) * 4
    epochs = batches * batch_shape.rows * batch_shape.answers_per_row / corpus.answers
    several = "" if settings.accumulate == 1 else f"{settings.accumulate} x "
    sizes = ", ".join(f"{spelled(count)} as {name}" for name, count in states_bytes(corpus.tokens, size).items())
    return "\n".join(
        [
            f"drafter     {trained:,} trainable parameters",
            f"corpus      {corpus.answers:,} answers, {corpus.tokens:,} tokens ({corpus.source})",
            f"steps       {settings.steps:,} of {several}{batch_shape.rows} rows x {batch_shape.anchors} anchors, "
            f"{epochs:.1f} epochs",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB a step if they were kept whole (they are not)",
            f"frames      {reading(objective, drafter, shape[2])}",
            f"states      0 bytes where states=live; {sizes} where stored{unread(base, drafter)}",
            f"disk        {disk(trained)}",
            f"work        {step:.3g} operations a batch of the head, and {needed.online_reading:.3g} for the base to read "
            f"{batch_shape.rows} rows of {batch_shape.length:,} tokens where live; where stored, "
            f"{needed.corpus_reading:.3g} to read the corpus once",
            f"memory      {memory(size, trained, largest, saved_bytes, emission_bytes)}",
            f"time        {hours(needed.seconds(batches // world, rate), rate, world)}",
        ]
    )


def hours(seconds: tuple[float, float] | None, rate: Rate, world: int) -> str:
    if seconds is None:
        return UNKNOWN
    both = [duration.spelled(one / 3600) for one in seconds]
    shared = f", shared by {world} processes" if world > 1 else ""
    return f"about {both[0]} with states=live, {both[1]} with stored{shared}, {rate}; without probes"
