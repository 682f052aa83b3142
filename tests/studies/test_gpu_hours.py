"""The GPU hours beside an empty cell are those of the plans that the entry points print."""

from __future__ import annotations

import csv
from dataclasses import replace
from io import StringIO

import pytest
from hydra.utils import instantiate

from ctcdraft import hardware
from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.errors import InputError
from ctcdraft.hardware import UNKNOWN_RATE, HardwareSpec, format_bytes
from ctcdraft.models.meta import build_meta_base
from ctcdraft.models.stats import ModelStats
from ctcdraft.planning import dry_run
from ctcdraft.planning.corpus import memory_parts
from studies.paper.export import markdown, table_csv
from studies.paper.gpu_hours import GpuHours, GpuHoursPlanner, node_values
from studies.paper.tables import read_table


@pytest.fixture(scope="module")
def planner():
    """The planner of evaluate.yaml."""
    return instantiate(compose_config("evaluate").table.gpu_hours, _convert_="all")


@pytest.fixture(scope="module")
def cells():
    return {(one.drafter, one.base): one for one in read_table("table_mt_bench", None, []).cells}


def test_the_hours_are_those_that_train_plans(planner, cells):
    """To the digit that train.py plan_only=true prints at the same rate for the same corpus."""
    import torch

    hours = planner.hours(cells["ctc", "vicuna_7b"])
    config = compose_config("train", "base=vicuna_7b", "drafter=ctc", "device=cpu", "dtype=bfloat16")
    base = build_meta_base(**node_values(config.base))
    with torch.device("meta"):
        drafter = build_drafter(config.drafter, base).eval()
    rate, stats = HardwareSpec(3e14, 3e12), dry_run.CorpusStats.from_work(planner.counts)
    plan = dry_run.plan_dry_run(base, drafter, instantiate(config.objective), stats, config.trainer, rate)
    assert f"about {hardware.format_hours(hours.training)} with hidden_states=online" in plan
    assert f"at most about {format_bytes(hours.peaks['training'])} at the peak" in plan
    assert planner.counts.response_tokens == 512 * planner.counts.turns == 512 * 185_787
    parts = memory_parts(planner.counts, ModelStats.of(base), instantiate(config.answers))
    assert hours.peaks["answers"] == sum(parts.values())
    assert hours.answers == planner.counts.hours(ModelStats.of(base), config.answers.batch_size, rate)


def test_an_evaluation_reads_the_weights_once_per_token_and_method(planner, cells):
    """80 questions of two turns, at most 1,024 tokens each, three methods: 491,520 forward passes, each as long as
    13.5 GB take at 3 TB/s, and no longer than with a KV cache of 2,048 tokens."""
    passes, a_read = 3 * 80 * 2 * 1024, 2 * 6.738e9 / 3e12
    hours = planner.hours(cells["ctc", "vicuna_7b"]).evaluation
    assert passes * a_read / 3600 < hours < passes * (a_read + 2048 * 524_288 / 3e12) / 3600 * 1.02


def test_without_a_rate_there_are_no_hours_but_a_sentence(cells):
    plan = node_values(compose_config("evaluate").table.gpu_hours)
    silent = GpuHoursPlanner(None, None, None, plan["corpus"], plan["benchmarks"])
    assert silent.hours(cells["medusa", "vicuna_7b"]) is None
    text = markdown(read_table("table_mt_bench", None, []), silent)
    assert UNKNOWN_RATE in text
    assert "GPU hours, planned" not in text


def test_what_does_not_fit_the_gpu_is_named_beside_the_hours(planner, cells):
    """32 sequences of 2,048 tokens of a 13 B model take 107 GB, a training step of its head 40 GB."""
    hours = planner.hours(cells["ctc", "vicuna_13b"])
    assert "; DOES NOT FIT a card of 80.0 GB: answers 107.5 GB" in str(hours)
    assert "training" not in str(hours).partition("FIT")[2]
    assert "a card of 40.0 GB: answers 107.5 GB, training 40.5 GB" in str(replace(hours, memory=4e10))
    assert "FIT" not in str(replace(hours, memory=1.6e11))
    assert "FIT" not in str(replace(hours, memory=None))
    assert "where the peak exceeds the 80.0 GB of a GPU" in planner.assumptions()[-1]
    plan = node_values(compose_config("evaluate").table.gpu_hours)
    with pytest.raises(InputError, match=r"table\.gpu_hours\.memory must be bytes > 0, .* got 0"):
        GpuHoursPlanner(**{**plan, "memory": 0})


def test_short_times_are_minutes_and_seconds():
    small = GpuHours(0.004, 0.0001, 0.05, {}, None)
    assert str(small) == (
        "about 3.2 GPU minutes, planned: at most 0.24 minutes for the base's responses, 0.36 seconds for training, at "
        "most 3 minutes for the evaluation"
    )
    shown = [hardware.format_hours(hours) for hours in (1234.5, 12.34, 0.5)]
    assert shown == ["1,234 hours", "12.3 hours", "0.50 hours"]


class Ten:
    """A planner that always returns ten hours."""

    def hours(self, cell):
        return f"10 hours of {cell.base}"

    def assumptions(self):
        return ["ten hours by definition"]


def test_every_command_that_fills_a_cell_has_its_hours():
    table = read_table("table_gsm8k", None, [])
    text = markdown(table, Ten())
    assert text.count("10 hours of vicuna_13b") == 2  # medusa and ctc
    assert "- ten hours by definition" in text
    for row, cell in zip(csv.DictReader(StringIO(table_csv(table, Ten()))), table.cells, strict=True):
        assert row["hours_planned"] == f"10 hours of {cell.base}"
        assert row["ours"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table_ablation", "figure_bases"])
def test_every_cell_can_be_planned(planner, name):
    for cell in read_table(name, None, []).cells:
        hours = planner.hours(cell)
        assert hours.answers > 1
        assert hours.training > 0.1
        assert hours.evaluation > 0.1
