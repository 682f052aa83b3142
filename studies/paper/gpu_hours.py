"""GPU hours of the command that fills an empty cell of a published table, by the dry run of train.py.

The hours cover the base model's responses to the corpus, the training of the head, and the evaluation of all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ctcdraft import hardware
from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.errors import InputError, check_float
from ctcdraft.hardware import UNKNOWN_RATE, HardwareSpec, format_bytes
from ctcdraft.models.meta import build_meta_base
from ctcdraft.models.stats import ModelStats
from ctcdraft.planning.corpus import memory_parts
from ctcdraft.planning.dry_run import CorpusStats, TrainingCost
from ctcdraft.planning.workload import CorpusTokenCounts
from studies.paper.tables import TableCell

EVALUATED_ARMS = 3  # checkpoint=RUN compares autoregression, the run and prompt_lookup


@dataclass(frozen=True)
class GpuHours:
    """Hours of a command."""

    answers: float  # upper bound: responses as long as allowed
    training: float  # without validation
    evaluation: float  # upper bound: every method as slow as autoregression
    peaks: Mapping[str, int]  # peak memory of each of the three in bytes
    memory: float | None  # of the GPU in bytes, where it is known

    def __str__(self) -> str:
        whole = hardware.format_hours(self.answers + self.training + self.evaluation, "GPU ")
        return (
            f"about {whole}, planned: at most {hardware.format_hours(self.answers)} for the base's responses, "
            f"{hardware.format_hours(self.training)} for training, "
            f"at most {hardware.format_hours(self.evaluation)} for the evaluation{self.describe_shortage()}"
        )

    def describe_shortage(self) -> str:
        if self.memory is None:
            return ""
        larger = [f"{name} {format_bytes(peak)}" for name, peak in self.peaks.items() if peak > self.memory]
        return f"; DOES NOT FIT a card of {format_bytes(self.memory)}: {', '.join(larger)}" if larger else ""


class GpuHoursPlanner:
    """Plans the hours of a cell, once for each base, training command and benchmark."""

    def __init__(
        self,
        flops: float | None,  # per second, of one GPU
        bandwidth: float | None,  # bytes per second
        memory: float | None,  # bytes
        corpus: Mapping[str, Any],  # fields of CorpusTokenCounts of the corpus that heads are trained on
        benchmarks: Mapping[str, Mapping[str, int]],  # questions and turns by benchmark
    ) -> None:
        self.rate = HardwareSpec.of({"flops": flops, "bandwidth": bandwidth})
        if memory is not None and not check_float(memory, "table.gpu_hours.memory") > 0:
            raise InputError(f"table.gpu_hours.memory must be bytes > 0, as in 8e10, or null, got {memory}")
        self.memory = memory
        self.counts = CorpusTokenCounts(**corpus)
        self.benchmarks = benchmarks
        self.plan_hours = lru_cache(maxsize=None)(self._plan_hours)

    def hours(self, cell: TableCell) -> GpuHours | None:
        """Return the hours that fill a cell; None without a rate."""
        if self.rate.flops is None:
            return None
        return self.plan_hours(cell.base, cell.training, cell.benchmark.partition("/")[0])

    def _plan_hours(self, base: str, training: str, benchmark: str) -> GpuHours | None:
        config = compose_config("train", f"base={base}", *training.split(), "device=cpu", "dtype=bfloat16")
        sizes = build_meta_base(**node_values(config.base))
        with torch.device("meta"):  # a 33B base and its head are counted without memory for their weights
            drafter = build_drafter(config.drafter, sizes).eval()
        objective, corpus_stats = instantiate(config.objective), CorpusStats.from_work(self.counts)
        cost, size = TrainingCost.of(sizes, drafter, objective, corpus_stats, config.trainer), ModelStats.of(sizes)
        seconds = cost.seconds(config.trainer.steps, self.rate)
        answers = self.counts.hours(size, config.answers.batch_size, self.rate)
        most = compose_config("evaluate", f"benchmark={benchmark}").decoding.max_new_tokens
        evaluated = self.evaluation_counts(benchmark, most)
        evaluation = evaluated.hours(size, rows=1, rate=self.rate)
        if seconds is None or answers is None or evaluation is None:
            return None
        peaks = {
            "answers": sum(memory_parts(self.counts, size, instantiate(config.answers)).values()),
            "training": sum(cost.memory.parts().values()),
            "evaluation": size.weight_bytes + evaluated.longest * size.kv_bytes,  # the head is small beside them
        }
        return GpuHours(answers, seconds[0] / 3600, evaluation, peaks, self.memory)

    def evaluation_counts(self, benchmark: str, most: int) -> CorpusTokenCounts:
        """Return the tokens that all methods read and generate."""
        questions, turns = (self.benchmarks[benchmark][key] for key in ("questions", "turns"))
        # Later turns read the responses of earlier ones; the prompts, which are short, are not counted.
        recalled = questions * most * turns * (turns - 1) // 2
        totals = {"prompts": questions, "turns": questions * turns, "recalled": recalled}
        totals["response_tokens"] = questions * turns * most
        totals |= {"rows": questions, "row_tokens": questions * turns * most}
        return CorpusTokenCounts(
            **{key: EVALUATED_ARMS * total for key, total in totals.items()},
            user_tokens=0,
            longest=turns * most,
            longest_prompt=(turns - 1) * most,
            counted="not counted",
        )

    def assumptions(self) -> Sequence[str]:
        if self.rate.flops is None:
            return [f"GPU hours are {UNKNOWN_RATE} (here table.gpu_hours.flops= and table.gpu_hours.bandwidth=)"]
        return [
            f"GPU hours are of a dry run and not measured: one GPU, bfloat16, {self.rate}; responses as long as "
            "allowed, so most of it is an upper bound",
            f"the corpus has {self.counts.prompts:,} prompts with {self.counts.turns:,} turns, {self.counts.counted}; "
            "a base's responses are generated once and serve all of its heads",
            "training takes the command's trainer.steps=, which may be far less than an epoch",
            "peak memory is not compared with a GPU's (table.gpu_hours.memory=null)"
            if self.memory is None
            else f"where the peak exceeds the {format_bytes(self.memory)} of a GPU (table.gpu_hours.memory=) it does "
            "not fit; unless the weights alone are too large, smaller batches help (answers.batch_size=, "
            "trainer.batch_size=, trainer.max_length=)",
        ]


def node_values(node: Any) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(node, resolve=True)
    return {key: value for key, value in values.items() if key != "_target_"}
