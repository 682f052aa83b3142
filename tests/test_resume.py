"""Existing runs: resuming, overwriting, continued sweeps, and a stop by Ctrl-C."""

from __future__ import annotations

import csv
import shutil

import pytest
import torch
from entry_parts import REPOSITORY, expect_error, run_script, train_args
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_models import random_lm

from ctcdraft.config import sweep_jobs
from ctcdraft.config.drafters import load_drafter
from ctcdraft.models.loading import load_base
from ctcdraft.planning import training as planning_training


def test_resuming_raises_the_steps_only(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=again"))
    message = expect_error(monkeypatch, capsys, "train.py", "resume=again", "trainer.batch_size=2")
    assert "trainer.batch_size=2" in message
    assert "only trainer.steps= may be raised" in message
    assert "must be >= the 4 of again" in expect_error(
        monkeypatch, capsys, "train.py", "resume=again", "trainer.steps=3"
    )
    before = (world / "again" / "metrics.jsonl").read_text()
    run_script(monkeypatch, "train.py", "resume=again", "trainer.steps=6")
    after = (world / "again" / "metrics.jsonl").read_text()
    # Started again, the longer schedule would have changed the learning rates of steps 2 to 4.
    assert after.startswith(before)
    assert len(after.splitlines()) == 6
    assert OmegaConf.load(world / "again" / "config.yaml").trainer.steps == 6


def test_a_run_of_an_absent_device_is_resumed_on_another_one(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=of_a_gpu"))
    config = OmegaConf.load(world / "of_a_gpu" / "config.yaml")
    config.device = config.base.device = "cuda"
    OmegaConf.save(config, world / "of_a_gpu" / "config.yaml")
    run_script(monkeypatch, "train.py", "resume=of_a_gpu", "trainer.steps=5", "device=cpu")
    assert len((world / "of_a_gpu" / "metrics.jsonl").read_text().splitlines()) == 5
    assert OmegaConf.load(world / "of_a_gpu" / "config.yaml").base.device == "cpu"


def test_a_run_killed_before_its_first_checkpoint_starts_again(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=early"))
    trained = (world / "early" / "drafter.safetensors").read_bytes()
    for file in [*(world / "early").glob("resume-*.pt"), world / "early" / "drafter.safetensors"]:
        file.unlink()
    run_script(monkeypatch, "train.py", "resume=early")
    assert (world / "early" / "drafter.safetensors").read_bytes() == trained


def test_load_drafter_restores_the_weights(world, monkeypatch):
    monkeypatch.chdir(world)
    base = load_base("base", "float32", "cpu")
    drafter = load_drafter(world / "run", base, tree=None)
    saved = load_file(world / "run" / "drafter.safetensors")
    assert set(saved) == set(drafter.trainable_state_dict())
    for name, value in drafter.trainable_state_dict().items():
        assert torch.equal(value, saved[name]), name
    other = OmegaConf.load(REPOSITORY / "configs" / "drafter" / "tree" / "collapse.yaml")
    assert type(load_drafter(world / "run", base, tree=other).frame_tree).__name__ == "Collapse"


def test_a_run_of_another_version_is_recognised_by_the_value_that_is_unknown(world, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(world)
    shutil.copytree("run", tmp_path / "old")
    config = OmegaConf.load(tmp_path / "old" / "config.yaml")
    config.drafter.tree["listening_words"] = 64
    OmegaConf.save(config, tmp_path / "old" / "config.yaml")
    said = expect_error(monkeypatch, capsys, "evaluate.py", f"checkpoint={tmp_path / 'old'}", "benchmark.limit=1")
    assert "names listening_words, which no part of a drafter has in this version" in said


def test_overwriting_a_run_keeps_other_files(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=mine"))
    (world / "mine" / "thesis.txt").write_text("years of work")
    run_script(monkeypatch, "train.py", *train_args("run=mine", "overwrite=true"))
    assert (world / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_multirun_numbers_its_jobs(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", "-m", *train_args("run=sweep", "drafter.frames=3,4"))
    assert [(world / "sweep" / job / "drafter.safetensors").is_file() for job in "01"] == [True, True]


def test_a_failed_job_is_in_the_table_and_the_others_are_trained(world, monkeypatch, capsys):
    """Two frames cannot emit three labels; a corrected command clears the failure."""
    monkeypatch.chdir(world)
    cells = train_args("run=cells", "drafter.frames=2,4", "seed=0,1", "data_seed=0")
    said = expect_error(monkeypatch, capsys, "train.py", "-m", *cells)
    assert said.splitlines()[0].startswith("train.py: job 0: 2 frames cannot emit 3 labels")
    assert said.splitlines()[-1] == ("train.py: jobs of the sweep failed, see above; the same command tries them again")
    cells = world / "cells"
    assert [(cells / job / "drafter.safetensors").is_file() for job in "0123"] == [False, False, True, True]
    with (cells / "sweep.csv").open() as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert [rows[job]["status"][:27] for job in "0123"] == ["failed: 2 frames cannot emi"] * 2 + ["complete"] * 2
    assert [rows[job]["drafter.frames"] for job in "0123"] == ["2", "2", "4", "4"]
    assert (cells / "sweep.md").read_text().count("| failed: 2 frames cannot emit 3 labels") == 2
    # Another sweep in its place is refused, and the runs that are there are no failures.
    before = (cells / "sweep.csv").read_text()
    expect_error(monkeypatch, capsys, "train.py", "-m", *train_args("run=cells", "drafter.frames=2,5", "seed=0,1",
                                                             "data_seed=0"))  # fmt: skip
    assert (cells / "sweep.csv").read_text() == before
    run_script(monkeypatch, "train.py", "-m", *train_args("run=cells", "drafter.frames=3", "seed=0,1", "data_seed=0"))
    assert not list(cells.glob("[01]/failed.json"))


def test_an_evaluation_that_cannot_be_leaves_the_others_of_its_sweep(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    arguments = ["checkpoint=run", "benchmark.path=prompts.jsonl", "benchmark.limit=1", "decoding.max_new_tokens=8",
             "warm_up_tokens=4", "timing.questions=0", "decoding.nodes=0,6", "out=of_${decoding.nodes}"]  # fmt: skip
    said = expect_error(monkeypatch, capsys, "evaluate.py", "-m", *arguments)
    assert said.startswith("evaluate.py: job 0: decoding.nodes must be an integer >= 1, got 0")
    assert (world / "of_6" / "1" / "report.json").is_file()
    assert not (world / "of_0").exists()


def test_a_sweep_prints_the_remaining_time(world, monkeypatch, capsys):
    """The clock, read twice per job, advances by ten minutes; of four jobs the first is finished, the second fails."""
    monkeypatch.chdir(world)
    ticks = iter(range(0, 10**6, 600))
    arguments = ["-m", *train_args("run=timed", "data_seed=0", "drafter.frames=4")]
    run_script(monkeypatch, "train.py", *arguments, "objective.labels=3")
    capsys.readouterr()
    monkeypatch.setattr(sweep_jobs.track_job.__wrapped__, "__defaults__", (lambda: next(ticks),))
    with pytest.raises(SystemExit):
        run_script(monkeypatch, "train.py", *arguments, "objective.labels=3,5,2,1")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sweep timed: ")]
    assert lines == [
        "sweep timed: 1 of 4 done",
        "sweep timed: 2 of 4 done",
        "sweep timed: 3 of 4 done, about 10 minutes for the remaining 1",
        "sweep timed: 4 of 4 done",
        "sweep timed: job 1: failed: 4 frames cannot emit 5 labels, so every window would be infeasible; raise "
        "drafter.frames to at least 5 or lower objective.labels",
        "sweep timed: 1 of 4 jobs are not complete",
    ]


def test_a_resumed_run_plans_the_steps_that_remain(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=planned_again"))
    assert "for the remaining" not in capsys.readouterr().out
    monkeypatch.setattr(planning_training, "perf_counter", iter([0.0, 0.0, 1.0, 36.0]).__next__)
    run_script(monkeypatch, "train.py", "resume=planned_again", "trainer.steps=14")
    plan = capsys.readouterr().out
    assert "steps       14 of 8 rows x " in plan
    assert "epochs; 4 of them are done" in plan
    assert "time        about 0.10 hours for the remaining 10 steps (36.00 s for the first batch)" in plan


def test_a_stopped_sweep_continues(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    arguments = ["-m", *train_args("run=swept", "drafter.frames=3,4")]
    run_script(monkeypatch, "train.py", *arguments)
    whole = (world / "swept" / "sweep.csv").read_text()
    (world / "swept" / "sweep.csv").unlink()
    shutil.rmtree(world / "swept" / "1")
    capsys.readouterr()
    run_script(monkeypatch, "train.py", *arguments)
    assert "swept/0 already has its 4 steps" in capsys.readouterr().out
    assert (world / "swept" / "sweep.csv").read_text() == whole
    said = expect_error(monkeypatch, capsys, "train.py", "-m", *train_args("run=swept", "drafter.frames=3,4", "seed=1"))
    assert "swept/0 holds a run already" in said


def test_a_sweep_that_was_begun_with_old_names_continues(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    arguments = ["-m", *train_args("run=renamed", "drafter.frames=3,4")]
    run_script(monkeypatch, "train.py", *arguments)
    for job in "01":
        config = world / "renamed" / job / "config.yaml"
        values = OmegaConf.load(config)
        values.drafter["paths"] = values.drafter.pop("tree")
        values.drafter.paths._target_ = "ctcdraft.drafters.paths.PrefixSearch"
        OmegaConf.save(values, config)
    capsys.readouterr()
    run_script(monkeypatch, "train.py", *arguments)
    assert "renamed/1 already has its 4 steps" in capsys.readouterr().out
    assert not list((world / "renamed").glob("*/failed.json"))
    (world / "renamed" / "1" / "config.yaml").write_text("drafter: [")
    assert "cannot read renamed/1/config.yaml" in expect_error(monkeypatch, capsys, "train.py", *arguments)


def test_a_resumed_run_is_planned_by_its_own_config(world, monkeypatch, capsys):
    """On a machine without the weights of its base model."""
    monkeypatch.chdir(world)
    shutil.copytree("run", "moved")
    random_lm(context=128).config.save_pretrained(world / "shape")
    config = OmegaConf.load(world / "moved" / "config.yaml")
    config.base.path, config.plan_only = "shape", True
    OmegaConf.save(config, world / "moved" / "config.yaml")
    run_script(monkeypatch, "train.py", "resume=moved")
    assert "because no weights of shape are on this machine" in capsys.readouterr().out


def test_downloaded_prompts_may_have_a_manifest_of_their_own(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    (world / "downloaded").mkdir()
    shutil.copy(world / "prompts.jsonl", world / "downloaded")
    (world / "downloaded" / "manifest.json").write_text('{"sources": []}')
    run_script(
        monkeypatch, "train.py",
        *train_args("run=never", "prepared=none", "corpus.path=downloaded", "plan_only=true"),
    )  # fmt: skip
    assert "24 prompts of 24 conversations" in capsys.readouterr().out


def test_ctrl_c_prints_one_sentence(world, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(world)
    monkeypatch.setattr("ctcdraft.evaluation.runner.run_questions", interrupted)
    with pytest.raises(SystemExit) as left:
        run_script(monkeypatch, "evaluate.py", "checkpoint=run", "benchmark.path=prompts.jsonl", "out=stopped")
    assert left.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("evaluate.py: stopped by Ctrl-C; what was finished")
