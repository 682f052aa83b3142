"""Plan of a training run, printed before its first step: parameters, tokens, bytes, and hours from one timed step."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

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
from ctcdraft.models.stats import ModelStats
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Objective
from ctcdraft.objectives.compatibility import describe_reading, describe_unused_layers
from ctcdraft.planning.corpus import describe_hidden_states
from ctcdraft.planning.memory import StepMemory, count_saved_bytes, describe_disk
from ctcdraft.training.engine import TorchEngine, compile_forward


def plan_training(
    base: BaseLM,
    drafter: DraftHead,
    objective: Objective,
    batches: Batches,
    engine: TorchEngine,
    steps: int,
    accumulate: int,
    done: int = 0,
) -> str:
    """Return the plan of a run; one forward and backward pass is timed, so an error in it is raised here.

    Args:
        steps: optimiser steps of the whole run.
        accumulate: batches per step, shared by all processes.
        done: steps that a resumed run has taken already.

    Raises:
        InputError: objective and tree builder do not fit, or the corpus has no window to train on.
    """
    batch, emissions, saved_bytes, seconds = time_step(drafter, objective, batches, engine)
    rows, anchors, frames, _ = emissions.states_BATD.shape
    reading = describe_reading(objective, drafter, frames)
    windows, feasible = count_windows(base, objective, batches, frames)
    tokens = sum(len(tokens_L) for tokens_L in batches.rows.tokens)
    trained, own = sum(p.numel() for p in engine.parameters), sum(p.numel() for p in drafter.trainable_parameters())
    emission_bytes = rows * anchors * frames * (emissions.blank + 1) * 4
    size, left = ModelStats.of(base), max(steps - done, 0)
    hours = seconds * left * accumulate / engine.distributed.world_size / 3600
    memory = StepMemory(size, trained, batch, saved_bytes, emission_bytes)
    of_base = f" (and {trained - own:,} of the base)" if trained > own else ""
    return "\n".join(
        [
            f"drafter     {own:,} trainable parameters{of_base}, block initialised {drafter.initialised}",
            *describe_draft_vocab(drafter, batches.rows, base.vocabulary),
            f"corpus      {len(batches.rows):,} responses, {tokens:,} tokens, {windows:,} windows, "
            f"{feasible:.2%} of them feasible ({frames} frames, {batches.labels} labels)",
            f"steps       {steps:,} of {'' if accumulate == 1 else f'{accumulate} x '}{rows} rows x {anchors} anchors, "
            f"{steps * accumulate / batches.steps_per_epoch:.1f} epochs"
            f"{f'; {done:,} of them are done' if done else ''}",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB per batch if they were kept whole (they are not)",
            f"frames      {reading}",
            f"rows        {batches.describe()}",
            f"states      {batches.hidden_states.describe()}{describe_unused_layers(base, drafter)}",
            f"disk        {describe_disk(trained)}; hidden states of this corpus, where they are stored: "
            f"{describe_hidden_states(tokens, size)}",
            f"memory      {memory}; this process has held {format_bytes(peak_process_bytes(base.device))} so far",
            f"time        about {hardware.format_hours(hours)} {f'for the remaining {left:,} steps ' if done else ''}"
            f"({seconds:.2f} s for the first batch), without validation",
        ]
    )


def time_step(
    drafter: DraftHead, objective: Objective, batches: Batches, engine: TorchEngine
) -> tuple[Batch, Emissions, int, float]:
    """Return the first batch, its emissions, bytes saved for the backward pass, and seconds of both passes."""
    engine.zero_grad()
    with engine.precision():
        batches.batch(0)  # not timed: the first call chooses kernels and writes stored hidden states
    started = perf_counter()
    with engine.precision():
        batch = batches.batch(0)

        def forward() -> tuple[Emissions, Tensor]:
            emissions = drafter(batch)
            return emissions, objective(emissions, batch).value

        (emissions, value), saved_bytes = count_saved_bytes(forward)
    value.backward()
    if batch.states_BLD.is_cuda:
        torch.cuda.synchronize()
    seconds = perf_counter() - started
    engine.zero_grad()
    return batch, emissions, saved_bytes, seconds


def count_windows(base: BaseLM, objective: Objective, batches: Batches, frames: int) -> tuple[int, float]:
    """Return the number of windows and the share whose labels fit the frames; raise InputError if there is none."""
    # Where frames do not merge, equal neighbouring labels need no blank between them.
    unmerged = getattr(objective, "supervises", None) in ("transductions", "words")
    needed = ctc_forward.transducer_frames_needed if unmerged else frames_needed
    windows, feasible = feasible_share(batches.rows, batches.labels, frames, needed)
    if not windows:
        longest = max(len(tokens_L) for tokens_L in batches.rows.tokens)
        key = "base.context_length" if longest >= base.context_length else "trainer.max_length"
        raise InputError(
            f"none of the {len(batches.rows):,} responses has a window to train on in at most {longest} tokens; raise "
            f"{key}, or lower objective.labels={batches.labels} where all responses were cut off"
        )
    return windows, feasible


def describe_draft_vocab(drafter: DraftHead, rows: TokenSequences, vocabulary_size: int) -> list[str]:
    """Return a line on the draft vocabulary of a head that has one."""
    if not drafter.has_draft_vocab:
        return []
    share = drafter.vocab_coverage(rows.token_counts(vocabulary_size))
    return [f"vocabulary  the most frequent tokens: {share:.1%} of the tokens of responses; no other token is drafted"]


def smoke_test(
    base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine, backend: str | None
) -> None:
    """Try a forward and a backward pass; then compile the drafter with a backend of torch.compile, and try again."""
    smoke_step(base, drafter, objective, engine)
    if backend is not None:
        compile_forward(drafter, backend, lambda: smoke_step(base, drafter, objective, engine))


def smoke_step(base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine) -> None:
    """Run a forward and a backward pass on artificial windows, so that incompatible parts fail before a corpus exists.

    Two rows of three windows: torch.compile would specialise a size of 1, or two equal sizes.
    """
    length = min(objective.labels + 8, base.context_length)
    rows = TokenSequences(
        [torch.arange(length) % base.vocabulary] * 2, [(torch.arange(length) >= 2).int()] * 2, [True] * 2
    )
    with engine.precision():
        batch = Batches(rows, base, rows_per_step=2, anchors=3, labels=objective.labels, seed=0).batch(0)
        emissions = drafter(batch)
        describe_reading(objective, drafter, emissions.states_BATD.shape[2])
        value = objective(emissions, batch).value
    value.backward()
    engine.zero_grad()
