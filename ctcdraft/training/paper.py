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
    def by_manifest(cls, manifest: Manifest, longest: int) -> Self:
        counts = manifest["counts"]
        return cls(counts["answers"], counts["tokens"], longest, f"as prepared for {manifest['base']['base']}")

    @classmethod
    def by_work(cls, work: Work) -> Self:
        return cls(work.turns, work.tokens, work.longest, "at most, as planned above")


@dataclass(frozen=True)
class Laid:
    """How the answers lie in a batch. rows of `length` tokens, of which each has `anchors` windows, with so many
    answers behind one another in each; longest: of all rows, which sets the memory."""

    rows: int
    length: int
    longest: int
    anchors: int
    answers_a_row: int

    @classmethod
    def of(cls, base: BaseLM, labels: int, told: Told, settings: Any) -> Self:
        """The mean row sets operations, the longest one memory. A pack is taken to be as full as whole mean answers
        make it."""
        longest = min(settings.max_length, base.context_length, told.longest)
        mean = max(1, min(longest, told.tokens // told.answers))
        answers_a_row = 1 if settings.pack is None else max(1, settings.pack // mean)
        length = max(labels + 2, answers_a_row * mean)
        longest = max(longest, settings.pack or 0, length)
        rows = min(settings.rows, ceil(told.answers / answers_a_row))
        return cls(rows, length, longest, min(settings.anchors, length), answers_a_row)


@dataclass(frozen=True)
class Operations:
    """Of a batch for the head (step), for the base to read that batch (live), and to read the corpus once."""

    step: float
    live: float
    once: float

    @classmethod
    def of(cls, base: BaseLM, told: Told, laid: Laid, step: float) -> Self:
        size, seen = Size.of(base), laid.length / 2
        return cls(step, size.read_flops(laid.rows * laid.length, seen), size.read_flops(told.tokens, seen))

    def seconds(self, batches: int, rate: Rate) -> tuple[float, float] | None:
        """Of so many batches in one process, with states=live and with stored; None where the rate is not known.

        Several processes share the batches, while one of them reads the corpus for all.
        """
        live, stored = rate.seconds(batches * (self.step + self.live)), rate.seconds(batches * self.step + self.once)
        return None if live is None or stored is None else (live, stored)


def operations(base: BaseLM, drafter: DraftHead, objective: Objective, told: Told, settings: Any) -> Operations:
    """The part of a plan that hours are made of."""
    laid = Laid.of(base, objective.labels, told, settings)
    batch = batch_without_values(base, laid.rows, laid.length, laid.anchors, objective.labels)
    return Operations.of(base, told, laid, counted(drafter, objective, batch)[0])


def peak_bytes(base: BaseLM, drafter: DraftHead, objective: Objective, told: Told, settings: Any) -> int:
    """The part of a plan that a card's memory is held to: of the longest rows, as `plan` says it in words."""
    laid = Laid.of(base, objective.labels, told, settings)
    largest = batch_without_values(base, laid.rows, laid.longest, laid.anchors, objective.labels)
    _, kept, shape = counted(drafter, objective, largest)
    trained = sum(value.numel() for value in drafter.own_parameters())
    emission_bytes = laid.rows * laid.anchors * shape[2] * (base.vocabulary + 1) * 4
    return sum(held(Size.of(base), trained, largest, kept, emission_bytes).values())


def plan(
    base: BaseLM, drafter: DraftHead, objective: Objective, told: Told, settings: Any, rate: Rate, world: int = 1
) -> str:
    """settings: steps, accumulate, rows, anchors, pack and max_length, as under `trainer`. world: how many processes
    share the batches of a step; memory is that of each, and hours are those that all of them take together."""
    size, laid = Size.of(base), Laid.of(base, objective.labels, told, settings)
    batches = settings.steps * settings.accumulate
    batch = batch_without_values(base, laid.rows, laid.length, laid.anchors, objective.labels)
    step, _, shape = counted(drafter, objective, batch)
    largest = batch_without_values(base, laid.rows, laid.longest, laid.anchors, objective.labels)
    _, kept, _ = counted(drafter, objective, largest)
    needed = Operations.of(base, told, laid, step)
    trained = sum(value.numel() for value in drafter.own_parameters())
    emission_bytes = laid.rows * laid.anchors * shape[2] * (base.vocabulary + 1) * 4
    epochs = batches * laid.rows * laid.answers_a_row / told.answers
    several = "" if settings.accumulate == 1 else f"{settings.accumulate} x "
    sizes = ", ".join(f"{spelled(count)} as {name}" for name, count in states_bytes(told.tokens, size).items())
    return "\n".join(
        [
            f"drafter     {trained:,} trainable parameters",
            f"corpus      {told.answers:,} answers, {told.tokens:,} tokens ({told.source})",
            f"steps       {settings.steps:,} of {several}{laid.rows} rows x {laid.anchors} anchors, "
            f"{epochs:.1f} epochs",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB a step if they were kept whole (they are not)",
            f"frames      {reading(objective, drafter, shape[2])}",
            f"states      0 bytes where states=live; {sizes} where stored{unread(base, drafter)}",
            f"disk        {disk(trained)}",
            f"work        {step:.3g} operations a batch of the head, and {needed.live:.3g} for the base to read "
            f"{laid.rows} rows of {laid.length:,} tokens where live; where stored, "
            f"{needed.once:.3g} to read the corpus once",
            f"memory      {memory(size, trained, largest, kept, emission_bytes)}",
            f"time        {hours(needed.seconds(batches // world, rate), rate, world)}",
        ]
    )


def hours(seconds: tuple[float, float] | None, rate: Rate, world: int) -> str:
    if seconds is None:
        return UNKNOWN
    both = [duration.spelled(one / 3600) for one in seconds]
    shared = f", shared by {world} processes" if world > 1 else ""
    return f"about {both[0]} with states=live, {both[1]} with stored{shared}, {rate}; without probes"
