"""Checks before the heavy imports: wrong keys and values, and folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from entry_parts import REPOSITORY, expect_error, train_args

from ctcdraft.config.early_checks import check_before_imports

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "wandb")
REPORTED = f"""
import runpy, sys
script, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as ending:
    print(ending.code, *[name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("train.py", ["trainer.stepz=3"], "did you mean trainer.steps"),
        ("train.py", ["-m", "trainer.stepz=3,4"], "did you mean trainer.steps"),
        ("train.py", ["trainer.steps=0", "run=x"], "trainer.steps must be an integer >= 1, got 0"),
        ("train.py", ["run=held"], "held holds a run already; continue it with resume=held"),
        ("train.py", ["resume=nowhere"], "nowhere holds no run"),
        ("train.py", ["run=held/config.yaml/x"], "run=held/config.yaml/x cannot be written"),
        ("train.py", ["base=local"], "base.path= is missing"),
        ("evaluate.py", ["checkpoint=nowhere"], "contestant nowhere is neither a run directory"),
        ("evaluate.py", ["contestants=[nowhere@direct]"], "contestant nowhere@direct is neither a run directory"),
        ("evaluate.py", ["drafter.frames=99"], "contestants=[{NAME:{frames:99}}]"),
        ("evaluate.py", ["timing.questions=-1"], "timing.questions must be an integer >= 0, got -1"),
        ("data/prepare.py", ["corpuss=tiny"], "corpuss"),
        ("data/prepare.py", ["show=-1"], "show must be an integer >= 0, got -1"),
        ("sweep.py", ["drafter.frames=range(4,9)", "trials=0"], "trials must be an integer >= 1, got 0"),
        ("sweep.py", ["trials=2"], "nothing is searched"),
    ],
)
def test_a_wrong_command_is_refused_before_heavy_imports(tmp_path, script, arguments, sentence):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.yaml").touch()
    process = subprocess.run(
        [sys.executable, "-c", REPORTED, str(REPOSITORY / script), *arguments],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert sentence in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout.splitlines()[-1:] == ["1"]  # the exit status, and no module of HEAVY
    assert [file.name for file in tmp_path.iterdir()] == ["held"]


@pytest.mark.parametrize(
    ("script", "arguments", "key"),
    [
        ("train.py", ["run=prompts.jsonl/x"], "run"),
        ("train.py", ["-m", "run=prompts.jsonl/x", "seed=1,2"], "run"),
        ("train.py", ["run=x", "prepared=/proc/never"], "prepared"),
        ("train.py", ["run=x", "hidden_states=offline", "hidden_states.path=/proc/never"], "hidden_states.path"),
        ("evaluate.py", ["checkpoint=run", "out=/proc/never"], "out"),
        ("evaluate.py", ["recorded.path=gone", "out=/proc/never"], "out"),
        ("data/prepare.py", ["out=/proc/never"], "out"),
    ],
)
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_loaded(
    world, monkeypatch, capsys, script, arguments, key
):
    """The base does not exist either, which would be reported first if anything were loaded."""
    monkeypatch.chdir(world)
    base = ["base=local", "base.path=nowhere"]
    arguments = [*arguments, *base] if script == "evaluate.py" else [*train_args(*arguments), "base.path=nowhere"]
    if script == "data/prepare.py":
        arguments = [argument for argument in arguments if argument.startswith(("base", "out", "corpus"))]
    message = expect_error(monkeypatch, capsys, script, *arguments)
    assert f"{script.rpartition('/')[2]}: {key}=" in message
    assert "cannot be written" in message
    assert f"choose another {key}=" in message
    assert not (world / "x").exists()


def test_the_default_out_is_checked_before_the_base(world, monkeypatch, capsys):
    """The default is inside the run directory, which may belong to someone else."""
    monkeypatch.chdir(world)
    (world / "run" / "evaluation").touch()
    message = expect_error(monkeypatch, capsys, "evaluate.py", "checkpoint=run", "base=local", "base.path=nowhere")
    (world / "run" / "evaluation").unlink()
    assert "out=run/evaluation/tiny-greedy cannot be written" in message


def test_without_one_run_the_default_out_is_named_by_the_contestants(world, monkeypatch, capsys):
    """Else an evaluation of other contestants would be refused."""
    monkeypatch.chdir(world)
    (world / "runs").touch()
    items = "contestants=[prompt_lookup,{suffix:{name:a/b}}]"
    message = expect_error(monkeypatch, capsys, "evaluate.py", items, "base=local", "base.path=nowhere")
    (world / "runs").unlink()
    assert "out=runs/evaluation/tiny-greedy-nowhere-prompt_lookup-a_b cannot be written" in message


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_wait_passively_where_nothing_else_is_asked_for(monkeypatch, capsys, given, found):
    monkeypatch.setattr(sys, "argv", ["train.py", "no_key=1"])
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # restored afterwards
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        check_before_imports("train")
    assert os.environ["OMP_WAIT_POLICY"] == found


def test_a_prepared_corpus_need_not_be_writable(world, monkeypatch, capsys):
    """A complete corpus is only read."""
    monkeypatch.chdir(world)
    checked = []
    monkeypatch.setattr("ctcdraft.config.early_checks.refuse_unwritable", lambda folder, key: checked.append(key))
    expect_error(monkeypatch, capsys, "train.py", *train_args("run=x", "base.path=nowhere"))
    expect_error(monkeypatch, capsys, "train.py", *train_args("run=x", "prepared=never", "base.path=nowhere"))
    assert checked == ["run", "run", "prepared"]


@pytest.mark.parametrize(
    ("script", "argument", "sentence"),
    [
        ("evaluate.py", "drafter.body.blocks=2", "contestants=[{NAME:{body:{blocks:2}}}]"),
        ("evaluate.py", "drafter=oracle", "contestants=[RUN,prompt_lookup]"),
        ("evaluate.py", "drafter/tree=per_frame", "contestants=[RUN@per_frame]"),
        ("evaluate.py", "trainer.steps=3", "trainer.steps= is a key of train.py, not of evaluate.py"),
        ("train.py", "checkpoint=run", "checkpoint= is a key of evaluate.py, not of train.py"),
        ("data/prepare.py", "benchmark=tiny", "benchmark= is a key of evaluate.py, not of data/prepare.py"),
    ],
)
def test_a_key_of_another_entry_point_is_named_as_such(world, monkeypatch, capsys, script, argument, sentence):
    monkeypatch.chdir(world)
    message = expect_error(monkeypatch, capsys, script, argument)
    assert sentence in message
    assert "did you mean" not in message
