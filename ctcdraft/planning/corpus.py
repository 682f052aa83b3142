"""Plan of a corpus, printed before the first response: tokens, disk, memory and hours.

Tokens come from the prompts. Speed comes from a short trial (generation/transformers.py), or in a dry run, where the
base model is absent, from hardware rates that the user gives. Responses are assumed to be of maximal length, so most
numbers are upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctcdraft import hardware
from ctcdraft.corpus import part_files
from ctcdraft.corpus.chat_template import prompt_preview_and_warnings
from ctcdraft.corpus.generation.requests import GenerationSpeed, ResponseGenerator
from ctcdraft.corpus.generation.transformers import repeat_to_length, turns_of_all_batches
from ctcdraft.corpus.hidden_states import PRECISIONS
from ctcdraft.corpus.prepared import is_complete
from ctcdraft.corpus.types import Corpus
from ctcdraft.decoding.kv_cache import ALLOCATION_STEP
from ctcdraft.distributed import Shard
from ctcdraft.hardware import UNKNOWN_RATE, HardwareSpec, format_bytes, peak_process_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.meta import MetaBase
from ctcdraft.models.stats import ModelStats
from ctcdraft.planning.workload import CorpusTokenCounts, first_turn_tokens

BYTES_PER_TOKEN = 9  # on disk: about 5 for a token as JSON in a part, and 4 in a shard


@dataclass(frozen=True)
class CorpusPlan:
    """Plan of a corpus; str() is what a user reads."""

    work: CorpusTokenCounts
    lines: list[str]
    manifest_entry: dict[str, Any]  # numbers that follow from base model and prompts alone
    measured: dict[str, Any]  # numbers of this machine, for plan.json

    def __str__(self) -> str:
        return "\n".join(self.lines)


def plan_corpus(base: BaseLM, corpus: Corpus, answers: ResponseGenerator, out: Path, shard: Shard) -> CorpusPlan:
    """Return the plan of a corpus that this base model generates into `out`; a few tokens are generated to time it."""
    work, size = CorpusTokenCounts.from_prompts(corpus.prompts, answers, base), ModelStats.of(base)
    batches = -(-work.prompts * answers.samples // answers.batch_size)
    done = batches if is_complete(out) else len(part_files.list_parts(out))
    pending = max(0.0, 1 - done / batches)
    rows = batch_rows(work, answers)
    prompts = [
        first_turn_tokens(base.tokenizer, prompt.turns) for prompt in corpus.prompts[:: -(-work.prompts // rows)]
    ]
    # The time of a step grows with its context, so the trial's prompts are as long as a mean context.
    trial = repeat_to_length(prompts, rows, round(work.mean_context))
    speed = answers.benchmark_speed(base, trial) if pending else None
    turns = [len(prompt.turns) for prompt in corpus.prompts for _ in range(answers.samples)]
    steps = answers.max_new_tokens * turns_of_all_batches(turns, answers.batch_size)
    hours = None if speed is None else speed.hours(work.prompt_tokens, steps, pending / shard.of)
    peak = peak_process_bytes()
    measured = {
        "device": str(base.device),
        "threads": torch.get_num_threads(),
        "trial": None if speed is None else vars(speed),
        "hours_at_most": None if hours is None else hours[1],
        "peak_bytes": peak,
    }
    lines = [
        corpus.summary(),
        f"{base.name} ({str(base.dtype)[6:]}, {base.device}) answers {work.prompts:,} prompts, {work.turns:,} turns",
        *describe_size(work, size, answers, f"into {out}" + (f", where {done:,} batches are finished" if done else "")),
        describe_memory(work, size, answers) + f"; this process has held {format_bytes(peak)} so far",
        f"time      {describe_time(hours, speed, pending, shard)}",
        *(prompt_preview_and_warnings(base.name, base.tokenizer, prompts[0]) if pending else []),
    ]
    return CorpusPlan(work, lines, manifest_plan(work, size, answers), measured)


def plan_corpus_dry_run(
    meta: MetaBase, corpus: Corpus, answers: ResponseGenerator, rate: HardwareSpec, shard: Shard
) -> CorpusPlan:
    """Return the plan of a corpus of a base model that is not loaded; it has hours only if rates are given."""
    base = meta.base
    work, size = CorpusTokenCounts.from_prompts(corpus.prompts, answers, base), ModelStats.of(base)
    prefill, decoding = work.flops(size)
    peak = sum(memory_parts(work, size, answers).values())
    total_hours = work.hours(size, batch_rows(work, answers), rate)
    hours = None if total_hours is None else total_hours / shard.of
    bound = UNKNOWN_RATE if hours is None else f"at most about {hardware.format_hours(hours)}{shared_by(shard)} {rate}"
    lines = [
        str(meta),
        corpus.summary(),
        f"{base.name} would answer {work.prompts:,} prompts, {work.turns:,} turns",
        *describe_size(work, size, answers, "for the responses"),
        f"work      at most about {prefill:.3g} operations of prefill and {decoding:.3g} of decoding",
        describe_memory(work, size, answers) + rate.describe_fit(peak, "lower answers.batch_size="),
        f"time      {bound}",
    ]
    if base.tokenizer is not None:
        first = first_turn_tokens(base.tokenizer, corpus.prompts[0].turns)
        lines += prompt_preview_and_warnings(base.name, base.tokenizer, first)
    return CorpusPlan(work, lines, manifest_plan(work, size, answers), {"hours_at_most": hours, "rate": vars(rate)})


def batch_rows(work: CorpusTokenCounts, answers: ResponseGenerator) -> int:
    """Return the number of conversations in the largest batch."""
    return min(answers.batch_size, work.prompts * answers.samples)


def hidden_state_bytes(tokens: int, size: ModelStats) -> dict[str, int]:
    """Return the bytes of the hidden states of so many tokens, by precision."""
    return {name: tokens * one.bytes_per_token(size.state_width) for name, one in PRECISIONS.items()}


def describe_hidden_states(tokens: int, size: ModelStats) -> str:
    return ", ".join(f"{format_bytes(count)} as {name}" for name, count in hidden_state_bytes(tokens, size).items())


def memory_parts(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator) -> dict[str, int]:
    """Return the bytes held at the peak, by purpose."""
    if not answers.in_process:
        return {"weights": size.weight_bytes}
    rows = batch_rows(work, answers)
    # KV caches are allocated for the longest conversation at once.
    cache = rows * -(-work.longest // ALLOCATION_STEP) * ALLOCATION_STEP * size.kv_bytes
    sampling = 3 * 8 if answers.temperature > 0 else 0  # probabilities, their sums and their scale in float64
    return {
        "weights": size.weight_bytes,
        "cache": cache + cache * 3 // 8,  # keys, then values are copied when a batch loses a quarter of its rows
        "reading": size.activation_bytes(rows, work.longest_prompt),
        "logits": rows * size.head // size.width * (size.itemsize + sampling),
    }


def describe_size(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator, where: str) -> list[str]:
    """Return lines on tokens, disk and stored hidden states."""
    recalled = f", at most {work.recalled:,} of responses in later prompts" if work.recalled else ""
    return [
        f"about {work.user_tokens:,} tokens of prompts ({work.counted}){recalled}, "
        f"at most {work.response_tokens:,} of responses ({answers.max_new_tokens:,} each)",
        f"rows      {work.rows:,}, at most {work.row_tokens:,} tokens: one per conversation if the template keeps its "
        f"history (by turn {work.turns:,} rows, {work.tokens_by_turn:,} tokens)",
        f"at most {format_bytes(work.row_tokens * BYTES_PER_TOKEN)} {where}",
        f"states    at most {describe_hidden_states(work.row_tokens, size)} ({size.state_width:,} values per token) "
        "with hidden_states=offline; none with hidden_states=online",
    ]


def describe_memory(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator) -> str:
    batch = f"{answers.batch_size} rows of {work.longest:,} tokens" if answers.in_process else "generated elsewhere"
    return f"memory    {describe_bytes(memory_parts(work, size, answers))} ({batch})"


def describe_bytes(parts: Mapping[str, int]) -> str:
    by_purpose = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    return f"about {format_bytes(sum(parts.values()))} at the peak: {by_purpose}"


def describe_time(
    hours: tuple[float, float] | None, speed: GenerationSpeed | None, pending: float, shard: Shard
) -> str:
    """Return the time of a measured plan. pending: share of the batches that are still to be generated."""
    if not pending:
        return "none: every batch is finished"
    if hours is None or speed is None:
        return "not known: the responses are not generated in this process"
    return speed.describe(hours, shared_by(shard))


def shared_by(shard: Shard) -> str:
    return f", shared by {shard.of} processes" if shard.of > 1 else ""


def manifest_plan(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator) -> dict[str, Any]:
    """Return the plan's entry in manifest.json."""
    prefill, decoding = work.flops(size)
    return {
        "rows": work.rows,
        "tokens": {
            "rows_at_most": work.row_tokens,
            "by_turn_at_most": work.tokens_by_turn,
            "prompts": work.user_tokens,
            "histories_at_most": work.recalled,
            "answers_at_most": work.response_tokens,
        },
        "counted": work.counted,
        "disk_bytes_at_most": {
            "answers": work.row_tokens * BYTES_PER_TOKEN,
            "states": hidden_state_bytes(work.row_tokens, size),
        },
        "memory_bytes": memory_parts(work, size, answers),
        "flops_at_most": {"prompts": prefill, "answers": decoding},
    }
