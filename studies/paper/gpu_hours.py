"""GPU hours of the command that fills an empty cell of a published table, by the dry run of train.py.

The hours cover the base model's responses to the corpus, the training of the head, and the evaluation of all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ctcdraft import hardware
from ctcdraft.config.build import build_drafter
from ctcdraft.config.cli import compose_config
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
    """Hours of a command.

    Args:
        answers, evaluation: upper bounds: responses as long as allowed, every method as slow as autoregression.
        training: without validation.
        peaks: peak memory of each of the three in bytes; memory: that of the GPU, None if it is not known.
    """

    answers: float
    training: float
    evaluation: float
    peaks: Mapping[str, int]
    memory: float | None

    def __str__(self) -> str:
        whole = hardware.format_hours(self.answers + self.training + self.evaluation, "GPU ")
        return (
            f"about {whole}, planned: at most {hardware.format_hours(self.answers)} for the base's responses, "
            f"{hardware.format_hours(self.training)} for training, "
            f"at most {hardware.format_hours(self.evaluation)} for the evaluation{self.describe_shortage()}"
        )

    def describe_shortage(self) -> str:
        """Return what does not fit the GPU's memory, in words; nothing where all of it fits."""
        if self.memory is None:
            return ""
        larger = [f"{name} {format_bytes(peak)}" for name, peak in self.peaks.items() if peak > self.memory]
        return f"; DOES NOT FIT a card of {format_bytes(self.memory)}: {', '.join(larger)}" if larger else ""


class GpuHoursPlanner:
    """Plans the hours of a cell, once for each base, training command and benchmark.

    Args:
        flops, bandwidth, memory: of one GPU, in FLOP/s, bytes/s and bytes.
        corpus: the fields of CorpusTokenCounts of the corpus that heads are trained on.
        benchmarks: questions and turns by benchmark.
    """

    def __init__(
        self,
        flops: float | None,
        bandwidth: float | None,
        memory: float | None,
        corpus: Mapping[str, Any],
        benchmarks: Mapping[str, Mapping[str, int]],
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
        # Its default follows WORLD_SIZE of the process that writes the table.
        one_process = "trainer.gradient_accumulation_steps=1"
        config = compose_config("train", f"base={base}", one_process, *training.split(), "device=cpu", "dtype=bfloat16")
        sizes = build_meta_base(**node_values(config.base))
        with torch.device("meta"):
            drafter = build_drafter(config.drafter, sizes).eval()
        objective, corpus_stats = instantiate_node(config.objective), CorpusStats.from_work(self.counts)
        cost, size = TrainingCost.of(sizes, drafter, objective, corpus_stats, config.trainer), ModelStats.of(sizes)
        seconds = cost.seconds(config.trainer.steps * config.trainer.gradient_accumulation_steps, self.rate)
        answers = self.counts.hours(size, config.answers.batch_size, self.rate)
        evaluation_counts = self.evaluation_counts(
            benchmark, compose_config("evaluate", f"benchmark={benchmark}").decoding.max_new_tokens
        )
        evaluation = evaluation_counts.hours(size, rows=1, rate=self.rate)
        if seconds is None or answers is None or evaluation is None:
            return None
        peaks = {
            "answers": sum(memory_parts(self.counts, size, instantiate_node(config.answers)).values()),
            "training": sum(cost.memory.parts().values()),
            "evaluation": size.weight_bytes
            + evaluation_counts.longest * size.kv_bytes,  # the head is small beside them
        }
        return GpuHours(answers, seconds[0] / 3600, evaluation, peaks, self.memory)

    def evaluation_counts(self, benchmark: str, most: int) -> CorpusTokenCounts:
        """Return the tokens that all methods read and generate; the prompts, which are short, are not counted."""
        questions, turns = (self.benchmarks[benchmark][key] for key in ("questions", "turns"))
        recalled = questions * most * turns * (turns - 1) // 2
        return CorpusTokenCounts(
            prompts=EVALUATED_ARMS * questions,
            turns=EVALUATED_ARMS * questions * turns,
            asked=0,
            recalled=EVALUATED_ARMS * recalled,
            said=EVALUATED_ARMS * questions * turns * most,
            longest=turns * most,
            longest_prompt=(turns - 1) * most,
            counted="not counted",
        )

    def assumptions(self) -> Sequence[str]:
        """Return the assumptions behind the hours, in sentences."""
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
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(node, resolve=True)
    return {key: value for key, value in values.items() if key != "_target_"}


def instantiate_node(node: Any) -> Any:
    from hydra.utils import instantiate

    return instantiate(node)
