"""Plan of a training run, printed before its first step: parameters, tokens, bytes, and hours from one timed step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn

from ctcdraft import hardware
from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches, feasible_share
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.ctc import forward as ctc_forward
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.hardware import format_bytes, peak_process_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.stats import DraftBytes, ModelStats
from ctcdraft.nn.chunks import CHUNK_BYTES
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Objective
from ctcdraft.objectives.compatibility import describe_reading, describe_unused_layers
from ctcdraft.planning.corpus import describe_bytes, describe_hidden_states
from ctcdraft.training.engine import TorchEngine, compile_forward

ForwardResult = TypeVar("ForwardResult")
MANY_ROWS = 0.03  # of the base's bytes
BYTES_PER_TRAINED_PARAMETER = 16  # weight, gradient and AdamW's two moments in float32; Muon has one moment


def plan_training(
    base: BaseLM,
    drafter: DraftHead,
    objective: Objective,
    batches: Batches,
    engine: TorchEngine,
    steps: int,
    gradient_accumulation_steps: int,
    states: int,
    done: int = 0,
) -> str:
    """Return the plan of a run; one forward and backward pass is timed, so an error in it is raised here.

    Args:
        steps: optimiser steps of the whole run.
        gradient_accumulation_steps: batches per step, of which each process computes its rows.
        states: saved states that are kept.
        done: steps that a resumed run has taken already.

    Raises:
        InputError: objective and tree builder do not fit, or the corpus has no window to train on.
    """
    batch, emissions, saved_bytes, (reading_seconds, seconds) = time_step(drafter, objective, batches, engine)
    rate = batch.tokens_BL.numel() * engine.distributed.world_size / reading_seconds  # of the base model
    seconds += 0 if batches.hidden_states.on_disk else reading_seconds
    rows, anchors, frames, _ = emissions.states_BATD.shape
    reading = describe_reading(objective, drafter, frames)
    windows, feasible = count_windows(base, objective, batches, frames)
    tokens, responses = sum(batches.rows.lengths), sum(map(len, batches.rows.spans))
    trained, own = sum(p.numel() for p in engine.parameters), sum(p.numel() for p in drafter.trainable_parameters())
    emission_bytes = rows * anchors * frames * (emissions.blank + 1) * 4
    rows = batches.rows_per_step // gradient_accumulation_steps  # of all processes
    size, left = ModelStats.of(base), max(steps - done, 0)
    hours = seconds * left * gradient_accumulation_steps / 3600  # `seconds` are those of this process's share
    memory = StepMemory(size, trained, batch, saved_bytes, emission_bytes)
    beyond = f"; {batches.rows.beyond:,} more begin beyond trainer.max_length=" if batches.rows.beyond else ""
    of_base = f" (and {trained - own:,} of the base)" if trained > own else ""
    return "\n".join(
        [
            f"drafter     {own:,} trainable parameters{of_base}, block initialised {drafter.initialised}",
            *describe_draft_vocab(drafter, batches.rows, base.vocabulary),
            *describe_draft_bytes(drafter, base),
            f"corpus      {len(batches.rows):,} rows, {responses:,} responses, {tokens:,} tokens, {windows:,} windows, "
            f"{feasible:.2%} of them feasible ({frames} frames, {batches.labels} labels){beyond}",
            describe_steps(steps, gradient_accumulation_steps, rows, anchors, steps / batches.steps_per_epoch)
            + (f"; {done:,} of them are done" if done else ""),
            memory.describe_emissions(),
            f"frames      {reading}",
            f"rows        {batches.describe()}",
            f"states      {batches.hidden_states.describe(rate)}{describe_unused_layers(base, drafter)}",
            f"disk        {describe_disk(trained, states)}; hidden states of this corpus, where they are stored: "
            f"{describe_hidden_states(tokens, size)}",
            f"memory      {memory}; this process has held {format_bytes(peak_process_bytes())} so far",
            f"time        about {hardware.format_hours(hours)} {f'for the remaining {left:,} steps ' if done else ''}"
            f"({seconds:.2f} s for the first batch), without validation",
        ]
    )


def time_step(
    drafter: DraftHead, objective: Objective, batches: Batches, engine: TorchEngine
) -> tuple[Batch, Emissions, int, tuple[float, float]]:
    """Return the first batch, its emissions, bytes saved for the backward pass, and seconds of base model and head."""
    engine.zero_grad()
    times = [perf_counter()]

    def take_time() -> None:
        if batches.device.type == "cuda":  # calls only launch their kernels
            torch.cuda.synchronize()
        times.append(perf_counter())

    with engine.precision():
        batches.batch(0)  # not timed: the first call chooses kernels
        take_time()
        batch = batches.batch(0)
        take_time()
        (emissions, value), saved_bytes = count_saved_bytes(lambda: forward_and_loss(drafter, objective, batch))
    value.backward()
    take_time()
    engine.zero_grad()
    return batch, emissions, saved_bytes, (times[2] - times[1], times[3] - times[2])


def forward_and_loss(drafter: DraftHead, objective: Objective, batch: Batch) -> tuple[Emissions, Tensor]:
    emissions = drafter(batch)
    return emissions, objective(emissions, batch).value


def count_saved_bytes(forward: Callable[[], ForwardResult]) -> tuple[ForwardResult, int]:
    """Return the result of `forward`, and the bytes autograd saves for its backward pass.

    A tensor that is saved twice counts once; parameters do not count.
    """
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            saved[id(owner)] = owner  # kept alive, so that no other tensor can get its id
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(owner.nbytes for owner in saved.values())


@dataclass(frozen=True)
class StepMemory:
    """Memory of a training step; str() describes it."""

    size: ModelStats  # of the base model
    trained: int  # parameters
    batch: Batch
    saved_bytes: int  # saved by the head's forward pass for the backward pass
    emission_bytes: int  # of all emissions of the batch, which are computed in chunks

    def parts(self) -> dict[str, int]:
        """Return bytes by purpose."""
        return {
            "weights": self.size.weight_bytes,
            "head with gradients and moments": self.trained * BYTES_PER_TRAINED_PARAMETER,
            # Freed before the step, so the sum of all parts is a bound.
            "reading": self.size.activation_bytes(*self.batch.tokens_BL.shape),
            "states": self.batch.states_BLD.nbytes,
            "step": self.saved_bytes,
            "logits": min(self.emission_bytes, CHUNK_BYTES),
        }

    def describe_emissions(self) -> str:
        return f"emissions   {self.emission_bytes / 2**20:,.0f} MiB per batch if they were kept whole (they are not)"

    def __str__(self) -> str:
        rows, length = self.batch.tokens_BL.shape
        return f"at most {describe_bytes(self.parts())} ({rows} rows of {length:,} tokens)"


def describe_steps(steps: int, gradient_accumulation_steps: int, rows: int, anchors: int, epochs: float) -> str:
    several = "" if gradient_accumulation_steps == 1 else f"{gradient_accumulation_steps} x "
    return f"steps       {steps:,} of {several}{rows} rows x {anchors} anchors, {epochs:.1f} epochs"


def describe_lack_of_rows(wanted: int, rows: int) -> str:
    more = "prepare more prompts (corpus.limit=)"
    return "" if rows >= wanted else f"; training refuses a step of {wanted} rows, as the corpus has {rows}: {more}"


def describe_disk(trained: int, states: int) -> str:
    """Return the disk that a run needs. states: trainer.save_total_limit."""
    # The head, and saved states with the head again and its two moments; a new one is written before one is removed.
    return f"up to {format_bytes(trained * (4 + 12 * (states + 1)))} for the run"


def count_windows(base: BaseLM, objective: Objective, batches: Batches, frames: int) -> tuple[int, float]:
    """Return the number of windows and the share whose labels fit the frames; raise InputError if there is none."""
    # Where frames do not merge, equal neighbouring labels need no blank between them.
    unmerged = getattr(objective, "supervises", None) in ("transductions", "tokens")
    needed = ctc_forward.transducer_frames_needed if unmerged else frames_needed
    windows, feasible = feasible_share(batches.rows, batches.labels, frames, needed)
    if not windows:
        longest = max(batches.rows.lengths)
        key = "base.context_length" if longest >= base.context_length else "trainer.max_length"
        raise InputError(
            f"none of the {len(batches.rows):,} rows has a window to train on in at most {longest} tokens; raise "
            f"{key}, or lower objective.labels={batches.labels} where all responses were cut off"
        )
    return windows, feasible


def describe_draft_vocab(drafter: DraftHead, rows: TokenSequences, vocabulary_size: int) -> list[str]:
    if not drafter.has_draft_vocab:
        return []
    share = drafter.vocab_coverage(rows.token_counts(vocabulary_size))
    return [f"vocabulary  the most frequent tokens: {share:.1%} of the tokens of responses; no other token is drafted"]


def describe_draft_bytes(drafter: DraftHead, base: BaseLM) -> list[str]:
    """Return the lower bound of c, and what lowers it where the rows of the vocabulary are much of it."""
    if (read := DraftBytes.of(drafter, base)) is None:
        return []
    parts = ", ".join(f"{part} {format_bytes(getattr(read, part))}" for part in ("body", "correction", "head"))
    rows, advice = read.vocabulary / read.base, ""
    if rows > MANY_ROWS and not drafter.has_draft_vocab:
        advice = f"; the vocabulary alone is {rows:.3f}, of which drafter.vocabulary= reads less"
    return [
        f"draft       reads at least {format_bytes(read.total)} ({parts}, vocabulary {format_bytes(read.vocabulary)}) "
        f"where a step of the base reads {format_bytes(read.base)}: c >= {read.least_c:.3f}{advice}"
    ]


def smoke_test(
    base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine, backend: str | None
) -> None:
    """Try a forward and a backward pass; then compile the drafter with a backend of torch.compile, and try again."""
    smoke_step(base, drafter, objective, engine)
    if backend is not None:
        compile_forward(drafter, backend, lambda: smoke_step(base, drafter, objective, engine))


def smoke_step(base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine) -> None:
    """Run a forward and a backward pass on artificial windows: incompatible parts fail before a corpus exists."""
    length = min(objective.labels + 8, base.context_length)
    # Two rows of three windows: torch.compile would specialise a size of 1, or two equal sizes.
    rows = TokenSequences([torch.arange(length) % base.vocabulary] * 2, [[(2, length, True)]] * 2)
    with engine.precision():
        batch = Batches(rows, base, rows_per_step=2, anchors=3, labels=objective.labels, seed=0).batch(0)
        emissions = drafter(batch)
        # Before the objective, whose error on a drafter that it does not fit would be no sentence.
        describe_reading(objective, drafter, emissions.states_BATD.shape[2])
        value = objective(emissions, batch).value
    value.backward()
    engine.zero_grad()
