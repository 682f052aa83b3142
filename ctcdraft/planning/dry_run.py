"""The plan of a training whose base is not here: drafter and objective run on sizes alone. It measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from ctcdraft import hardware
from ctcdraft.corpus.part_files import Manifest
from ctcdraft.drafters.base import DraftHead
from ctcdraft.hardware import UNKNOWN_RATE, HardwareSpec, format_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.stats import ModelStats
from ctcdraft.objectives.base import Objective
from ctcdraft.objectives.compatibility import describe_reading, describe_unused_layers
from ctcdraft.planning.corpus import hidden_state_bytes
from ctcdraft.planning.memory import describe_disk, describe_memory, meta_batch, peak_memory_parts, step_flops_and_bytes
from ctcdraft.planning.workload import CorpusTokenCounts


@dataclass(frozen=True)
class CorpusStats:
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
    def from_work(cls, work: CorpusTokenCounts) -> Self:
        return cls(work.turns, work.tokens, work.longest, "at most, as planned above")


@dataclass(frozen=True)
class BatchShape:
    """How the answers lie in a batch. rows of `length` tokens, of which each has `anchors` windows, with so many
    answers behind one another in each; longest: of all rows, which sets the memory."""

    rows: int
    length: int
    longest: int
    anchors: int
    answers_per_row: int

    @classmethod
    def of(cls, base: BaseLM, labels: int, corpus: CorpusStats, settings: Any) -> Self:
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
    def of(cls, base: BaseLM, corpus: CorpusStats, shape: BatchShape, step: float) -> Self:
        size, context = ModelStats.of(base), shape.length / 2
        return cls(
            step, size.prefill_flops(shape.rows * shape.length, context), size.prefill_flops(corpus.tokens, context)
        )

    def seconds(self, batches: int, rate: HardwareSpec) -> tuple[float, float] | None:
        """Of so many batches in one process, with states=live and with stored; None where the rate is not known.

        Several processes share the batches, while one of them reads the corpus for all.
        """
        live, stored = (
            rate.seconds(batches * (self.step + self.online_reading)),
            rate.seconds(batches * self.step + self.corpus_reading),
        )
        return None if live is None or stored is None else (live, stored)


def count_operations(
    base: BaseLM, drafter: DraftHead, objective: Objective, corpus: CorpusStats, settings: Any
) -> Operations:
    """The part of a plan that hours are made of."""
    shape = BatchShape.of(base, objective.labels, corpus, settings)
    batch = meta_batch(base, shape.rows, shape.length, shape.anchors, objective.labels)
    return Operations.of(base, corpus, shape, step_flops_and_bytes(drafter, objective, batch)[0])


def peak_training_bytes(
    base: BaseLM, drafter: DraftHead, objective: Objective, corpus: CorpusStats, settings: Any
) -> int:
    """The part of a plan that a card's memory is held to: of the longest rows, as `plan` says it in words."""
    batch_shape = BatchShape.of(base, objective.labels, corpus, settings)
    largest = meta_batch(base, batch_shape.rows, batch_shape.longest, batch_shape.anchors, objective.labels)
    _, saved_bytes, shape = step_flops_and_bytes(drafter, objective, largest)
    trained = sum(value.numel() for value in drafter.trainable_parameters())
    emission_bytes = batch_shape.rows * batch_shape.anchors * shape[2] * (base.vocabulary + 1) * 4
    return sum(peak_memory_parts(ModelStats.of(base), trained, largest, saved_bytes, emission_bytes).values())


def plan_dry_run(
    base: BaseLM,
    drafter: DraftHead,
    objective: Objective,
    corpus: CorpusStats,
    settings: Any,
    rate: HardwareSpec,
    world: int = 1,
) -> str:
    """settings: steps, accumulate, rows, anchors, pack and max_length, as under `trainer`. world: how many processes
    share the batches of a step; memory is that of each, and hours are those that all of them take together."""
    size, batch_shape = ModelStats.of(base), BatchShape.of(base, objective.labels, corpus, settings)
    batches = settings.steps * settings.accumulate
    batch = meta_batch(base, batch_shape.rows, batch_shape.length, batch_shape.anchors, objective.labels)
    step, _, shape = step_flops_and_bytes(drafter, objective, batch)
    largest = meta_batch(base, batch_shape.rows, batch_shape.longest, batch_shape.anchors, objective.labels)
    _, saved_bytes, _ = step_flops_and_bytes(drafter, objective, largest)
    needed = Operations.of(base, corpus, batch_shape, step)
    trained = sum(value.numel() for value in drafter.trainable_parameters())
    emission_bytes = batch_shape.rows * batch_shape.anchors * shape[2] * (base.vocabulary + 1) * 4
    epochs = batches * batch_shape.rows * batch_shape.answers_per_row / corpus.answers
    several = "" if settings.accumulate == 1 else f"{settings.accumulate} x "
    sizes = ", ".join(
        f"{format_bytes(count)} as {name}" for name, count in hidden_state_bytes(corpus.tokens, size).items()
    )
    return "\n".join(
        [
            f"drafter     {trained:,} trainable parameters",
            f"corpus      {corpus.answers:,} answers, {corpus.tokens:,} tokens ({corpus.source})",
            f"steps       {settings.steps:,} of {several}{batch_shape.rows} rows x {batch_shape.anchors} anchors, "
            f"{epochs:.1f} epochs",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB a step if they were kept whole (they are not)",
            f"frames      {describe_reading(objective, drafter, shape[2])}",
            f"states      0 bytes where states=live; {sizes} where stored{describe_unused_layers(base, drafter)}",
            f"disk        {describe_disk(trained)}",
            f"work        {step:.3g} operations a batch of the head, and {needed.online_reading:.3g} for the base to "
            "read "
            f"{batch_shape.rows} rows of {batch_shape.length:,} tokens where live; where stored, "
            f"{needed.corpus_reading:.3g} to read the corpus once",
            f"memory      {describe_memory(size, trained, largest, saved_bytes, emission_bytes)}",
            f"time        {describe_hours(needed.seconds(batches // world, rate), rate, world)}",
        ]
    )


def describe_hours(seconds: tuple[float, float] | None, rate: HardwareSpec, world: int) -> str:
    if seconds is None:
        return UNKNOWN_RATE
    both = [hardware.format_hours(one / 3600) for one in seconds]
    shared = f", shared by {world} processes" if world > 1 else ""
    return f"about {both[0]} with states=live, {both[1]} with stored{shared}, {rate}; without probes"
