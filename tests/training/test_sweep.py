"""Tables of sweeps, computed by hand, and searches whose trials are small scripts with the output of train.py."""

from __future__ import annotations

import csv
import json
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ctcdraft.errors import InputError
from ctcdraft.training import search as searching
from ctcdraft.training.search import Interval, run_search
from ctcdraft.training.sweep import (
    RemainingTime,
    flatten_config,
    forget_failure,
    read_job,
    swept_keys,
    write_failure,
    write_table,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def write_run(folder, name, taus, frames, rate, seed=0, extra=""):
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"run: {folder}\nseed: {seed}\ndrafter: {{frames: {frames}, body: {{slots: {frames}}}}}\n"
        f"trainer: {{learning_rate: {rate}, betas: [0.9, 0.95]}}\n{extra}"
    )
    lines = [{"step": step, "loss": 9 - tau, "tau": tau} for step, tau in enumerate(taus, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "command.txt").write_text(f"python train.py drafter.frames={frames} run={run}-again\n")


def test_the_table_ranks_settings_and_gives_the_noise(tmp_path):
    write_run(tmp_path, "0", [1.0, 1.5], 4, 0.001)
    write_run(tmp_path, "1", [2.2, 2.0], 6, 0.001)  # the best validation counts, not the last
    write_run(tmp_path, "2", [2.0], 6, 0.001, seed=1)
    write_run(tmp_path, "3", [1.9], 8, 0.003)
    (tmp_path / "4").mkdir()  # a job that has just started
    (tmp_path / "4" / "config.yaml").write_text("seed: 0\n")
    jobs = write_table(tmp_path)
    assert [job.name for job in jobs] == ["1", "2", "3", "0"]
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["job", "drafter.frames", "seed", "trainer.learning_rate", "tau", "loss", "steps"]
    assert rows[0] | {"tau": "2.2"} == rows[0]
    page = (tmp_path / "sweep.md").read_text()
    assert "| 6 | 0.001 | 2.100 | 0.141 | 2 | 7.000 | 1 2 |" in page
    # Means 2.1 over two seeds and 1.9 over one; the deviation over seeds is sqrt(0.02), of the difference sqrt(0.03).
    assert "ahead of the second by 0.200 in tau; standard deviation over seeds 0.141, of that difference 0.173" in page
    assert "not decided" in page
    assert page.rstrip().endswith(f"python train.py drafter.frames=6 run={tmp_path / '1'}-again")
    drawing = ET.parse(tmp_path / "sweep.svg").getroot()
    assert sum(node.tag.endswith("circle") for node in drawing) == 8  # four jobs in two panels


def test_seconds_of_a_run_are_those_of_its_steps(tmp_path):
    write_run(tmp_path, "0", [1.0, 1.5, 1.2], 4, 0.001)
    assert read_job(tmp_path / "0").seconds_by_clock == {}, "a run from before they were kept"
    lines = [{"tau": 1.0, "processor_seconds": 0.5, "wall_seconds": seconds} for seconds in (1.0, 2.0)]
    (tmp_path / "0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_job(tmp_path / "0").seconds_by_clock == {"processor": 1.0, "wall": 3.0}


def test_keys_that_follow_from_each_other_are_one_column(tmp_path):
    for number, frames in enumerate((4, 6, 6)):
        write_run(tmp_path, str(number), [1.0], frames, 0.001, seed=number, extra=f"prepared: place{frames}\n")
    assert swept_keys(write_table(tmp_path)) == ["prepared", "seed"]
    assert flatten_config({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": "[1, 2]", "d": None}


def test_a_value_is_text_in_the_plot_and_no_markup(tmp_path):
    evil = "</text><script>alert(1)</script>"
    for number, name in enumerate(("plain", evil)):
        write_run(tmp_path, str(number), [1.0], 4, 0.001, extra=f'"{evil}": "{name}"\n')
    write_table(tmp_path)
    drawing = ET.parse(tmp_path / "sweep.svg").getroot()
    assert not [node for node in drawing.iter() if node.tag.endswith("script")]
    assert {node.text for node in drawing if node.tag.endswith("text")} >= {"plain", evil, f"tau, by {evil}"}


def test_a_seed_that_was_run_twice_is_one_seed(tmp_path):
    """Frames 6: seed 0 twice and seed 1 once are two seeds, of 2.0 and 2.4; frames 4: one seed, whose noise is unknown
    however often it was run."""
    for number, (frames, seed, tau) in enumerate([(6, 0, 2.0), (6, 0, 2.0), (6, 1, 2.4), (4, 0, 1.0), (4, 0, 1.0)]):
        write_run(tmp_path, str(number), [tau], frames, 0.001, seed=seed)
    write_table(tmp_path)
    page = (tmp_path / "sweep.md").read_text()
    assert "| 6 | 2.200 | 0.283 | 2 | 6.867 | 0 1 2 |" in page
    assert "| 4 | 1.000 |  | 1 | 8.000 | 3 4 |" in page
    # Over two seeds and one: 0.2828 * sqrt(1/2 + 1).
    assert "standard deviation over seeds 0.283, of that difference 0.346" in page


def test_a_job_that_failed_has_its_reason_in_the_table(tmp_path):
    write_run(tmp_path, "0", [1.5], 4, 0.001)
    values = read_job(tmp_path / "0").values
    write_failure(tmp_path / "1", {**values, "drafter.frames": 2, "drafter.body.slots": 2}, "2 frames | 3\nlabels")
    write_run(tmp_path, "2", [9.0], 8, 0.001)  # it stopped after a validation
    write_failure(tmp_path / "2", read_job(tmp_path / "2").values, "the gradient is nan")
    assert [job.name for job in write_table(tmp_path)] == ["0"]
    page = (tmp_path / "sweep.md").read_text()
    assert r"| 2 | failed: 2 frames \| 3 labels |  | 0 |  | 1 |" in page
    assert "| 8 | failed: the gradient is nan |  | 0 |  | 2 |" in page
    with (tmp_path / "sweep.csv").open() as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert [(rows[job]["drafter.frames"], rows[job]["tau"], rows[job]["failed"]) for job in "012"] == [
        ("4", "1.5", ""), ("2", "", "2 frames | 3 labels"), ("8", "", "the gradient is nan"),
    ]  # fmt: skip
    forget_failure(tmp_path / "2")
    assert [job.name for job in write_table(tmp_path)] == ["2", "0"]


def test_a_failure_recorded_with_old_keys_is_in_the_column_of_the_present_key(tmp_path):
    write_run(tmp_path, "0", [1.5], 4, 0.001)
    values = read_job(tmp_path / "0").values
    write_failure(tmp_path / "1", {**values, "trainer.rows": 4}, "no base")
    write_failure(tmp_path / "2", {**values, "trainer.batch_size": 8}, "no base")
    write_table(tmp_path)
    header = (tmp_path / "sweep.csv").read_text().splitlines()[0]
    assert "trainer.batch_size" in header
    assert "trainer.rows" not in header


@pytest.mark.parametrize("damage", [b"\xff", b'{"step": 2, "ta'])
def test_a_damaged_file_of_metrics_leaves_the_table_of_the_others(tmp_path, damage):
    """A run that is killed may leave half a line; the lines before it count."""
    write_run(tmp_path, "0", [1.5], 4, 0.001)
    write_run(tmp_path, "1", [1.7], 8, 0.001)
    with (tmp_path / "1" / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    names = [job.name for job in write_table(tmp_path)]
    assert names == (["0"] if damage == b"\xff" else ["1", "0"])


def test_a_sweep_of_failures_alone_has_a_table_too(tmp_path):
    write_failure(tmp_path / "0", {"seed": 0}, "no base")
    assert write_table(tmp_path) == []
    assert "| failed: no base |  | 0 |  | 0 |" in (tmp_path / "sweep.md").read_text()


def test_remaining_time_is_the_mean_of_finished_runs_times_the_rest_over_jobs():
    remaining = RemainingTime(8, jobs=2)
    assert remaining.run_ended(None) == "1 of 8 done", "a failed run gives no time"
    assert remaining.run_ended(600.0) == "2 of 8 done, about 30 minutes for the remaining 6"
    assert remaining.run_ended(1200.0) == "3 of 8 done, about 38 minutes for the remaining 5"
    assert [remaining.run_ended(900.0) for _ in range(5)][-2:] == [
        "7 of 8 done, about 15 minutes for the remaining 1", "8 of 8 done",
    ]  # fmt: skip


def test_without_jobs_there_is_no_table(tmp_path):
    assert write_table(tmp_path) == []
    assert not list(tmp_path.iterdir())


TRIAL = """
import json, sys, time
from pathlib import Path
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
run = Path(given["run"]); run.mkdir()
(run / "config.yaml").write_text("x: " + given["x"])
tau = 3 - (float(given["x"]) - 2) ** 2
for step in range(1, 4):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "tau": tau * step / 3}) + "\\n")
    time.sleep(0.02)
if "slow" in given: time.sleep(60)
"""


def test_a_search_finds_the_best_value_and_continues(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(searching, "POLL_SECONDS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL)
    command, space = [sys.executable, str(tmp_path / "trial.py")], {"x": Interval(0, 4, False, whole=True)}
    lines = []
    first = run_search(command, tmp_path / "run", space, trials=3, jobs=1, seed=0, log=lines.append)
    second = run_search(command, tmp_path / "run", space, trials=5, jobs=2, seed=0, log=lines.append)
    assert first <= second == 3.0
    assert len(lines) == 8
    again = [re.fullmatch(r"trial \d: x=(\d)  is trial (\d) again and was not run; .*", line) for line in lines]
    ran = {re.match(r"trial (\d): (x=\d)  tau", line)[1]: line for line in lines if "tau" in line}
    assert sum(match is not None for match in again) == 8 - len(ran) >= 3, "there are five values"
    assert all(f"x={match[1]}  tau" in ran[match[2]] for match in again if match), "each names the trial that ran"
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == sorted(ran)
    assert "x" in (tmp_path / "run" / "sweep.csv").read_text().splitlines()[0]
    with pytest.raises(InputError, match=r"study\.log is a search over other values .*; choose another run="):
        run_search(command, tmp_path / "run", {"x": [1, 2]}, trials=1, jobs=1, seed=0)


def test_a_search_prints_the_remaining_time(tmp_path, monkeypatch):
    """A patched clock gives every trial five minutes."""
    pytest.importorskip("optuna")
    monkeypatch.setattr(searching, "POLL_SECONDS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL)
    command, space = [sys.executable, str(tmp_path / "trial.py")], {"x": Interval(0, 4, False, whole=False)}
    ticks, lines = iter(range(0, 10**6, 300)), []
    run_search(command, tmp_path / "run", space, 3, jobs=1, seed=0, log=lines.append, clock=lambda: next(ticks))
    assert [line.split("; ")[1] for line in lines] == [
        "1 of 3 done, about 10 minutes for the remaining 2", "2 of 3 done, about 5.0 minutes for the remaining 1",
        "3 of 3 done",
    ]  # fmt: skip


def test_values_are_repeated_only_by_another_command(tmp_path, monkeypatch):
    """Of four concurrent trials of one value, one runs. A failed one is not repeated in the same search."""
    pytest.importorskip("optuna")
    monkeypatch.setattr(searching, "POLL_SECONDS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL + "\nPath(given['count']).open('a').write(given['run'] + '\\n')")
    command, lines = [sys.executable, str(tmp_path / "trial.py"), f"count={tmp_path / 'count'}"], []
    run_search(command, tmp_path / "run", {"x": [2]}, trials=4, jobs=4, seed=0, log=lines.append)
    run_search([*command, "more=1"], tmp_path / "run", {"x": [2]}, trials=1, jobs=1, seed=0, log=lines.append)
    assert len((tmp_path / "count").read_text().splitlines()) == 2
    assert sum("again and was not run" in line for line in lines) == 3
    fails = [sys.executable, "-c", f"open({str(tmp_path / 'fails')!r}, 'a').write('x'); raise SystemExit(1)"]
    with pytest.raises(InputError, match="none of 3 trials finished"):
        run_search(fails, tmp_path / "failing", {"x": [2]}, trials=3, jobs=1, seed=0, log=lines.append)
    assert (tmp_path / "fails").read_text() == "x"


def test_a_trial_is_named_by_its_values_in_wandb(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setattr(searching, "POLL_SECONDS", 0.01)
    tells = "import os\n(run / 'names').write_text(os.environ['WANDB_NAME'] + ' of ' + os.environ['WANDB_RUN_GROUP'])\n"
    (tmp_path / "trial.py").write_text(TRIAL + tells)
    run_search(
        [sys.executable, str(tmp_path / "trial.py")], tmp_path / "lr", {"x": [2]}, 1, 1, 0, log=lambda line: None
    )
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


def test_a_trial_that_falls_behind_is_stopped(tmp_path, monkeypatch):
    """It is below the median of four others at its first validation; unstopped it would sleep for a minute."""
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr(searching, "POLL_SECONDS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL)
    command = [sys.executable, str(tmp_path / "trial.py")]
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4), direction="maximize")
    for tau in (1.0, 2.0, 3.0, 2.5):
        study.add_trial(optuna.trial.create_trial(value=tau, intermediate_values={1: tau}))
    (tmp_path / "behind").mkdir()
    folder = tmp_path / "behind" / "0"
    status, tau, pruned = searching.run_trial([*command, "x=0", "slow=yes", f"run={folder}"], folder, study.ask())
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
        (
            ["a=tag(log,interval(0,1))"],
            "a: the range from 0.0 to 1.0 is empty; give it in ascending order and, on",
        ),
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


def test_a_missing_optuna_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=re.escape("pip install 'ctcdraft[sweep]'")):
        run_search(["true"], tmp_path, {"x": [1]}, 1, 1, 0)
