"""Processes that share the rows of a step equal one process that has them all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import random_base
from torchrun_job import curve, uneven_rows
from training_parts import logged_metrics, make_trainer

from ctcdraft.corpus.batches import Batches, first_fit_packing, one_per_row
from ctcdraft.distributed import ALONE, Distributed, LostProcessError, init_distributed, lost_process
from ctcdraft.errors import InputError
from ctcdraft.models.deepspeed import SINGLE_PROCESS_ENV, load_deepspeed
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory

JOB = Path(__file__).with_name("torchrun_job.py")
EXIT_JOB = Path(__file__).with_name("exit_job.py")
ALONE_JOB = Path(__file__).with_name("deepspeed_job.py")
PATHS = os.pathsep.join([str(JOB.parents[2]), str(JOB.parents[1])])


def test_one_process_exchanges_nothing():
    value = torch.ones(3)
    assert ALONE.sum(value) is value
    assert ALONE.any_process(True, False) == [True, False]
    assert ALONE.all_gather_object("x") == ALONE.from_main(lambda: ["x"]) == ["x"]


@pytest.mark.parametrize("packing", [one_per_row, first_fit_packing(70)])
def test_rows_and_anchors_do_not_depend_on_how_a_step_is_divided(packing):
    """The last step of a packed epoch has fewer rows than shares: some shares have no window."""
    base, empty = random_base(context=64), 0

    def windows(step, per_step, world):
        found = []
        for rank in range(world):
            one = Batches(uneven_rows(), base, 8, 8, 3, 0, packing=packing, per_step=per_step,
                          processes=Distributed(rank, world))  # fmt: skip
            for number in range(step * per_step, (step + 1) * per_step):
                batch = one.batch(number)
                nonlocal empty
                empty += not (batch.lengths_BA > 0).any()
                rows = zip(batch.tokens_BL, batch.anchors_BA, batch.labels_BAS, batch.lengths_BA, strict=True)
                for tokens_L, *window in rows:
                    real = [part[window[2] > 0].tolist() for part in window]
                    found.append((tokens_L.tolist()[: 1 + max(real[0], default=0)], real))
        return sorted(row for row in found if row[1][2])

    for step in range(3):
        whole = windows(step, 1, 1)
        assert whole
        assert whole == windows(step, 1, 2) == windows(step, 4, 1) == windows(step, 2, 4) == windows(step, 1, 3)
    assert (empty > 0) == (packing is not one_per_row)


def test_the_first_process_of_each_machine_works_first(monkeypatch):
    """Two machines of two processes; what the others raise is raised everywhere."""

    def order(rank):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        peers, turns = Distributed(rank, 4), []
        with monkeypatch.context() as patch:
            patch.setattr(Distributed, "all_gather_object", lambda *rest: turns.append("wait") or [None] * 4)
            peers.main_process_first(lambda: turns.append("work"))
            patch.setattr(Distributed, "all_gather_object", lambda *rest: [None, None, InputError("full disk"), None])
            with pytest.raises(InputError, match="full disk"):
                peers.main_process_first(lambda: None)
        return turns.index("work")

    assert [order(rank) for rank in range(4)] == [0, 2, 1, 2]


def test_a_missing_deepspeed_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for name in SINGLE_PROCESS_ENV:
        monkeypatch.setenv(name, SINGLE_PROCESS_ENV[name])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # as it sets itself: restored for the tests after this one
    with pytest.raises(InputError, match="pip install deepspeed"):
        load_deepspeed("cpu")


def test_a_port_in_use_is_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        values = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(InputError, match=rf"2 processes cannot connect at 127\.0\.0\.1:{port} .*--master-port"):
            init_distributed("cpu")


def test_a_store_that_has_ended_is_one_sentence():
    """It is on the first machine; other errors are left alone."""
    server = torch.distributed.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    del server

    def exchange():
        for _ in range(3):  # what was sent just before the end raises nothing
            client.add("taken", 1)

    with pytest.raises(LostProcessError, match="another process of this job has ended"), lost_process():
        exchange()
    with pytest.raises(RuntimeError, match="shapes"), lost_process():
        raise RuntimeError("shapes do not fit")


def test_one_device_for_all_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="device=cuda is one device for 2 processes"):
        init_distributed("cuda")


def curves(processes, folder, *cases):
    """Return the curves of several processes, each as torchrun_job.curve does."""
    done = run_job([folder] * processes, curves=cases)
    assert [status for status, _ in done] == [0] * processes, done
    return [torch.load(folder / f"{dtype}-{objective}-{accumulate}.pt") for dtype, objective, accumulate in cases]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_global_batch_gives_the_same_run(tmp_path, processes):
    """Rows, losses and weights, whether a step of eight rows is divided by processes, by accumulation, or by both."""
    cases = [("float64", "ctc", 1), ("float64", "ctc", 2), ("float64", "sum", 2), ("float32", "frames", 1)]
    several = curves(processes, tmp_path, *cases)
    for (dtype, objective, accumulate), theirs in zip(cases, several, strict=True):
        ours = curve(dtype, objective, 1)
        case = (dtype, objective, accumulate)
        if dtype == "float64":
            torch.testing.assert_close(theirs["weights"], ours["weights"], rtol=0, atol=1e-10, msg=str(case))
            torch.testing.assert_close(theirs["gradient_norm"], ours["gradient_norm"], rtol=1e-10, atol=0)
        torch.testing.assert_close(theirs["loss"], ours["loss"], rtol=0, atol=1e-5, msg=str(case))


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zero_trains_like_one_process(tmp_path, stage):
    base, run, other = random_base(context=64), RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two")
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, 12, accumulate=2, rows_per_step=8, prompt_count=3)
    one.fit([JsonlLogger(run.metrics, 0)])
    done = run_job([tmp_path] * 2, runs=[{"folder": "two", "steps": 12, "accumulate": 2, "stage": stage}])
    assert [status for status, _ in done] == [0, 0], done
    for ours, theirs in zip(*map(logged_metrics, (run, other)), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)
    weights, theirs = load_file(run.head), load_file(other.head)
    for name, value in weights.items():
        assert torch.allclose(value, theirs[name], atol=1e-4), name


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which is not here")
@pytest.mark.parametrize(("arguments", "output"), [([], ["0 threads left"] * 4), (["held"], [])])
def test_processes_that_exit_right_after_a_collective_do_not_abort(arguments, output):
    """No gloo thread is left that could abort the process; where the group is referenced, they stay and do no harm.

    Before, items are dealt: each to one process, in two rounds.
    """
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(free_port()),
         str(EXIT_JOB), *arguments],
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == output


@pytest.mark.slow
@pytest.mark.deepspeed
def test_deepspeed_skips_gradients_that_are_not_finite():
    """They affect neither the next gradient nor the schedule, with shards and without."""
    done = subprocess.run(
        [sys.executable, str(ALONE_JOB), "0", "2", "2+offload"], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def run_job(folders, torchrun=False, **case):
    """Run torchrun_job.py once per folder, in that folder; return exit status and stderr of each process.

    Each process is then the first of a machine of its own. torchrun: start all in the first folder, by torchrun.
    """
    processes, port = len(folders), str(free_port())
    common = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    command = [sys.executable, *(launcher if torchrun else []), str(JOB), json.dumps(case)]
    jobs = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank)}, cwd=folder, text=True, stderr=subprocess.PIPE, stdout=DEVNULL
        )
        for rank, folder in enumerate(folders[:1] if torchrun else folders)
    ]
    try:
        errors = [job.communicate(timeout=900)[1] for job in jobs if case.get("signal") != "SIGSTOP" or job is jobs[0]]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
            job.stderr.close()  # open where the job was not waited for
    return [(job.returncode, error) for job, error in zip(jobs, errors, strict=False)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
