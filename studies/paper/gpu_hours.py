"""What it would take to fill an empty cell of a table, in GPU hours by the plan on paper. It measures nothing.

The hours are those of the command beside the cell: the base answers the corpus, the head is trained, and all arms of
the evaluation say their answers. Like the entry points this is where config ends: no room behind imports it.
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
from ctcdraft.planning.corpus import dry_run_hours, memory_parts
from ctcdraft.planning.dry_run import CorpusStats, count_operations, peak_training_bytes
from ctcdraft.planning.workload import CorpusTokenCounts
from studies.paper.tables import TableCell

EVALUATED_ARMS = 3  # checkpoint=RUN compares autoregression, the run and prompt_lookup


@dataclass(frozen=True)
class GpuHours:
    """answers and evaluation: at most, because answers are taken to be as long as they may be, and every arm to be as
    slow as autoregression. training: without probes. peaks: bytes that each of the three holds at its peak; memory:
    those of the card, None where nobody said."""

    answers: float
    training: float
    evaluation: float
    peaks: Mapping[str, int]
    memory: float | None

    def __str__(self) -> str:
        whole = hardware.format_hours(self.answers + self.training + self.evaluation, "GPU ")
        return (
            f"about {whole}, planned: at most {hardware.format_hours(self.answers)} for the base's answers, "
            f"{hardware.format_hours(self.training)} for training, "
            f"at most {hardware.format_hours(self.evaluation)} for the evaluation{self.describe_shortage()}"
        )

    def describe_shortage(self) -> str:
        """What the card has not the memory for, in words; nothing where all of it fits."""
        if self.memory is None:
            return ""
        larger = [f"{name} {format_bytes(peak)}" for name, peak in self.peaks.items() if peak > self.memory]
        return f"; DOES NOT FIT a card of {format_bytes(self.memory)}: {', '.join(larger)}" if larger else ""


class GpuHoursPlanner:
    """The values of `table.plan`. corpus: the fields of a `Work`, the corpus that heads are trained on. benchmarks: by
    name, questions and turns of each."""

    def __init__(
        self,
        flops: float | None,
        bandwidth: float | None,
        memory: float | None,
        corpus: Mapping[str, Any],
        benchmarks: Mapping[str, Mapping[str, int]],
    ) -> None:
        self.rate = HardwareSpec.of({"flops": flops, "bandwidth": bandwidth})
        if memory is not None and not check_float(memory, "table.plan.memory") > 0:
            raise InputError(f"table.plan.memory={memory} is no card's memory; it is bytes, as in 8e10, or null")
        self.memory = memory
        self.work = CorpusTokenCounts(**corpus)
        self.benchmarks = benchmarks
        self.plan_hours = lru_cache(maxsize=None)(self._plan_hours)

    def hours(self, cell: TableCell) -> GpuHours | None:
        """None where no rate was given."""
        if self.rate.flops is None:
            return None
        return self.plan_hours(cell.base, cell.training, cell.benchmark.partition("/")[0])

    def _plan_hours(self, base: str, training: str, benchmark: str) -> GpuHours | None:
        alone = "trainer.accumulate=1"  # its default is the WORLD_SIZE of the process that prints the table
        config = compose_config("train", f"base={base}", alone, *training.split(), "device=cpu", "dtype=bfloat16")
        sizes = build_meta_base(**node_values(config.base))
        with torch.device("meta"):
            drafter = build_drafter(config.drafter, sizes).eval()
        objective, corpus_stats = instantiate_node(config.objective), CorpusStats.from_work(self.work)
        needed = count_operations(sizes, drafter, objective, corpus_stats, config.trainer)
        seconds = needed.seconds(config.trainer.steps * config.trainer.accumulate, self.rate)
        answers = dry_run_hours(self.work, ModelStats.of(sizes), config.answers.batch_size, self.rate)
        evaluation_counts = self.evaluation_counts(
            benchmark, compose_config("evaluate", f"benchmark={benchmark}").decoding.max_new_tokens
        )
        evaluation = dry_run_hours(evaluation_counts, ModelStats.of(sizes), rows=1, rate=self.rate)
        if seconds is None or answers is None or evaluation is None:
            return None
        size = ModelStats.of(sizes)
        peaks = {
            "answers": sum(memory_parts(self.work, size, instantiate_node(config.answers)).values()),
            "training": peak_training_bytes(sizes, drafter, objective, corpus_stats, config.trainer),
            "evaluation": size.weight_bytes
            + evaluation_counts.longest * size.kv_bytes,  # and a head, which is small beside them
        }
        return GpuHours(answers, seconds[0] / 3600, evaluation, peaks, self.memory)

    def evaluation_counts(self, benchmark: str, most: int) -> CorpusTokenCounts:
        """What all arms read and say: of the questions themselves, which are short, only earlier answers are read."""
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
        """What the hours take for granted, in sentences."""
        if self.rate.flops is None:
            return [f"GPU hours are {UNKNOWN_RATE} (here table.plan.flops= and table.plan.bandwidth=)"]
        return [
            f"GPU hours are planned on paper and not measured: one GPU, bfloat16, {self.rate}; answers as long as they "
            "may be, so most of it is a bound",
            f"the corpus is taken to be {self.work.prompts:,} prompts with {self.work.turns:,} turns, "
            f"{self.work.counted}; a base's answers are paid for once and serve all of its heads",
            "training is as long as the command's trainer.steps=, which may be far less than an epoch",
            "the memory of none of it is compared with a card's (table.plan.memory=)"
            if self.memory is None
            else f"what is planned to hold more at its peak than a card of {format_bytes(self.memory)} "
            "(table.plan.memory=) "
            "is said not to fit; unless the weights alone are too much, fewer rows at once help (answers.batch_size=, "
            "trainer.rows=, trainer.max_length=)",
        ]


def node_values(node: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(node, resolve=True)
    return {key: value for key, value in found.items() if key != "_target_"}


def instantiate_node(node: Any) -> Any:
    from hydra.utils import instantiate

    return instantiate(node)
