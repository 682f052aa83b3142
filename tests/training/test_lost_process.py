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
    r"newest checkpoint is of step 5, continue with resume=killed\n"
)


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
    whole = {"folder": "whole", "steps": 10, **engine}
    killed = whole | {"folder": "killed"}
    death = {"kill_at": 7, "victim": processes - 1}
    done = run_job(machines, torchrun, runs=[whole, killed | death])
    if processes > 1:
        assert done[0][0] == 1
        assert re.search(SENTENCE, done[0][1]), done[0][1][-3000:]
    run, reference = (RunDirectory(machines[0] / name) for name in ("killed", "whole"))
    assert run.last_step == 5
    done = run_job(machines, torchrun, runs=[killed])
    assert all(status == 0 for status, _ in done), done
    assert all(list(machine.iterdir()) == [] for machine in machines[1:])
    most = 0.0 if processes < 4 else 1e-6
    assert reference.last_step == 10
    assert same(reference.load_state(), run.load_state(), most)
    assert same(load_file(reference.head), load_file(run.head), most)


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
    assert re.search(SENTENCE, error), error
