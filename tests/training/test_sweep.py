"""Tables of sweeps, computed by hand."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET

import pytest

from ctcdraft.progress import RemainingTime
from ctcdraft.training.sweep import (
    describe_unfinished,
    flatten_config,
    forget_failure,
    read_job,
    swept_keys,
    write_failure,
    write_table,
)


def write_run(folder, name, taus, frames, rate, seed=0, extra="", steps=1):
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"run: {folder}\nseed: {seed}\ndrafter: {{frames: {frames}, body: {{slots: {frames}}}}}\n"
        f"trainer: {{learning_rate: {rate}, betas: [0.9, 0.95], steps: {steps}}}\n{extra}"
    )
    lines = [{"step": step, "loss": 9 - tau, "tau": tau} for step, tau in enumerate(taus, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "command.txt").write_text(f"python train.py drafter.frames={frames} run={run}-again\n")


def csv_rows(folder):
    return list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))


def test_the_table_ranks_settings_and_gives_the_noise(tmp_path):
    write_run(tmp_path, "0", [1.0, 1.5], 4, 0.001)
    write_run(tmp_path, "1", [2.2, 2.0], 6, 0.001)  # the best validation counts, not the last
    write_run(tmp_path, "2", [2.0], 6, 0.001, seed=1)
    write_run(tmp_path, "3", [1.9], 8, 0.003)
    write_run(tmp_path, "4", [], 8, 0.003)  # a job that has just started
    jobs = write_table(tmp_path)
    assert [job.name for job in jobs] == ["1", "2", "3", "0"]
    rows = csv_rows(tmp_path)
    assert list(rows[0]) == ["job", "drafter.frames", "seed", "trainer.learning_rate", "tau", "loss", "steps", "status"]
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


def test_the_jobs_that_are_not_complete_are_named(tmp_path):
    """Job 1 was stopped after a validation, 2 before one, 3 failed, and 4 had only its folder."""
    write_run(tmp_path, "0", [1.0, 1.5], 4, 0.001, steps=2)
    assert describe_unfinished(tmp_path) == []
    write_run(tmp_path, "1", [1.0], 6, 0.001, steps=2)
    write_run(tmp_path, "2", [], 8, 0.001, steps=2)
    write_failure(tmp_path / "3", read_job(tmp_path / "0").values, "2 frames")
    (tmp_path / "4").mkdir()
    assert describe_unfinished(tmp_path) == [
        "job 1: 1 of 2 steps", "job 2: 0 of 2 steps", "job 3: failed: 2 frames", "job 4: 0 steps",
        "4 of 5 jobs are not complete",
    ]  # fmt: skip
    assert [job.name for job in write_table(tmp_path)] == ["0", "1"]
    assert {row["job"]: row["status"] for row in csv_rows(tmp_path)} == {
        "0": "complete", "1": "1 of 2 steps", "2": "0 of 2 steps", "3": "failed: 2 frames"
    }  # fmt: skip
    assert "| 8 | 0 of 2 steps |  | 0 |  | 2 |" in (tmp_path / "sweep.md").read_text()


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
    rows = {row["job"]: row for row in csv_rows(tmp_path)}
    assert [(rows[job]["drafter.frames"], rows[job]["tau"], rows[job]["status"]) for job in "012"] == [
        ("4", "1.5", "complete"), ("2", "", "failed: 2 frames | 3 labels"), ("8", "", "failed: the gradient is nan"),
    ]  # fmt: skip
    forget_failure(tmp_path / "2")
    assert [job.name for job in write_table(tmp_path)] == ["2", "0"]


def test_a_failure_recorded_with_old_keys_is_in_the_column_of_the_present_key(tmp_path):
    write_run(tmp_path, "0", [1.5], 4, 0.001)
    values = read_job(tmp_path / "0").values
    write_failure(tmp_path / "1", {**values, "trainer.rows": 4}, "no base")
    write_failure(tmp_path / "2", {**values, "trainer.batch_size": 8}, "no base")
    write_table(tmp_path)
    assert {"trainer.batch_size", "trainer.rows"} & set(csv_rows(tmp_path)[0]) == {"trainer.batch_size"}


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
    assert write_table(tmp_path) == []
    assert not list(tmp_path.iterdir()), "without jobs there is no table"
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
