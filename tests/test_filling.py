"""The hours beside an empty cell are those that the entry points' own plans print, and come from nowhere else."""

from __future__ import annotations

import csv
from dataclasses import replace
from io import StringIO

import pytest
from hydra.utils import instantiate

from ctcdraft import hardware
from ctcdraft.config.build import build_drafter
from ctcdraft.config.cli import compose_config
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec, format_bytes
from ctcdraft.models.meta import build_meta_base
from ctcdraft.models.stats import ModelStats
from ctcdraft.planning import dry_run
from ctcdraft.planning.corpus import dry_run_hours, memory_parts
from studies.paper.export import markdown, table_csv
from studies.paper.gpu_hours import GpuHours, GpuHoursPlanner, node_values
from studies.paper.tables import read_table


@pytest.fixture(scope="module")
def filling():
    """As evaluate.py makes it."""
    return instantiate(compose_config("evaluate").table.plan, _convert_="all")


@pytest.fixture(scope="module")
def cells():
    return {(one.drafter, one.base): one for one in read_table("table_mt_bench", None, []).cells}


def test_the_hours_are_those_of_the_plans_that_train_prints(filling, cells):
    """At the same rate, of the same corpus: to the digit that train.py plan_only=true prints."""
    import torch

    found = filling.hours(cells["ctc", "vicuna_7b"])
    config = compose_config("train", "base=vicuna_7b", "drafter=ctc", "device=cpu", "dtype=bfloat16")
    base = build_meta_base(**node_values(config.base))
    with torch.device("meta"):
        drafter = build_drafter(config.drafter, base).eval()
    rate, told = HardwareSpec(3e14, 3e12), dry_run.CorpusStats.from_work(filling.work)
    said = dry_run.plan_dry_run(base, drafter, instantiate(config.objective), told, config.trainer, rate)
    assert f"about {hardware.format_hours(found.training)} with states=live" in said
    assert f"at most about {format_bytes(found.peaks['training'])} at the peak" in said
    assert filling.work.said == 512 * filling.work.turns == 512 * 185_787
    held = memory_parts(filling.work, ModelStats.of(base), instantiate(config.answers))
    assert found.peaks["answers"] == sum(held.values())
    assert found.answers == dry_run_hours(filling.work, ModelStats.of(base), config.answers.batch_size, rate)


def test_an_evaluation_reads_the_weights_once_a_word_and_arm(filling, cells):
    """80 questions of two turns, at most 1,024 words each, three arms: 491,520 passes, each as long as 13.5 GB take at
    3 TB/s and no longer than with the keys and values of 2,048 words beside them."""
    passes, a_read = 3 * 80 * 2 * 1024, 2 * 6.738e9 / 3e12
    found = filling.hours(cells["ctc", "vicuna_7b"]).evaluation
    assert passes * a_read / 3600 < found < passes * (a_read + 2048 * 524_288 / 3e12) / 3600 * 1.02


def test_without_a_rate_there_are_no_hours_and_a_sentence_says_why(cells):
    told = node_values(compose_config("evaluate").table.plan)
    silent = GpuHoursPlanner(None, None, None, told["corpus"], told["benchmarks"])
    assert silent.hours(cells["medusa", "vicuna_7b"]) is None
    said = markdown(read_table("table_mt_bench", None, []), silent)
    assert "GPU hours are not known without a rate" in said
    assert "GPU hours, planned" not in said


def test_what_a_card_cannot_hold_is_said_beside_the_hours(filling, cells):
    """32 rows of 2,048 tokens of a 13 B model are 107 GB, a step of its head half of a card; one card more and nothing
    is to be said."""
    found = filling.hours(cells["ctc", "vicuna_13b"])
    assert "; DOES NOT FIT a card of 80.0 GB: answers 107.5 GB" in str(found)
    assert "training" not in str(found).partition("FIT")[2]
    assert "a card of 40.0 GB: answers 107.5 GB, training 40.5 GB" in str(replace(found, memory=4e10))
    assert "FIT" not in str(replace(found, memory=1.6e11))
    assert "FIT" not in str(replace(found, memory=None))
    assert "more at its peak than a card of 80.0 GB" in filling.assumptions()[-1]
    told = node_values(compose_config("evaluate").table.plan)
    with pytest.raises(InputError, match=r"table\.plan\.memory=0 is no card's memory"):
        GpuHoursPlanner(**{**told, "memory": 0})


def test_hours_are_never_none_at_all():
    small = GpuHours(0.004, 0.0001, 0.05, {}, None)
    assert str(small) == (
        "about 3.2 GPU minutes, planned: at most 0.24 minutes for the base's answers, 0.36 seconds for training, at "
        "most 3 minutes for the evaluation"
    )
    shown = [hardware.format_hours(hours) for hours in (1234.5, 12.34, 0.5)]
    assert shown == ["1,234 hours", "12.3 hours", "0.50 hours"]


class Ten:
    """A planner that knows but one answer."""

    def hours(self, cell):
        return f"10 hours of {cell.base}"

    def assumptions(self):
        return ["by nobody's plan"]


def test_every_command_that_would_fill_a_cell_has_its_hours_and_no_other_cell_has():
    table = read_table("table_gsm8k", None, [])
    said = markdown(table, Ten())
    assert said.count("10 hours of vicuna_13b") == 2  # medusa and ctc
    assert "- by nobody's plan" in said
    for row, cell in zip(csv.DictReader(StringIO(table_csv(table, Ten()))), table.cells, strict=True):
        assert row["hours_planned"] == f"10 hours of {cell.base}"
        assert row["ours"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table_ablation", "figure_bases"])
def test_every_cell_can_be_planned_for(filling, name):
    for cell in read_table(name, None, []).cells:
        hours = filling.hours(cell)
        assert hours.answers > 1
        assert hours.training > 0.1
        assert hours.evaluation > 0.1
