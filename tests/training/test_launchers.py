"""Sweeps in several processes: one GPU per job, and jobs that fail or are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ctcdraft import devices
from ctcdraft.config.cli import REPOSITORY

JOB = Path(__file__).with_name("launcher_job.py")


@pytest.fixture(autouse=True)
def own_leases(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(devices.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


def test_devices_are_leased_once_before_they_are_shared():
    with ExitStack() as stack:
        lease = lambda: stack.enter_context(devices.leased_device(["4", "MIG-a/1"]))  # noqa: E731
        assert [lease() for _ in range(3)] == ["4", "MIG-a/1", "4"]
        with devices.leased_device(["4", "MIG-a/1"]) as fewest:
            assert fewest == "MIG-a/1"
    with devices.leased_device(["4", "MIG-a/1"]) as first:
        assert first == "4", "leases end"
    with devices.leased_device([]) as none:
        assert none is None


def test_a_process_sees_the_device_that_it_keeps(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    monkeypatch.setattr(devices, "_kept", [])
    with devices.leased_device(["2"]):
        devices.keep_device()
    devices.keep_device()  # the next job of the process
    assert devices.visible_devices() == ["5"]


def sweep(run: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return status and output of a sweep over four seeds."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "4,7", **environment}
    command = [sys.executable, str(JOB), "-m", "seed=0,1,2,3", "trainer.steps=1", f"run={run}", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def statuses(run: Path) -> dict[str, str]:
    lines = (run / "sweep.csv").read_text().splitlines()[1:]
    return {line.split(",")[0]: line.rpartition(",")[2] for line in lines}


def test_jobs_of_joblib_have_a_gpu_each_and_leave_a_table(tmp_path):
    """Seeds 0 and 1 wait for each other, so they run at the same time; seed 2 fails."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    run, launcher = tmp_path / "jobs", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    status, said = sweep(run, *launcher, KILL="1")
    seen = [(run / job / "seen").read_text().split(maxsplit=1) for job in "01"]
    assert sorted(gpu for gpu, _ in seen) == ["4", "7"]
    assert [title for _, title in seen] == ["jobs/0 seed=0", "jobs/1 seed=1"]
    assert status == 1
    assert "launcher_job.py: a job of the sweep has ended without a result (A worker process" in said
    assert f"sweep {run}: job 3: 0 steps\n" in said
    status, said = sweep(run, *launcher)
    assert status == 1
    assert re.search(r"job 2: failed: seed 2 cannot be trained\nsweep .*: 1 of 4 jobs are not complete\n", said)
    assert "jobs of the sweep failed, see above; the same command tries them again" in said
    complete = dict.fromkeys("013", "complete")
    assert statuses(run) == {**complete, "2": "failed: seed 2 cannot be trained"}


@pytest.mark.slow
def test_jobs_of_submitit_have_a_gpu_each_and_leave_a_table(tmp_path):
    """Its local executor starts the four jobs together and numbers the GPUs of every job from 0."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    run, launcher = tmp_path / "jobs", ["hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=4"]
    status, said = sweep(run, *launcher, KILL="1")
    seen = [(run / job / "seen").read_text().split(maxsplit=1)[0] for job in "01"]
    assert set(seen) <= set("0123"), "one GPU each"
    assert seen[0] != seen[1]
    assert status == 1
    assert "launcher_job.py: a job of the sweep has ended without a result (Job " in said
    assert f"sweep {run}: job 2: failed: seed 2 cannot be trained\n" in said
    assert sweep(run, *launcher)[0] == 1
    assert statuses(run) == {**dict.fromkeys("013", "complete"), "2": "failed: seed 2 cannot be trained"}
