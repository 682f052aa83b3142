"""The plan of a training whose base is not here: drafter and objective run on sizes alone. It measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from ctcdraft.base import BaseLM
from ctcdraft.corpus.parts import Manifest
from ctcdraft.corpus.plan import Work, states_bytes
from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.machine import spelled
from ctcdraft.objectives.objective import Objective
from ctcdraft.rate import UNKNOWN, Rate
from ctcdraft.size import Size
from ctcdraft.training.cost import batch_without_values, counted, disk, memory
from ctcdraft.training.plan import reading


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


def plan(base: BaseLM, drafter: DraftHead, objective: Objective, told: Told, settings: Any, rate: Rate) -> str:
    """settings: steps, accumulate, rows, anchors, pack and max_length, as under `trainer`.

    The mean row sets operations, the longest one memory. A pack is taken to be as full as whole mean answers make it.
    """
    size = Size.of(base)
    longest = min(settings.max_length, base.context_length, told.longest)
    mean = max(1, min(longest, told.tokens // told.answers))
    answers_a_row = 1 if settings.pack is None else max(1, settings.pack // mean)
    longest = max(longest, settings.pack or 0)
    length = max(objective.labels + 2, answers_a_row * mean)
    rows = min(settings.rows, ceil(told.answers / answers_a_row))
    batches = settings.steps * settings.accumulate
    anchors = min(settings.anchors, length)
    batch = batch_without_values(base, rows, length, anchors, objective.labels)
    step, _, shape = counted(drafter, objective, batch)
    largest = batch_without_values(base, rows, max(longest, length), anchors, objective.labels)
    _, kept, _ = counted(drafter, objective, largest)
    live, once = size.read_flops(rows * length, length / 2), size.read_flops(told.tokens, length / 2)
    trained = sum(value.numel() for value in drafter.own_parameters())
    emission_bytes = rows * anchors * shape[2] * (base.vocabulary + 1) * 4
    epochs = batches * rows * answers_a_row / told.answers
    several = "" if settings.accumulate == 1 else f"{settings.accumulate} x "
    sizes = ", ".join(f"{spelled(count)} as {name}" for name, count in states_bytes(told.tokens, size).items())
    return "\n".join(
        [
            f"drafter     {trained:,} trainable parameters",
            f"corpus      {told.answers:,} answers, {told.tokens:,} tokens ({told.source})",
            f"steps       {settings.steps:,} of {several}{rows} rows x {anchors} anchors, {epochs:.1f} epochs",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB a step if they were kept whole (they are not)",
            f"frames      {reading(objective, drafter, shape[2])}",
            f"states      0 bytes where states=live; {sizes} where stored",
            f"disk        {disk(trained)}",
            f"work        {step:.3g} operations a batch of the head, and {live:.3g} for the base to read {rows} rows "
            f"of {length:,} tokens where live; where stored, {once:.3g} to read the corpus once",
            f"memory      {memory(size, trained, largest, kept, emission_bytes)}",
            f"time        {hours(batches, step, live, once, rate)}",
        ]
    )


def hours(batches: int, step: float, live: float, once: float, rate: Rate) -> str:
    lively, stored = rate.seconds(batches * (step + live)), rate.seconds(batches * step + once)
    if lively is None or stored is None:
        return UNKNOWN
    return (
        f"about {lively / 3600:,.2f} hours with states=live, {stored / 3600:,.2f} with stored, {rate}; without probes"
    )
