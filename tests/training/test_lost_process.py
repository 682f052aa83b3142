"""A process that dies or stops ends the job with a sentence, and the run resumes bit for bit with every engine."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from test_two_processes import run_job

from ctcdraft.training.run_directory import RunDirectory

SLOW = [pytest.mark.slow, pytest.mark.deepspeed]
ENGINES = [
    pytest.param({}, id="torch"),
    pytest.param({"stage": 1}, id="zero 1", marks=SLOW),
    pytest.param({"stage": 2, "accumulate": 2}, id="zero 2", marks=SLOW),
]
SENTENCE = (
    r"torchrun_job\.py: another process of this job has ended, or did not answer within timeout_minutes= \(.*\); the "
    r"newest checkpoint is of step {}, continue with resume=killed\n"
)


def assert_resumes_after_a_kill(folders, engine, torchrun=False, newest=5, **death):
    """Let a run be killed, resume it, and assert that its end equals that of a run that was not killed."""
    killed, whole = ({"folder": name, "steps": 10, **engine} for name in ("killed", "whole"))
    death["victim"] = len(folders) - 1
    done = run_job(folders, torchrun, runs=[killed | death])
    run, reference = (RunDirectory(folders[0] / name) for name in ("killed", "whole"))
    if len(folders) > 1:
        assert done[0][0] == 1
        assert re.search(SENTENCE.format(newest), done[0][1]), done[0][1][-3000:]
    assert run.last_step == newest
    done = run_job(folders, torchrun, runs=[killed, whole])
    assert all(status == 0 for status, _ in done), done
    most = 0.0 if len(folders) < 4 else 1e-6
    assert reference.last_step == 10
    assert same(reference.load_state(), run.load_state(), most)
    assert same(load_file(reference.head), load_file(run.head), most)


@pytest.mark.parametrize(
    ("processes", "torchrun"),
    [(2, False), *(pytest.param(number, number != 1, marks=pytest.mark.slow) for number in (1, 2, 4))],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_process_ends_the_job_and_the_run_resumes(tmp_path, engine, processes, torchrun):
    """Without torchrun each process is on a machine of its own, and only the first machine has the run."""
    machines = [tmp_path / str(number) for number in range(processes)]
    for machine in machines:
        machine.mkdir()
    assert_resumes_after_a_kill(machines, engine, torchrun, kill_at=7)
    assert all(list(machine.iterdir()) == [] for machine in machines[1:])


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kill_in", "kill_at"), [("validate", 6), ("save", 5)])
def test_a_process_killed_between_steps_ends_the_job_too(tmp_path, engine, kill_in, kill_at, processes):
    """In validation or while the state is saved; of ZeRO's state each process has a share."""
    newest = 0 if kill_in == "save" and "stage" in engine else 5
    assert_resumes_after_a_kill([tmp_path] * processes, engine, newest=newest, kill_in=kill_in, kill_at=kill_at)


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    done = run_job([tmp_path] * 2, runs=[{"folder": "stopped", "steps": 10, "kill_at": 7, "signal": "SIGTERM"}])
    assert [status for status, _ in done] == [143, 143], done
    assert RunDirectory(tmp_path / "stopped").last_step == 8


def same(ours, theirs, most):
    """Return whether two states are equal, with numbers apart by at most `most`."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key], most) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs, [most] * len(ours)))
    if isinstance(ours, torch.Tensor):
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=most)
    return ours == theirs or abs(ours - theirs) <= most


@pytest.mark.slow
def test_a_silent_process_ends_the_job_after_the_timeout(tmp_path):
    run = {"folder": "killed", "steps": 10, "kill_at": 7, "signal": "SIGSTOP"}
    ((status, error),) = run_job([tmp_path] * 2, runs=[run], signal="SIGSTOP", timeout_minutes=0.1)
    assert status == 1
    assert re.search(SENTENCE.format(5), error), error
