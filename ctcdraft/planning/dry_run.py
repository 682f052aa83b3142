"""Plan of a training run whose base model is absent: drafter and objective run on the meta device, on shapes alone.

Operations and bytes are counted as in planning/memory.py; hours follow from hardware rates that the user gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from ctcdraft import hardware
from ctcdraft.batch import Batch
from ctcdraft.corpus.part_files import Manifest
from ctcdraft.drafters.base import DraftHead
from ctcdraft.hardware import UNKNOWN_RATE, HardwareSpec
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.stats import ModelStats
from ctcdraft.objectives.base import Objective
from ctcdraft.objectives.compatibility import describe_reading, describe_unused_layers
from ctcdraft.planning.corpus import describe_hidden_states
from ctcdraft.planning.memory import StepMemory, describe_disk, meta_batch, step_flops_and_bytes
from ctcdraft.planning.workload import CorpusTokenCounts


@dataclass(frozen=True)
class CorpusStats:
    """Size of a corpus.

    Args:
        answers: number of responses.
        tokens: of the responses and the prompts before them.
        longest: tokens of the longest row, an upper bound.
        source: where the numbers come from.
    """

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
    """Shape of a training batch.

    Args:
        rows: number of rows.
        length: tokens of a mean row, which operations are counted with.
        longest: tokens of the longest row, which memory is counted with.
        anchors: windows in a row.
        answers_per_row: responses packed into a row.
    """

    rows: int
    length: int
    longest: int
    anchors: int
    answers_per_row: int

    @classmethod
    def of(cls, base: BaseLM, labels: int, corpus: CorpusStats, settings: Any) -> Self:
        """Return the shape; a pack is assumed to hold as many mean responses as fit. settings: see plan_dry_run."""
        longest = min(settings.max_length, base.context_length, corpus.longest)
        mean = max(1, min(longest, corpus.tokens // corpus.answers))
        answers_per_row = 1 if settings.pack_length is None else max(1, settings.pack_length // mean)
        length = max(labels + 2, answers_per_row * mean)
        longest = max(longest, settings.pack_length or 0, length)
        rows = min(settings.batch_size, ceil(corpus.answers / answers_per_row))
        return cls(rows, length, longest, min(settings.anchors_per_sequence, length), answers_per_row)

    def meta_batch(self, base: BaseLM, labels: int, length: int) -> Batch:
        return meta_batch(base, self.rows, length, self.anchors, labels)


@dataclass(frozen=True)
class Operations:
    """Operations of the head per batch, of the base model per batch, and of the base model over the whole corpus."""

    step: float
    online_reading: float
    corpus_reading: float

    @classmethod
    def of(cls, base: BaseLM, corpus: CorpusStats, shape: BatchShape, step: float) -> Self:
        size, context = ModelStats.of(base), shape.length / 2
        online = size.prefill_flops(shape.rows * shape.length, context)
        return cls(step, online, size.prefill_flops(corpus.tokens, context))

    def seconds(self, batches: int, rate: HardwareSpec) -> tuple[float, float] | None:
        """Return seconds of so many batches in one process, with online and offline hidden states; None without rates.

        Processes share the batches, but one of them computes the stored hidden states for all.
        """
        live = rate.seconds(batches * (self.step + self.online_reading))
        stored = rate.seconds(batches * self.step + self.corpus_reading)
        return None if live is None or stored is None else (live, stored)


def step_memory(base: BaseLM, drafter: DraftHead, objective: Objective, shape: BatchShape) -> StepMemory:
    """Return the memory of a step on a batch of the longest rows."""
    largest = shape.meta_batch(base, objective.labels, shape.longest)
    _, saved_bytes, (rows, anchors, frames, _) = step_flops_and_bytes(drafter, objective, largest)
    trained = sum(value.numel() for value in drafter.trainable_parameters())
    emission_bytes = rows * anchors * frames * (base.vocabulary + 1) * 4
    return StepMemory(ModelStats.of(base), trained, largest, saved_bytes, emission_bytes)


def count_operations(
    base: BaseLM, drafter: DraftHead, objective: Objective, corpus: CorpusStats, settings: Any
) -> Operations:
    """Return the operations of training; for the arguments see plan_dry_run."""
    shape = BatchShape.of(base, objective.labels, corpus, settings)
    batch = shape.meta_batch(base, objective.labels, shape.length)
    return Operations.of(base, corpus, shape, step_flops_and_bytes(drafter, objective, batch)[0])


def peak_training_bytes(
    base: BaseLM, drafter: DraftHead, objective: Objective, corpus: CorpusStats, settings: Any
) -> int:
    """Return the bytes that training holds at its peak; for the arguments see plan_dry_run."""
    shape = BatchShape.of(base, objective.labels, corpus, settings)
    return sum(step_memory(base, drafter, objective, shape).parts().values())


def plan_dry_run(
    base: BaseLM,
    drafter: DraftHead,
    objective: Objective,
    corpus: CorpusStats,
    settings: Any,
    rate: HardwareSpec,
    world: int = 1,
) -> str:
    """Return the plan of a run whose base model and drafter are on the meta device.

    Args:
        settings: steps, accumulate, rows, anchors, pack and max_length, as under `trainer`.
        rate: of the hardware, from which the hours follow.
        world: processes that share the batches of a step. Memory is that of each process, hours those of the run.
    """
    shape = BatchShape.of(base, objective.labels, corpus, settings)
    batches = settings.steps * settings.gradient_accumulation_steps
    step, _, emissions_shape = step_flops_and_bytes(
        drafter, objective, shape.meta_batch(base, objective.labels, shape.length)
    )
    operations = Operations.of(base, corpus, shape, step)
    memory = step_memory(base, drafter, objective, shape)
    epochs = batches * shape.rows * shape.answers_per_row / corpus.answers
    several = "" if settings.gradient_accumulation_steps == 1 else f"{settings.gradient_accumulation_steps} x "
    return "\n".join(
        [
            f"drafter     {memory.trained:,} trainable parameters",
            f"corpus      {corpus.answers:,} responses, {corpus.tokens:,} tokens ({corpus.source})",
            f"steps       {settings.steps:,} of {several}{shape.rows} rows x {shape.anchors} anchors, "
            f"{epochs:.1f} epochs",
            f"emissions   {memory.emission_bytes / 2**20:,.0f} MiB per batch if they were kept whole (they are not)",
            f"frames      {describe_reading(objective, drafter, emissions_shape[2])}",
            "states      0 bytes with hidden_states=online; "
            f"{describe_hidden_states(corpus.tokens, memory.size)} with offline{describe_unused_layers(base, drafter)}",
            f"disk        {describe_disk(memory.trained)}",
            f"work        {step:.3g} operations per batch of the head; of the base {operations.online_reading:.3g} for "
            f"{shape.rows} rows of {shape.length:,} tokens with hidden_states=online, "
            f"{operations.corpus_reading:.3g} for the corpus once with offline",
            f"memory      {memory}",
            f"time        {describe_hours(operations.seconds(batches // world, rate), rate, world)}",
        ]
    )


def describe_hours(seconds: tuple[float, float] | None, rate: HardwareSpec, world: int) -> str:
    if seconds is None:
        return UNKNOWN_RATE
    live, stored = (hardware.format_hours(one / 3600) for one in seconds)
    shared = f", shared by {world} processes" if world > 1 else ""
    return f"about {live} with hidden_states=online, {stored} with offline{shared}, {rate}; without validation"
