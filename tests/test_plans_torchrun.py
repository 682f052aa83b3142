"""Dry runs under torchrun: the hours of a plan are those of the processes that share the work."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from entry_parts import expect_error, run_script, train_args

PER_HOUR = {"hours": 1, "minutes": 60, "seconds": 3600}
RATE = ["plan.flops=1e5", "device=cpu", "dtype=bfloat16", "plan_only=true"]


@pytest.fixture
def planned(world, monkeypatch, capsys):
    """A function that returns what an entry point prints in a dry run, in one process of several."""
    monkeypatch.chdir(world)
    Path("shape").mkdir(exist_ok=True)
    shutil.copy("base/config.json", "shape")

    def plan(script, *arguments, processes=1, rank=0):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", str(rank))
        capsys.readouterr()
        run_script(monkeypatch, script, *arguments, *RATE)
        return capsys.readouterr().out

    return plan


def online_time(plan):
    ((number, unit),) = re.findall(r"^time +about ([\d.,]+) (\w+) with hidden_states=online", plan, re.MULTILINE)
    return float(number.replace(",", "")), unit


def test_eight_processes_take_the_same_steps_in_an_eighth_of_the_time(planned):
    arguments = train_args("run=x", "prepared=never", "base.path=shape")
    alone, eight = planned("train.py", *arguments), planned("train.py", *arguments, processes=8)
    assert all("steps       4 of 8 rows" in plan for plan in (alone, eight))
    hours = [number / PER_HOUR[unit] for number, unit in map(online_time, (alone, eight))]
    assert hours[0] == pytest.approx(8 * hours[1], rel=0.05)
    assert "shared by 8 processes" in eight
    assert planned("train.py", *arguments, processes=8, rank=3) == ""  # only rank 0 prints


def test_a_batch_that_cannot_be_shared_is_refused_in_a_dry_run_too(planned, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = train_args("run=x", "prepared=never", "base.path=shape", "trainer.batch_size=3", "plan_only=true")
    said = expect_error(monkeypatch, capsys, "train.py", *arguments)
    assert "trainer.batch_size=3 sequences cannot be shared by 4 processes; raise it, or start fewer" in said


def test_response_hours_are_divided_by_shards(planned):
    arguments = ["base=local", "base.path=shape", "corpus.path=prompts.jsonl", "out=never"]
    alone, four = planned("data/prepare.py", *arguments), planned("data/prepare.py", *arguments, processes=4)
    hours = [float(re.search(r"^time +at most about ([\d.]+) hours", plan, re.MULTILINE)[1]) for plan in (alone, four)]
    assert hours[0] == pytest.approx(4 * hours[1], rel=0.02)
    assert ", shared by 4 processes" in four
    assert planned("data/prepare.py", *arguments, "plan.processes=4") == four


def test_a_store_beyond_the_limit_is_refused_without_the_base(planned, monkeypatch, capsys):
    """Before there are responses by the tokens of the prompts, then by those of the corpus."""
    counts = {"rows": 10, "answers": 10, "tokens": 10_000}
    manifest = {"complete": True, "base": {"base": "shape", "weights": ""}, "answers": {}, "parts": {}, "hash": ""}
    Path("done").mkdir()
    Path("done/manifest.json").write_text(json.dumps(manifest | {"counts": counts}))
    arguments = ["base.path=shape", "run=x", "plan_only=true", "device=cpu", "hidden_states=offline"]

    def refusal(*more):
        return expect_error(monkeypatch, capsys, "train.py", *train_args(*arguments, *more))

    assert "would store at least " in refusal("prepared=never", "hidden_states.limit_gb=1e-6")
    assert "would store about " in refusal("prepared=done", "hidden_states.limit_gb=1e-4")
    assert "(640 tokens x" in refusal("prepared=done", "hidden_states.limit_gb=1e-5", "trainer.max_length=64")
    assert "10,000 tokens (as prepared for shape)" in planned("train.py", *train_args(*arguments, "prepared=done"))
