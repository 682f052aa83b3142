"""The table of a sweep by pencil, and a search whose trials are small scripts that write what train.py would."""

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
from ctcdraft.training.search import Interval, search
from ctcdraft.training.sweep import flat, read_job, swept, write_table

REPOSITORY = Path(__file__).resolve().parents[2]


def made(folder, name, taus, frames, rate, seed=0, extra=""):
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"run: {folder}\nseed: {seed}\ndrafter: {{frames: {frames}, body: {{slots: {frames}}}}}\n"
        f"trainer: {{learning_rate: {rate}, betas: [0.9, 0.95]}}\n{extra}"
    )
    lines = [{"step": step, "loss": 9 - tau, "tau": tau} for step, tau in enumerate(taus, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "command.txt").write_text(f"python train.py drafter.frames={frames} run={run}-again\n")


def test_the_table_says_who_wins_and_by_how_much(tmp_path):
    made(tmp_path, "0", [1.0, 1.5], 4, 0.001)
    made(tmp_path, "1", [2.2, 2.0], 6, 0.001)  # the best probe counts, not the last
    made(tmp_path, "2", [2.0], 6, 0.001, seed=1)
    made(tmp_path, "3", [1.9], 8, 0.003)
    (tmp_path / "4").mkdir()  # a job that has only begun
    (tmp_path / "4" / "config.yaml").write_text("seed: 0\n")
    jobs = write_table(tmp_path)
    assert [job.name for job in jobs] == ["1", "2", "3", "0"]
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["job", "drafter.frames", "seed", "trainer.learning_rate", "tau", "loss", "steps"]
    assert rows[0] | {"tau": "2.2"} == rows[0]
    page = (tmp_path / "sweep.md").read_text()
    assert "| 6 | 0.001 | 2.100 | 0.141 | 2 | 7.000 | 1 2 |" in page
    # 2.1 over two seeds, 1.9 over one; the seeds' spread is sqrt(0.02), of the difference it is sqrt(0.02 * 3/2).
    assert "ahead of the second by 0.200 in tau; seeds alone spread it by 0.141, and that difference by 0.173" in page
    assert "not decided" in page
    assert page.rstrip().endswith(f"python train.py drafter.frames=6 run={tmp_path / '1'}-again")
    drawing = ET.parse(tmp_path / "sweep.svg").getroot()
    assert sum(node.tag.endswith("circle") for node in drawing) == 8  # four jobs in two panels


def test_seconds_of_a_run_are_those_of_its_steps(tmp_path):
    made(tmp_path, "0", [1.0, 1.5, 1.2], 4, 0.001)
    assert read_job(tmp_path / "0").clocks == {}, "a run from before they were kept"
    lines = [{"tau": 1.0, "processor_seconds": 0.5, "wall_seconds": seconds} for seconds in (1.0, 2.0)]
    (tmp_path / "0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_job(tmp_path / "0").clocks == {"processor": 1.0, "wall": 3.0}


def test_keys_that_follow_from_each_other_are_one_column(tmp_path):
    for number, frames in enumerate((4, 6, 6)):
        made(tmp_path, str(number), [1.0], frames, 0.001, seed=number, extra=f"prepared: place{frames}\n")
    assert swept(write_table(tmp_path)) == ["prepared", "seed"]
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": "[1, 2]", "d": None}


def test_a_value_is_text_in_the_plot_and_no_markup(tmp_path):
    evil = "</text><script>alert(1)</script>"
    for number, name in enumerate(("plain", evil)):
        made(tmp_path, str(number), [1.0], 4, 0.001, extra=f'"{evil}": "{name}"\n')
    write_table(tmp_path)
    drawing = ET.parse(tmp_path / "sweep.svg").getroot()
    assert not [node for node in drawing.iter() if node.tag.endswith("script")]
    assert {node.text for node in drawing if node.tag.endswith("text")} >= {"plain", evil, f"tau, by {evil}"}


def test_without_jobs_there_is_no_table(tmp_path):
    assert write_table(tmp_path) == []
    assert not list(tmp_path.iterdir())


TRIAL = """
import json, sys, time
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[1:])
run = Path(given["run"]); run.mkdir()
(run / "config.yaml").write_text("x: " + given["x"])
tau = 3 - (float(given["x"]) - 2) ** 2
for step in range(1, 4):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "tau": tau * step / 3}) + "\\n")
    time.sleep(0.02)
if "slow" in given: time.sleep(60)
"""


def test_a_search_finds_the_best_value_and_goes_on_where_it_was(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(searching, "SECONDS_BETWEEN_LOOKS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL)
    command, space = [sys.executable, str(tmp_path / "trial.py")], {"x": Interval(0, 4, False, whole=True)}
    said = []
    first = search(command, tmp_path / "run", space, trials=3, jobs=1, seed=0, log=said.append)
    second = search(command, tmp_path / "run", space, trials=5, jobs=2, seed=0, log=said.append)
    assert first <= second == 3.0
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == list("01234567")
    assert len(said) == 8
    assert "x" in (tmp_path / "run" / "sweep.csv").read_text().splitlines()[0]
    with pytest.raises(InputError, match=r"study\.log holds a search among other values .*; choose another run="):
        search(command, tmp_path / "run", {"x": [1, 2]}, trials=1, jobs=1, seed=0)


def test_a_key_that_is_added_keeps_its_plus(monkeypatch):
    """As objective=sum wants it: '+objective.weights.ctc=0.1,0.2'."""
    spaces = []
    monkeypatch.setattr(searching, "search", lambda command, run, space, *rest: spaces.append(space) or 1.0)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "+objective.weights.ctc=0.1,0.2", "drafter.frames=range(4,9)"])
    runpy.run_path(str(REPOSITORY / "sweep.py"), run_name="__main__")
    assert spaces == [
        {"+objective.weights.ctc": ["0.1", "0.2"], "drafter.frames": Interval(4, 8, logarithmic=False, whole=True)}
    ]


def test_a_trial_that_falls_behind_is_stopped(tmp_path, monkeypatch):
    """Behind the median of four others at the first probe, it would sleep for a minute."""
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr(searching, "SECONDS_BETWEEN_LOOKS", 0.01)
    (tmp_path / "trial.py").write_text(TRIAL)
    command = [sys.executable, str(tmp_path / "trial.py")]
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4), direction="maximize")
    for tau in (1.0, 2.0, 3.0, 2.5):
        study.add_trial(optuna.trial.create_trial(value=tau, intermediate_values={1: tau}))
    (tmp_path / "behind").mkdir()
    folder = tmp_path / "behind" / "0"
    status, tau, pruned = searching.train([*command, "x=0", "slow=yes", f"run={folder}"], folder, study.ask())
    assert (status, pruned) == (-15, True)
    assert tau <= 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trials=3"], "nothing is searched; give a key a range"),
        (["trials=0", "a=range(1,3)"], "trials=0 is impossible"),
        (["a=range(0.5,1)"], "a: range(..) of a search goes over whole numbers"),
        (["nonsense"], "nonsense is no key=value"),
        (["a=range(9,4)"], "a: nothing lies from 9 to 3; give its range upwards"),
        (["a=tag(log,interval(0,1))"], "a: nothing lies from 0.0 to 1.0; give its range upwards and, for its log"),
    ],
)
def test_a_wrong_word_is_one_sentence(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep.py", *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(REPOSITORY / "sweep.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert sentence in said
    assert said.count("\n") == 1


def test_without_optuna_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=re.escape("pip install 'ctcdraft[sweep]'")):
        search(["true"], tmp_path, {"x": [1]}, 1, 1, 0)
