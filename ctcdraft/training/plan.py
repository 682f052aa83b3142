"""What a run is going to cost, said before its first step. It measures one step and multiplies."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctcdraft import duration
from ctcdraft.base import BaseLM
from ctcdraft.corpus.batches import Batches, Rows, feasible_share
from ctcdraft.corpus.plan import states_bytes
from ctcdraft.ctc import transducer
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.machine import peak_bytes, spelled
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.objective import Objective
from ctcdraft.size import Size
from ctcdraft.training.cost import disk, keeping, memory
from ctcdraft.training.engine import TorchEngine


def plan(
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

        (emissions, value), saved_bytes = keeping(forward)
    value.backward()
    if batch.states_BLD.is_cuda:
        torch.cuda.synchronize()
    seconds = perf_counter() - began
    engine.zero_grad()
    rows, anchors, frames, _ = emissions.states_BATD.shape
    read = reading(objective, drafter, frames)
    # Only where frames merge do equal neighbours need a frame more.
    one_each = getattr(objective, "supervises", None) in ("transductions", "words")
    needed = transducer.frames_needed if one_each else frames_needed
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
    size, left = Size.of(base), max(steps - done, 0)
    sizes = ", ".join(f"{spelled(count)} as {name}" for name, count in states_bytes(tokens, size).items())
    beside = f" (and {trained - own:,} of the base)" if trained > own else ""
    return "\n".join(
        [
            f"drafter     {own:,} trainable parameters{beside}, block initialised {drafter.initialised}",
            *vocabulary(drafter, batches.rows, base.vocabulary),
            f"corpus      {len(batches.rows):,} answers, {tokens:,} tokens, {windows:,} windows, "
            f"{feasible:.2%} of them feasible ({frames} frames, {batches.labels} labels)",
            f"steps       {steps:,} of {'' if accumulate == 1 else f'{accumulate} x '}{rows} rows x {anchors} anchors, "
            f"{steps * accumulate / batches.steps_an_epoch:.1f} epochs"
            f"{f'; {done:,} of them are done' if done else ''}",
            f"emissions   {emission_bytes / 2**20:,.0f} MiB a step if they were kept whole (they are not)",
            f"frames      {read}",
            f"rows        {batches.plan()}",
            f"states      {batches.states.plan()}{unread(base, drafter)}",
            f"disk        {disk(trained)}; states of this corpus, where they are stored: {sizes}",
            f"memory      {memory(size, trained, batch, saved_bytes, emission_bytes)}; this process has held "
            f"{spelled(peak_bytes(base.device))} so far",
            f"time        about {duration.spelled(seconds * left * accumulate / engine.peers.world_size / 3600)} "
            f"{f'for the remaining {left:,} steps ' if done else ''}"
            f"({seconds:.2f} s for the first batch), probes not counted",
        ]
    )


def vocabulary(drafter: DraftHead, rows: Rows, vocabulary_size: int) -> list[str]:
    """A line on what a head of some words can say; none of one that has all."""
    if not drafter.has_draft_vocab:
        return []
    share = drafter.vocab_coverage(rows.word_counts(vocabulary_size))
    return [f"vocabulary  the commonest words: {share:.1%} of what the answers say; no other word is drafted"]


def rehearse(base: BaseLM, drafter: DraftHead, objective: Objective, engine: TorchEngine) -> None:
    """A few made-up windows through drafter and objective and back: what they refuse of each other is known before any
    corpus. Two rows of three windows: sizes of 1 or alike would be compiled as that for ever."""
    length = min(objective.labels + 8, base.context_length)
    rows = Rows([torch.arange(length) % base.vocabulary] * 2, [(torch.arange(length) >= 2).int()] * 2, [True] * 2)
    with engine.precision():
        batch = Batches(rows, base, rows_a_step=2, anchors=3, labels=objective.labels, seed=0).batch(0)
        emissions = drafter(batch)
        reading(objective, drafter, emissions.states_BATD.shape[2])
        value = objective(emissions, batch).value
    value.backward()
    engine.zero_grad()


def reading(objective: Objective, drafter: DraftHead, frames: int) -> str:
    """How the frames will be read, in words; refused where that could only be nonsense.

    The paper's Table 2 has the two crossings: cross-entropy read by collapse, and CTC read directly.
    """
    paths = getattr(drafter, "paths", None)
    taught, reads = getattr(objective, "supervises", None), getattr(paths, "reads", None)
    if taught == "states" and not drafter.predicts_hidden_states:
        raise InputError(
            f"the objective teaches the base's next states, which {type(drafter).__name__} does not guess; "
            "objective=eagle and eagle_ctc are for drafter=eagle"
        )
    refuse_unreadable(objective, paths)
    if taught == "words" and frames > objective.labels and drafter.per_frame_weights:
        raise InputError(
            f"the objective teaches frame k to say label k, so {frames - objective.labels} of {frames} frames would "
            f"learn nothing; set objective.labels={frames} or drafter.frames={objective.labels}"
        )
    if taught is None or reads is None:
        return "in the drafter's own way"
    return crossing(objective, paths) or f"taught {taught}, read as {reads}"


def unread(base: BaseLM, drafter: DraftHead) -> str:
    """What is computed and stored of the base's states and read by nobody, in words; nothing where all of it is."""
    if len(base.taps) == 1 or getattr(drafter, "uses_aux_hidden_states", True):
        return ""
    return (
        f"; of the {len(base.taps)} taps base.taps={base.taps} {type(drafter).__name__} reads the last layer's at most"
    )


def refuse_unreadable(objective: Any, paths: Any) -> None:
    """Raise InputError where frames so taught, so read, say nothing."""
    taught, reads = getattr(objective, "supervises", None), getattr(paths, "reads", None)
    if reads is None:
        return
    name = type(paths).__name__
    if taught == "transductions" and reads != taught:
        raise InputError(
            f"the objective teaches frames of which no two say one word together, but {name} reads them as {reads}; "
            "use drafter/paths=transducer_search"
        )
    if taught == "alignments" and reads == "transductions":
        raise InputError(
            f"the objective lets repeated frames merge into one word, but {name} takes each for a word of its own; "
            "use objective=transducer or prefix_transducer (or drafter/paths=prefix_search)"
        )
    if taught == "words" and reads in ("alignments", "transductions"):
        raise InputError(
            f"the objective teaches frame k to say label k and leaves the blank untrained, but {name} sums over "
            "alignments with blanks; use drafter/paths=direct (or collapse, for Table 2's row)"
        )


def crossing(objective: Any, paths: Any) -> str | None:
    """In words, where frames are read otherwise than they are taught; None where they are not, or nobody can say."""
    taught, reads = getattr(objective, "supervises", None), getattr(paths, "reads", None)
    if None in (taught, reads) or taught == reads or {taught, reads} == {"alignments", "raw frames"}:
        return None
    published = (taught, reads) in (("words", "raw frames"), ("alignments", "words"))
    as_in = ", as in Table 2 of the paper" if published else ""
    return f"taught {taught} but read as {reads} by {type(paths).__name__}: a crossing{as_in}"
