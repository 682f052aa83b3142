"""What the making of a corpus is going to cost, said before its first answer. It asks nobody and writes nothing.

How much is asked comes from the prompts, how fast from a short trial (pace.py), or from a rate that is given where
the base is only on paper. Answers are taken to be as long as they may be, so most figures are bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctcdraft import hardware
from ctcdraft.corpus import part_files
from ctcdraft.corpus.chat_template import chat_messages, prompt_preview_and_warnings, prompt_tokens
from ctcdraft.corpus.generation.requests import ResponseGenerator
from ctcdraft.corpus.generation.speed import GenerationSpeed, repeat_to_length, turns_of_all_batches
from ctcdraft.corpus.hidden_states import PRECISIONS
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.decoding.kv_cache import ALLOCATION_STEP
from ctcdraft.distributed import Shard
from ctcdraft.hardware import UNKNOWN_RATE, HardwareSpec, format_bytes, peak_process_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.meta import MetaBase
from ctcdraft.models.stats import ModelStats
from ctcdraft.planning.workload import CorpusTokenCounts

BYTES_PER_TOKEN = 7  # bytes in a part: as JSON a token takes about 5, and 2 for its mask


@dataclass(frozen=True)
class CorpusPlan:
    """figures: what anybody would plan for this base and these prompts, for the manifest. measured: here and now, for
    plan.json. str() is what a user reads."""

    work: CorpusTokenCounts
    lines: list[str]
    manifest_entry: dict[str, Any]
    measured: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def plan_corpus(base: BaseLM, corpus: Corpus, answers: ResponseGenerator, out: Path, shard: Shard) -> CorpusPlan:
    """What `prepare` is about to do, in sentences, and how long that takes here: a few words are said for it."""
    work, size = (
        CorpusTokenCounts.from_prompts(corpus.prompts, answers, base.tokenizer, base.context_length),
        ModelStats.of(base),
    )
    done, batches = len(part_files.list_parts(out)), -(-work.prompts * answers.samples // answers.batch_size)
    ahead = max(0.0, 1 - done / batches)
    rows = batch_rows(work, answers)
    prompts = [first_turn_tokens(base.tokenizer, prompt) for prompt in corpus.prompts[:: -(-work.prompts // rows)]]
    # The time of a step grows with the tokens that it attends to.
    pace = answers.benchmark_speed(base, repeat_to_length(prompts, rows, round(mean_context(work)))) if ahead else None
    turns = [len(prompt.turns) for prompt in corpus.prompts for _ in range(answers.samples)]
    most = answers.max_new_tokens * turns_of_all_batches(turns, answers.batch_size)
    hours = None if pace is None else pace.hours(work.prompt_tokens, most, ahead / shard.of)
    peak = peak_process_bytes(base.device)
    measured = {
        "device": str(base.device),
        "threads": torch.get_num_threads(),
        "trial": None if pace is None else vars(pace),
        "hours_at_most": None if hours is None else hours[1],
        "peak_bytes": peak,
    }
    lines = [
        corpus.summary(),
        f"{base.name} ({str(base.dtype)[6:]}, {base.device}) answers {work.prompts:,} prompts, {work.turns:,} turns",
        *describe_tokens(work, answers),
        describe_disk(work, f"into {out}" + (f", where {done:,} batches are finished already" if done else "")),
        describe_hidden_states(work, size),
        describe_memory(work, size, answers) + f"; this process has held {format_bytes(peak)} so far",
        f"time      {describe_time(hours, pace, ahead, shard)}",
        *(prompt_preview_and_warnings(base.name, base.tokenizer, prompts[0]) if ahead else []),
    ]
    return CorpusPlan(work, lines, manifest_plan(work, size, answers), measured)


def first_turn_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    return prompt_tokens(tokenizer, chat_messages(prompt.turns, []))


def batch_rows(work: CorpusTokenCounts, answers: ResponseGenerator) -> int:
    """Return how many dialogues the largest batch has."""
    return min(answers.batch_size, work.prompts * answers.samples)


def describe_time(hours: tuple[float, float] | None, pace: GenerationSpeed | None, pending: float, shard: Shard) -> str:
    if not pending:
        return "none: every batch is there"
    if hours is None or pace is None:
        return "not known beforehand: the answers are not made in this process"
    return pace.describe(hours, per_shard(shard))


def per_shard(shard: Shard) -> str:
    return f" for each of {shard.of} shards" if shard.of > 1 else ""


def plan_corpus_dry_run(
    paper: MetaBase, corpus: Corpus, answers: ResponseGenerator, rate: HardwareSpec, shard: Shard
) -> CorpusPlan:
    """The same for a base that is not here; hours only at a rate that somebody gives."""
    base, tokenizer = paper.base, paper.base.tokenizer
    work, size = (
        CorpusTokenCounts.from_prompts(corpus.prompts, answers, base.tokenizer, base.context_length),
        ModelStats.of(base),
    )
    reading, saying = generation_flops(work, size)
    whole = dry_run_hours(work, size, batch_rows(work, answers), rate)
    hours = None if whole is None else whole / shard.of
    lines = [
        str(paper),
        corpus.summary(),
        f"{base.name} would answer {work.prompts:,} prompts, {work.turns:,} turns",
        *describe_tokens(work, answers),
        describe_disk(work, "for the answers"),
        describe_hidden_states(work, size),
        f"work      at most about {reading:.3g} operations to read prompts and {saying:.3g} to say answers",
        describe_memory(work, size, answers),
        f"time      {describe_dry_run_time(hours, shard, rate)}",
        *(
            []
            if tokenizer is None
            else prompt_preview_and_warnings(base.name, tokenizer, first_turn_tokens(tokenizer, corpus.prompts[0]))
        ),
    ]
    return CorpusPlan(work, lines, manifest_plan(work, size, answers), {"hours_at_most": hours, "rate": vars(rate)})


def describe_dry_run_time(hours: float | None, shard: Shard, rate: HardwareSpec) -> str:
    return UNKNOWN_RATE if hours is None else f"at most about {hardware.format_hours(hours)}{per_shard(shard)} {rate}"


def dry_run_hours(work: CorpusTokenCounts, size: ModelStats, rows: int, rate: HardwareSpec) -> float | None:
    """At most, of reading all prompts and saying all answers, so many at a time; None where the rate is not known."""
    reading, saying = generation_flops(work, size)
    bytes_read = (size.weight_bytes + rows * size.kv_bytes * mean_context(work)) * work.said / rows
    seconds = [rate.seconds(reading), rate.seconds(saying, bytes_read)]
    return None if None in seconds else sum(one for one in seconds if one is not None) / 3600


def describe_tokens(work: CorpusTokenCounts, answers: ResponseGenerator) -> list[str]:
    again = f", at most {work.recalled:,} more of answers in the histories of later turns" if work.recalled else ""
    return [
        f"about {work.asked:,} tokens of prompts ({work.counted}){again}, "
        f"at most {work.said:,} of answers ({answers.max_new_tokens:,} each)"
    ]


def describe_disk(work: CorpusTokenCounts, where: str) -> str:
    return f"at most {format_bytes(work.tokens * BYTES_PER_TOKEN)} {where}"


def hidden_state_bytes(tokens: int, size: ModelStats) -> dict[str, int]:
    """Of the states of so many tokens, by the name of the precision they are stored in."""
    return {name: tokens * one.bytes_per_token(size.state_width) for name, one in PRECISIONS.items()}


def describe_hidden_states(work: CorpusTokenCounts, size: ModelStats) -> str:
    sizes = ", ".join(
        f"{format_bytes(count)} as {name}" for name, count in hidden_state_bytes(work.tokens, size).items()
    )
    return f"states    at most {sizes} ({size.state_width:,} values a token), where states=stored; none where live"


def mean_context(work: CorpusTokenCounts) -> float:
    """How many tokens a word of an answer attends to, on average."""
    return (work.prompt_tokens + work.said / 2) / work.turns


def generation_flops(work: CorpusTokenCounts, size: ModelStats) -> tuple[float, float]:
    """Operations to read all prompts, half of whose tokens a token attends to, and to say all answers."""
    return size.prefill_flops(work.prompt_tokens, work.prompt_tokens / work.turns / 2), size.decode_flops(
        work.said, mean_context(work)
    )


def memory_parts(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator) -> dict[str, int]:
    """At the peak, by what it is for. A batch is at once as long as it may become: caches are allocated for it."""
    if not answers.in_process:
        return {"weights": size.weight_bytes}
    rows = batch_rows(work, answers)
    cache = rows * -(-work.longest // ALLOCATION_STEP) * ALLOCATION_STEP * size.kv_bytes
    drawing = 3 * 8 if answers.temperature > 0 else 0  # a law, its sums and their scale in float64
    return {
        "weights": size.weight_bytes,
        "cache": cache + cache * 3 // 8,  # keys, then values are copied when a batch loses a quarter of its rows
        "reading": size.activation_bytes(rows, work.longest_prompt),
        "logits": rows * size.head // size.width * (size.itemsize + drawing),
    }


def describe_memory(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator) -> str:
    parts = memory_parts(work, size, answers)
    what = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    how = (
        f"{answers.batch_size} rows of {work.longest:,} tokens" if answers.in_process else "answers are made elsewhere"
    )
    return f"memory    about {format_bytes(sum(parts.values()))} at the peak: {what} ({how})"


def manifest_plan(work: CorpusTokenCounts, size: ModelStats, answers: ResponseGenerator) -> dict[str, Any]:
    reading, saying = generation_flops(work, size)
    return {
        "tokens": {"prompts": work.asked, "histories_at_most": work.recalled, "answers_at_most": work.said},
        "counted": work.counted,
        "disk_bytes_at_most": {
            "answers": work.tokens * BYTES_PER_TOKEN,
            "states": hidden_state_bytes(work.tokens, size),
        },
        "memory_bytes": memory_parts(work, size, answers),
        "flops_at_most": {"prompts": reading, "answers": saying},
    }
