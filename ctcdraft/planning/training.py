"""What a run is going to cost, said before its first step. It measures one step and multiplies."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from ctcdraft import hardware
from ctcdraft.corpus.batches import Batches, TokenSequences, feasible_share
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
from ctcdraft.planning.corpus import hidden_state_bytes
from ctcdraft.planning.memory import count_saved_bytes, describe_disk, describe_memory
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
    """The plan in words. One forward and backward pass is timed, so what can fail fails here. done: the steps that a
    resumed run has already, which take no time again."""
    engine.zero_grad()
    with engine.precision():
        batches.batch(0)  # the first time is not like the others: kernels are chosen, stored states are written
    began = perf_counter()
    with engine.precision():
        batch = batches.batch(0)

        def forward() -> tuple[Emissions, Tensor]:
            emissions = drafter(batch)
            return emissions, objective(emissions, batch).value

        (emissions, value), saved_bytes = count_saved_bytes(forward)
    value.backward()
    if batch.states_BLD.is_cuda:
        torch.cuda.synchronize()
    seconds = perf_counter() - began
    engine.zero_grad()
    rows, anchors, frames, _ = emissions.states_BATD.shape
    read = describe_reading(objective, drafter, frames)
    # Only where frames merge do equal neighbours need a frame more.
    one_each = getattr(objective, "supervises", None) in ("transductions", "words")
    needed = ctc_forward.transducer_frames_needed if one_each else frames_needed
    windows, feasible = feasible_share(batches.rows, batches.labels, frames, needed)
    if not windows:
        longest = max(len(tokens_L) for tokens_L in batches.rows.tokens)
        cut_by = "base.context_length" if longest >= base.context_length else "trainer.max_length"
        raise InputError(
            f"none of the {len(batches.rows):,} answers has a window to learn from in texts of at most {longest} "
            f"tokens; raise {cut_by}, or lower objective.labels={batches.labels} where all answers were cut off"
        )
    tokens = sum(len(tokens_L) for tokens_L in batches.rows.tokens)
    trained, own = sum(p.numel() for p in engine.parameters), sum(p.numel() for p in drafter.trainable_parameters())
    emission_bytes = rows * anchors * frames * (emissions.blank + 1) * 4
    size, left = ModelStats.of(base), max(steps - done, 0)
    hours = seconds * left * accumulate / engine.distributed.world_size / 3600
    sizes = ", ".join(f"{format_bytes(count)} as {name}" for name, count in hidden_state_bytes(tokens, size).items())
    beside = f" (and {trained - own:,} of the base)" if trained > own else ""
    return "\n".join(
        [
            f"drafter     {own:,} trainable parameters{beside}, block initialised {drafter.initialised}",
            *describe_draft_vocab(drafter, batches.rows, base.vocabulary),
            f"corpus      {len(batches.rows):,} answers, {tokens:,} tokens, {windows:,} windows, "
            f"{feasible:.2%} of them feasible ({frames} frames, {batches.labels} labels)",
            f"steps       {steps:,} of {'' if accumulate == 1 else f'{accumulate} x '}{rows} rows x {anchors} anchors, "
            f"{steps * accumulate / batches.steps_per_epoch:.1f} epochs"
            f"{f'; {done:,} of them are done' if done else ''}",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB a step if they were kept whole (they are not)",
            f"frames      {read}",
            f"rows        {batches.describe()}",
            f"states      {batches.hidden_states.describe()}{describe_unused_layers(base, drafter)}",
            f"disk        {describe_disk(trained)}; states of this corpus, where they are stored: {sizes}",
            f"memory      {describe_memory(size, trained, batch, saved_bytes, emission_bytes)}; this process has held "
            f"{format_bytes(peak_process_bytes(base.device))} so far",
            f"time        about {hardware.format_hours(hours)} "
            f"{f'for the remaining {left:,} steps ' if done else ''}"
            f"({seconds:.2f} s for the first batch), probes not counted",
        ]
    )


def describe_draft_vocab(drafter: DraftHead, rows: TokenSequences, vocabulary_size: int) -> list[str]:
    """A line on what a head of some words can say; none of one that has all."""
    if not drafter.has_draft_vocab:
        return []
    share = drafter.vocab_coverage(rows.token_counts(vocabulary_size))
    return [f"vocabulary  the commonest words: {share:.1%} of what the answers say; no other word is drafted"]


def smoke_test(
    base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine, backend: str | None
) -> None:
    """Try a forward and a backward pass; then compile the drafter with a backend of torch.compile, and try again."""
    smoke_step(base, drafter, objective, engine)
    if backend is not None:
        compile_forward(drafter, backend, lambda: smoke_step(base, drafter, objective, engine))


def smoke_step(base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine) -> None:
    """A few made-up windows through drafter and objective and back: what they refuse of each other is known before any
    corpus. Two rows of three windows: sizes of 1 or alike would be compiled as that for ever."""
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
