"""Searches whose trials are small scripts with the output of train.py."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest
from filelock import FileLock

from ctcdraft import devices
from ctcdraft.errors import InputError
from ctcdraft.training import search as searching
from ctcdraft.training.search import run_search
from ctcdraft.training.trials import Interval

REPOSITORY = Path(__file__).resolve().parents[2]
TRIAL = """
import json, os, sys, time
from pathlib import Path
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
if "resume" in given: given |= {"run": given["resume"], "x": "2"}
run = Path(given["run"]); run.mkdir(exist_ok="resume" in given)
(run / "config.yaml").write_text("x: " + given["x"])
tau = 3 - (float(given["x"]) - 2) ** 2
for step in range(1, 4):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "tau": tau * step / 3}) + "\\n")
    time.sleep(0.02)
    if "killed" in given: (run / "resume-1.pt").touch(); os.kill(os.getpid(), 9)
if "slow" in given: time.sleep(float(given["slow"]))
if "count" in given: Path(given["count"]).open("a").write(given["run"] + "\\n")
(run / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
(run / "names").write_text(os.environ["WANDB_NAME"] + " of " + os.environ["WANDB_RUN_GROUP"])
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command of a trial, which takes x= and run=."""
    pytest.importorskip("optuna")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setattr(searching, "POLL_SECONDS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL)
    return [sys.executable, str(tmp_path / "trial.py")]


def test_a_search_finds_the_best_value_and_continues(tmp_path, command):
    """trials= is the number of all trials: a finished search gets no more."""
    space, lines = {"x": Interval(0, 4, False, whole=True)}, []
    first = run_search(command, tmp_path / "run", space, trials=3, jobs=1, seed=0, log=lines.append)
    second = run_search(command, tmp_path / "run", space, trials=8, jobs=2, seed=0, log=lines.append)
    assert first <= second == run_search(command, tmp_path / "run", space, 8, 2, 0, log=lines.append) == 3.0
    assert len(lines) == 8
    again = [re.fullmatch(r"trial \d: x=(\d)  is trial (\d) again and was not run; .*", line) for line in lines]
    ran = {re.match(r"trial (\d): (x=\d)  tau", line)[1]: line for line in lines if "tau" in line}
    assert sum(match is not None for match in again) == 8 - len(ran) >= 3, "there are five values"
    assert all(f"x={match[1]}  tau" in ran[match[2]] for match in again if match), "each names the trial that ran"
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == sorted(ran)
    assert "x" in (tmp_path / "run" / "sweep.csv").read_text().splitlines()[0]
    with pytest.raises(InputError, match=r"study\.log is a search over other values .*; choose another run="):
        run_search(command, tmp_path / "run", {"x": [1, 2]}, trials=9, jobs=1, seed=0)


def test_a_trial_that_was_killed_is_finished_from_its_checkpoint(tmp_path, command):
    """The parent of a trial that is killed is usually killed with it: the trial stays begun in the study."""
    lines, run, space = [], tmp_path / "run", {"x": [2]}
    with pytest.raises(InputError, match=r"none of 1 trials finished; .* 0 failed or were killed, .*0\.log; the same"):
        run_search([*command, "killed=1"], run, space, trials=1, jobs=1, seed=0, log=lines.append)
    assert "failed: status -9" in (run / "sweep.csv").read_text()
    assert run_search([*command, "killed=1"], run, space, trials=1, jobs=1, seed=0, log=lines.append) == 3.0
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["0"], "no new trial"
    assert f"trial.py resume={run / '0'}" in (run / "0.log").read_text()
    assert (run / "sweep.csv").read_text().splitlines()[1].endswith("complete")
    with searching.exclusive_search(run), pytest.raises(InputError, match="is searched by another process"):
        run_search(command, run, space, trials=1, jobs=1, seed=0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a trial goes on when its search is killed")
def test_a_trial_ends_with_its_search_and_is_continued_with_what_resume_takes(tmp_path, command):
    """Whoever stops sweep.py stops its trials; one that is still saving its state is waited for."""
    run, trusted = tmp_path / "run", "trust=[mine.Drafter]"
    searcher = (
        "import sys; from ctcdraft.training.search import run_search; from pathlib import Path; "
        f"run_search({[*command, 'slow=60', trusted]!r}, Path({str(run)!r}), {{'x': [2]}}, 1, 1, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", searcher]) as process:
        wait_until(lambda: (run / "0" / "metrics.jsonl").is_file())
        process.terminate()
    wait_until(lambda: not running(run / "0"))
    assert not (run / "0" / "gpu").exists(), "the trial was ended before its last line"
    (run / "0" / "resume-1.pt").touch()
    with ThreadPoolExecutor() as threads:
        with FileLock(run / "0" / "run.lock"):
            again = threads.submit(run_search, [*command, "slow=60", trusted], run, {"x": [2]}, 1, 1, 0)
            with pytest.raises(TimeoutError):
                again.result(timeout=1)
        assert again.result(timeout=60) == 3.0
    assert f"trial.py resume={run / '0'} '{trusted}'" in (run / "0.log").read_text()


def wait_until(reached):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(folder):
    """Whether a process has this folder in its command line."""
    found = [file for file in Path("/proc").glob("[0-9]*/cmdline") if file.parent.name != str(os.getpid())]
    return any(f"run={folder}".encode() in read_quietly(file) for file in found)


def read_quietly(file):
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


def test_a_failed_trial_is_tried_again_with_its_values(tmp_path, command):
    lines, run, space, flag = [], tmp_path / "run", {"x": Interval(0, 4, False, whole=False)}, tmp_path / "flag"
    fails = command[1].replace("trial.py", "fails.py")
    Path(fails).write_text(f"if not __import__('os').path.exists({str(flag)!r}): raise SystemExit(3)\n{TRIAL}")
    for _ in range(2):
        with pytest.raises(InputError, match="none of 2 trials finished"):
            run_search([command[0], fails], run, space, 2, 1, 0, log=lines.append)
    flag.touch()
    run_search([command[0], fails], run, space, 2, 1, 0, log=lines.append)
    assert len({line.split("  ")[0].partition(": ")[2] for line in lines}) == 2, "two values, three times each"
    assert [line.partition(":")[0] for line in lines] == [f"trial {number}" for number in range(6)]


def test_trials_have_a_gpu_each(tmp_path, command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(devices.tempfile, "tempdir", str(tmp_path))
    run_search([*command, "slow=1"], tmp_path / "run", {"x": Interval(0, 4, False, whole=False)}, 2, 2, 0, print)
    assert sorted((tmp_path / "run" / trial / "gpu").read_text() for trial in "01") == ["4", "7"]
    run_search([*command, "device=cuda:1"], tmp_path / "chosen", {"x": [2]}, 1, 1, 0, print)
    assert (tmp_path / "chosen" / "0" / "gpu").read_text() == "4,7"


def test_a_search_prints_the_remaining_time(tmp_path, command):
    """A patched clock gives every trial five minutes."""
    space = {"x": Interval(0, 4, False, whole=False)}
    ticks, lines = iter(range(0, 10**6, 300)), []
    run_search(command, tmp_path / "run", space, 3, jobs=1, seed=0, log=lines.append, clock=lambda: next(ticks))
    assert [line.split("; ")[1] for line in lines] == [
        "1 of 3 done, about 10 minutes for the remaining 2", "2 of 3 done, about 5.0 minutes for the remaining 1",
        "3 of 3 done",
    ]  # fmt: skip


def test_values_are_repeated_only_by_another_command(tmp_path, command):
    """Of four concurrent trials of one value, one runs. A failed one is not repeated in the same search."""
    command, lines = [*command, f"count={tmp_path / 'count'}"], []
    run_search(command, tmp_path / "run", {"x": [2]}, trials=4, jobs=4, seed=0, log=lines.append)
    run_search([*command, "more=1"], tmp_path / "run", {"x": [2]}, trials=1, jobs=1, seed=0, log=lines.append)
    assert len((tmp_path / "count").read_text().splitlines()) == 2
    assert sum("again and was not run" in line for line in lines) == 3
    fails = [sys.executable, "-c", f"open({str(tmp_path / 'fails')!r}, 'a').write('x'); raise SystemExit(1)"]
    with pytest.raises(InputError, match="none of 3 trials finished"):
        run_search(fails, tmp_path / "failing", {"x": [2]}, trials=3, jobs=1, seed=0, log=lines.append)
    assert (tmp_path / "fails").read_text() == "x"


def test_a_trial_is_named_by_its_values_in_wandb(tmp_path, command):
    run_search(command, tmp_path / "lr", {"x": [2]}, 1, 1, 0, log=lambda line: None)
    assert (tmp_path / "lr" / "0" / "names").read_text() == "lr/0 x=2 of lr"


def test_a_key_that_is_added_keeps_its_plus(monkeypatch):
    """As for objective=sum: '+objective.weights.ctc=0.1,0.2'."""
    spaces = []
    monkeypatch.setattr(searching, "run_search", lambda command, run, space, *rest: spaces.append(space) or 1.0)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "+objective.weights.ctc=0.1,0.2", "drafter.frames=range(4,9)"])
    runpy.run_path(str(REPOSITORY / "sweep.py"), run_name="__main__")
    assert spaces == [
        {"+objective.weights.ctc": ["0.1", "0.2"], "drafter.frames": Interval(4, 8, logarithmic=False, whole=True)}
    ]


def test_a_trial_that_falls_behind_is_stopped(tmp_path, command):
    """It is below the median of four others at its first validation; unstopped it would sleep for a minute."""
    import optuna

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4), direction="maximize")
    for tau in (1.0, 2.0, 3.0, 2.5):
        study.add_trial(optuna.trial.create_trial(value=tau, intermediate_values={1: tau}))
    (tmp_path / "behind").mkdir()
    folder = tmp_path / "behind" / "0"
    status, tau, pruned = searching.run_trial([*command, "x=0", "slow=60", f"run={folder}"], folder, study.ask())
    assert (status, pruned) == (-15, True)
    assert tau <= 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trials=3"], "nothing is searched; give a key a range"),
        (["trials=0", "a=range(1,3)"], "trials must be an integer >= 1, got 0"),
        (["a=range(0.5,1)"], "a: range(..) in a search takes integers"),
        (["nonsense"], "nonsense is no key=value"),
        (["a=range(9,4)"], "a: the range from 9 to 3 is empty; give it in ascending order"),
        (["a=tag(log,interval(0,1))"], "a: the range from 0.0 to 1.0 is empty; give it in ascending order and, on"),
        (["trails=2", "drafter.frames=range(4,9)"], "'trails'"),
        (["trails=2", "drafter.frames=range(4,9)"], "did you mean trials"),
        (["trials=2", "drafter.framez=range(4,9)"], "did you mean drafter.frames"),
        (["trainer.step=100", "drafter.frames=4,5"], "did you mean trainer.steps"),
        (["drafter=ctc,medusaa"], "did you mean drafter/medusa"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(arguments, sentence, monkeypatch, capsys, tmp_path):
    """Before the first trial: nothing is written, and no trial starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(searching, "run_trial", None)
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(REPOSITORY / "sweep.py"), run_name="__main__")
    message = capsys.readouterr().err
    assert left.value.code == 1
    assert sentence in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_prints_the_usage(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--help"])
    runpy.run_path(str(REPOSITORY / "sweep.py"), run_name="__main__")
    assert "python sweep.py trials=20 experiment=demo" in capsys.readouterr().out


def test_a_missing_optuna_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=re.escape("pip install 'ctcdraft[sweep]'")):
        run_search(["true"], tmp_path, {"x": [1]}, 1, 1, 0)
