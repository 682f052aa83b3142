"""A whole comparison from the command line, at a small size, and its files when it is stopped or changed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from comparison_parts import environment, make_world, run_comparison

from ctcdraft.errors import InputError
from studies.comparison.store import ResultStore, read_rows

ROW = {"job": "tiny/ctc.1x.s0", "base": "tiny", "role": "1x", "method": "ctc", "seed": 0, "learning_rate": 0.004,
       "steps": 9, "frames": 6, "parameters": 10, "seconds": 1.25, "tau": 2.5, "commit": "abc"}  # fmt: skip


def test_rows_are_read_as_they_were_written(tmp_path):
    store = ResultStore(tmp_path / "out", tmp_path / "results")
    store.append_row(ROW)
    store.append_row(ROW | {"job": "tiny/ctc.1x.s1", "seed": 1})
    rows = store.rows()
    assert [*rows] == ["tiny/ctc.1x.s0", "tiny/ctc.1x.s1"]
    assert {key: rows["tiny/ctc.1x.s0"][key] for key in ROW} == ROW
    store.trainings.write_text(store.trainings.read_text() + "tiny/ctc.1x.s2,tiny,1x,ctc,two\n")
    with pytest.raises(InputError, match="has a damaged line"):
        read_rows(store.trainings)


def test_changed_overrides_are_refused(tmp_path):
    store = ResultStore(tmp_path / "out", tmp_path / "results")
    store.refuse_changed("tiny/ctc", ["drafter=ctc", "seed=0"], ["drafter=ctc", "seed=0"])
    with pytest.raises(InputError, match="was made with drafter=ctc and would now be made with drafter=eagle"):
        store.refuse_changed("tiny/ctc", ["drafter=ctc", "seed=0"], ["drafter=eagle", "seed=0"])


def test_a_job_is_run_by_one_process(tmp_path):
    store = ResultStore(tmp_path / "out", tmp_path / "results")
    with store.lock("tiny/ctc") as first, store.lock("tiny/ctc") as second, store.lock("tiny/eagle") as other:
        assert (first, second, other) == (True, False, True)
    with store.lock("tiny/ctc") as again:
        assert again


@pytest.mark.slow
def test_a_comparison_goes_on_after_a_kill(tmp_path):
    arguments = make_world(tmp_path)
    planned = run_comparison(tmp_path, *arguments, "plan=true").stdout
    assert "ctc.1x-0.003.s0, 1 steps at 0.003 (provisional)" in planned
    assert not (tmp_path / "out").exists()
    run_comparison(tmp_path, *arguments, "hours=0")
    assert len(read_rows(tmp_path / "results" / "trainings.csv")) == 1, "it ends after the first job"
    kill_in_training(tmp_path, arguments)
    done = run_comparison(tmp_path, *arguments).stdout
    assert done.count("python train.py") < 8
    assert "python " not in run_comparison(tmp_path, *arguments, "publish=true").stdout
    rows = read_rows(tmp_path / "results" / "trainings.csv")
    roles = [(row["method"], row["role"]) for row in rows.values()]
    assert {*roles} == {(method, role) for method in ("ctc", "medusa") for role in ("pace", "1x", "timing", "2x", "4x")}
    of_role = {role: row for (_, role), row in zip(roles, rows.values(), strict=True) if row["method"] == "ctc"}
    timing = of_role["timing"]
    timed = max(1, round(60 * 0.002 / (timing["seconds"] / timing["steps"])))
    assert [of_role[role]["steps"] for role in ("pace", "timing", "2x", "4x")] == [3, 3, 2 * timed, 4 * timed]
    assert all(row["seconds"] > 0 and row["tau"] >= 1 and row["parameters"] > 0 for row in rows.values())
    page = (tmp_path / "out" / "results" / "comparison" / "page.md").read_text()
    assert "| random | ctc |" in page
    assert "| random | prompt_lookup |" in page
    assert "ctc minus medusa" in page
    costs = json.loads((tmp_path / "results" / "costs.json").read_text())
    assert costs["medusa"]["launches"] > 0
    assert costs["medusa"]["unread"] == []
    # By hand: four heads, each a square matrix with bias at width 4096 and an lm_head of 32,000 rows.
    assert costs["medusa"]["bytes"] == 2 * 4 * (4096**2 + 4096 + 32000 * 4096)
    again = run_comparison(tmp_path, *arguments).stdout
    assert "python " not in again, "nothing is made again"
    changed = run_comparison(tmp_path, *arguments, "measure.checked=2", check=False)
    assert changed.returncode == 1
    assert "was made with measure.checked=1 and would now be made with measure.checked=2" in changed.stderr


def kill_in_training(folder, arguments):
    """Kill the comparison once a head has a saved state; the training that it runs then ends as well."""
    command = [sys.executable, "-m", "studies.comparison", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not list((folder / "out" / "heads").glob("random/*.4x.s0/resume-*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, "it is killed while it works"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
