"""What the config alone shows to be wrong is refused before torch is imported, and what cannot be written at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from entry_parts import REPOSITORY, expect_error, train_args

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
    ("script", "words", "sentence"),
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
def test_a_refusal_waits_for_no_import(tmp_path, script, words, sentence):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.yaml").touch()
    done = subprocess.run(
        [sys.executable, "-c", REPORTED, str(REPOSITORY / script), *words],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1:] == ["1"]  # the exit status, and none of HEAVY
    assert [file.name for file in tmp_path.iterdir()] == ["held"]


@pytest.mark.parametrize(
    ("script", "words", "key"),
    [
        ("train.py", ["run=prompts.jsonl/x"], "run"),
        ("train.py", ["-m", "run=prompts.jsonl/x", "seed=1,2"], "run"),
        ("train.py", ["run=x", "prepared=/proc/never"], "prepared"),
        ("train.py", ["run=x", "states=stored", "states.path=/proc/never"], "states.path"),
        ("evaluate.py", ["checkpoint=run", "out=/proc/never"], "out"),
        ("evaluate.py", ["recorded.path=gone", "out=/proc/never"], "out"),
        ("data/prepare.py", ["out=/proc/never"], "out"),
    ],
)
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_loaded(
    world, monkeypatch, capsys, script, words, key
):
    """The base that is named is not there, which would be found first if it were looked for."""
    monkeypatch.chdir(world)
    base = ["base=local", "base.path=nowhere"]
    words = [*words, *base] if script == "evaluate.py" else [*train_args(*words), "base.path=nowhere"]
    if script == "data/prepare.py":
        words = [word for word in words if word.startswith(("base", "out", "corpus"))]
    said = expect_error(monkeypatch, capsys, script, *words)
    assert f"{script.rpartition('/')[2]}: {key}=" in said
    assert "cannot be written" in said
    assert f"choose another {key}=" in said
    assert not (world / "x").exists()


def test_the_default_out_is_looked_at_before_the_base(world, monkeypatch, capsys):
    """In the run's own folder, as where a colleague's run is evaluated."""
    monkeypatch.chdir(world)
    (world / "run" / "evaluation").touch()
    said = expect_error(monkeypatch, capsys, "evaluate.py", "checkpoint=run", "base=local", "base.path=nowhere")
    (world / "run" / "evaluation").unlink()
    assert "out=run/evaluation/tiny-greedy cannot be written" in said


def test_a_prepared_corpus_need_not_be_writable(world, monkeypatch, capsys):
    """It is only read once it is complete: the next thing that is wrong is what is told."""
    monkeypatch.chdir(world)
    tried = []
    monkeypatch.setattr("ctcdraft.config.early_checks.refuse_unwritable", lambda folder, key: tried.append(key))
    expect_error(monkeypatch, capsys, "train.py", *train_args("run=x", "base.path=nowhere"))
    expect_error(monkeypatch, capsys, "train.py", *train_args("run=x", "prepared=never", "base.path=nowhere"))
    assert tried == ["run", "run", "prepared"]


@pytest.mark.parametrize(
    ("script", "word", "sentence"),
    [
        ("evaluate.py", "drafter.body.blocks=2", "contestants=[{NAME:{body:{blocks:2}}}]"),
        ("evaluate.py", "drafter=oracle", "contestants=[RUN,prompt_lookup]"),
        ("evaluate.py", "drafter/tree=per_frame", "contestants=[RUN@per_frame]"),
        ("evaluate.py", "trainer.steps=3", "trainer.steps= is a key of train.py, not of evaluate.py"),
        ("train.py", "checkpoint=run", "checkpoint= is a key of evaluate.py, not of train.py"),
        ("data/prepare.py", "benchmark=tiny", "benchmark= is a key of evaluate.py, not of data/prepare.py"),
    ],
)
def test_a_key_of_another_entry_point_is_called_that(world, monkeypatch, capsys, script, word, sentence):
    monkeypatch.chdir(world)
    said = expect_error(monkeypatch, capsys, script, word)
    assert sentence in said
    assert "did you mean" not in said
