"""Plan of a training run whose base model is absent: drafter and objective run on the meta device, on shapes alone.

Operations and bytes of a step are counted on that device; hours follow from hardware rates that the user gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

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
from ctcdraft.planning.training import (
    StepMemory,
    count_saved_bytes,
    describe_disk,
    describe_draft_bytes,
    describe_lack_of_rows,
    describe_steps,
    forward_and_loss,
)
from ctcdraft.planning.workload import CorpusTokenCounts

# Reads and writes of 4 bytes per parameter: 20 in the passes of torch's AdamW, 3 in those of clipping.
UPDATE_BYTES = 92


@dataclass(frozen=True)
class CorpusStats:
    """Size of a corpus."""

    rows: int  # conversations, or single turns
    answers: int  # number of responses
    tokens: int  # of all rows
    longest: int  # tokens of the longest row, an upper bound
    source: str  # where the numbers come from

    @classmethod
    def from_manifest(cls, manifest: Manifest, longest: int) -> Self:
        counts = manifest["counts"]
        rows = counts.get("rows", counts["answers"])  # older versions had a row for every response
        return cls(rows, counts["answers"], counts["tokens"], longest, f"as prepared for {manifest['base']['base']}")

    @classmethod
    def from_work(cls, work: CorpusTokenCounts) -> Self:
        return cls(work.rows, work.turns, work.row_tokens, work.longest, "at most, as planned above")


@dataclass(frozen=True)
class BatchShape:
    """Shape of a training batch in one process."""

    rows: int
    all_rows: int  # of all processes
    length: int  # tokens of a mean row, with which operations are counted
    longest: int  # tokens of the longest row, with which memory is counted
    anchors: int  # at most so many windows in a row
    packed: float  # conversations in a row of a batch, on average

    @classmethod
    def of(cls, base: BaseLM, labels: int, corpus: CorpusStats, settings: Any, world: int) -> Self:
        longest = min(settings.max_length, base.context_length, corpus.longest)
        mean = max(1, min(longest, corpus.tokens // corpus.rows))
        # Packs are assumed to be full: rows of unlike length fill 88 to 99 % of 2,048 tokens.
        packed = max(1.0, (settings.pack_length or 0) / mean)
        length = max(labels + 2, round(packed * mean))
        longest = max(longest, settings.pack_length or 0, length)
        rows = min(settings.batch_size, ceil(corpus.rows / packed))
        return cls(ceil(rows / world), rows, length, longest, settings.anchors_per_sequence or longest, packed)


@dataclass(frozen=True)
class TrainingCost:
    """Operations and memory of training a drafter on the meta device, for each of the processes that share it."""

    shape: BatchShape
    frames: int
    step: float  # operations of the head per batch
    online_reading: float  # of the base per batch, with hidden_states=online
    corpus_reading: float  # of the base over the whole corpus, with hidden_states=offline
    memory: StepMemory  # of a batch of the longest rows
    batches_per_step: int
    world: int  # processes

    @classmethod
    def of(
        cls, base: BaseLM, drafter: DraftHead, objective: Objective, corpus: CorpusStats, settings: Any, world: int = 1
    ) -> Self:
        """Count a step on mean rows and one on the longest; for the arguments see plan_dry_run."""
        shape, size = BatchShape.of(base, objective.labels, corpus, settings, world), ModelStats.of(base)
        mean, largest = (
            meta_batch(base, shape.rows, length, min(shape.anchors, length), objective.labels)
            for length in (shape.length, shape.longest)
        )
        step, _, (*_, frames, _) = step_flops_and_bytes(drafter, objective, mean)
        _, saved_bytes, (rows, anchors, frames_at_most, _) = step_flops_and_bytes(drafter, objective, largest)
        emission_bytes = rows * anchors * frames_at_most * (base.vocabulary + 1) * 4
        trained = sum(value.numel() for value in drafter.trainable_parameters())
        memory = StepMemory(size, trained, largest, saved_bytes, emission_bytes)
        online, whole = (size.prefill_flops(n, shape.length / 2) for n in (shape.rows * shape.length, corpus.tokens))
        return cls(shape, frames, step, online, whole, memory, settings.gradient_accumulation_steps, world)

    def seconds(self, steps: int, rate: HardwareSpec) -> tuple[float, float] | None:
        """Return seconds of so many steps, with online and offline hidden states; None without rates."""
        head, reading, corpus = map(rate.seconds, (self.step, self.online_reading, self.corpus_reading))
        update = rate.seconds(0, self.memory.trained * UPDATE_BYTES)
        if head is None or reading is None or corpus is None or update is None:
            return None
        # Gradients in float32 are summed during the last backward pass, which is two thirds of the head's operations.
        waiting = max(0.0, rate.all_reduce_seconds(4 * self.memory.trained, self.world) - head * 2 / 3)
        stored = self.batches_per_step * head + update + waiting
        return steps * (stored + self.batches_per_step * reading), steps * stored + corpus / self.world


def step_flops_and_bytes(drafter: DraftHead, objective: Objective, batch: Batch) -> tuple[float, int, tuple[int, ...]]:
    """Return operations of one step, bytes saved by its forward pass, and the shape of its frame states_BATD."""
    drafter.zero_grad(set_to_none=True)
    # Unfused attention: not every fused kernel is counted, and they save different tensors.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        (emissions, value), saved_bytes = count_saved_bytes(lambda: forward_and_loss(drafter, objective, batch))
        value.backward()
    drafter.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()), saved_bytes, tuple(emissions.states_BATD.shape)


def meta_batch(base: BaseLM, rows: int, length: int, anchors: int, labels: int) -> Batch:
    """Return a batch of meta tensors, which has shapes and no values."""
    with torch.device("meta"):
        tokens_BL = torch.empty(rows, length, dtype=torch.long)
        states_BLD = torch.empty(rows, length, base.width * len(base.aux_layers), dtype=base.dtype)
        windows_BA = torch.empty(rows, anchors, dtype=torch.long)
        labels_BAS = torch.empty(rows, anchors, labels, dtype=torch.long)
    return Batch(tokens_BL, states_BLD, windows_BA, windows_BA, labels_BAS, windows_BA, position_ids_BL=tokens_BL)


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
        settings: keys of `trainer`: steps, gradient_accumulation_steps, batch_size, anchors_per_sequence, pack_length,
            max_length and save_total_limit.
        rate: of the hardware, from which the hours follow.
        world: processes that share the batches of a step. Memory is that of each process, hours those of the run.
    """
    cost = TrainingCost.of(base, drafter, objective, corpus, settings, world)
    shape, memory, per_step = cost.shape, cost.memory, cost.batches_per_step
    epochs = settings.steps * per_step * shape.all_rows * shape.packed / corpus.rows
    ways_out = "lower trainer.batch_size= and raise trainer.gradient_accumulation_steps= by the same factor"
    return "\n".join(
        [
            f"drafter     {memory.trained:,} trainable parameters",
            *describe_draft_bytes(drafter, base),
            f"corpus      {corpus.rows:,} rows, {corpus.answers:,} responses, {corpus.tokens:,} tokens "
            f"({corpus.source})",
            describe_steps(settings.steps, per_step, shape.all_rows, min(shape.anchors, shape.length), epochs)
            + describe_lack_of_rows(settings.batch_size * per_step, corpus.rows),
            memory.describe_emissions(),
            f"frames      {describe_reading(objective, drafter, cost.frames)}",
            "states      0 bytes with hidden_states=online; "
            f"{describe_hidden_states(corpus.tokens, memory.size)} with offline{describe_unused_layers(base, drafter)}",
            f"disk        {describe_disk(memory.trained, settings.save_total_limit)}",
            f"work        {cost.step:.3g} operations per batch of the head; of the base {cost.online_reading:.3g} for "
            f"{shape.rows} rows of {shape.length:,} tokens with hidden_states=online, {cost.corpus_reading:.3g} for "
            "the corpus once with offline",
            f"memory      {memory}{rate.describe_fit(sum(memory.parts().values()), ways_out)}",
            f"time        {describe_hours(cost.seconds(settings.steps, rate), rate, world)}",
        ]
    )


def describe_hours(seconds: tuple[float, float] | None, rate: HardwareSpec, world: int) -> str:
    if seconds is None:
        return UNKNOWN_RATE
    live, stored = (hardware.format_hours(one / 3600) for one in seconds)
    shared = f", shared by {world} processes" if world > 1 else ""
    return f"about {live} with hidden_states=online, {stored} with offline{shared}, {rate}; without validation"
