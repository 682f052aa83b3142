"""Two processes that share the batches of a step equal one process that accumulates them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import random_base
from training_parts import logged_metrics, make_trainer

from ctcdraft.distributed import Distributed, init_distributed, local_batches, main_process_first
from ctcdraft.errors import InputError
from ctcdraft.models.deepspeed import SINGLE_PROCESS_ENV, load_deepspeed
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory

JOB = Path(__file__).with_name("torchrun_job.py")
EXIT_JOB = Path(__file__).with_name("exit_job.py")
ALONE_JOB = Path(__file__).with_name("deepspeed_job.py")
PATHS = os.pathsep.join([str(JOB.parents[2]), str(JOB.parents[1])])


def test_batches_are_shared_or_refused():
    assert [local_batches(4, Distributed(rank, 2)) for rank in range(2)] == [[0, 2], [1, 3]]
    with pytest.raises(
        InputError, match=r"trainer\.gradient_accumulation_steps must be a multiple of the 2 processes, got 3"
    ):
        local_batches(3, Distributed(0, 2))


def test_one_process_exchanges_nothing():
    alone, value = Distributed(), torch.ones(3)
    alone.all_reduce_mean([value])
    assert value.tolist() == [1, 1, 1]
    assert alone.any_process(True, False) == [True, False]
    assert alone.all_gather_object("x") == ["x"]


def test_all_reduce_mean_divides_the_sum_by_the_world_size(monkeypatch):
    """Two dtypes need two collectives; the other process has the same tensors plus 4."""
    sums = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: sums.append(flat.mul_(2).add_(4)))
    here = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]], dtype=torch.float64), torch.tensor([5.0])]
    Distributed(0, 2).all_reduce_mean(here)
    assert [value.tolist() for value in here] == [[3.0, 4.0], [[5.0]], [7.0]]
    assert [flat.dtype for flat in sums] == [torch.float32, torch.float64]


def test_rank_0_works_first():
    def order(rank):
        done, peers = [], Distributed(rank, 2)
        peers.barrier = lambda: done.append("barrier")
        main_process_first(peers, lambda: done.append("work"))
        return done

    assert [order(rank) for rank in range(2)] == [["work", "barrier"], ["barrier", "work"]]


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


def test_one_device_for_all_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="device=cuda is one device for 2 processes"):
        init_distributed("cuda")


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param([], id="torch"),
        pytest.param(["1"], id="zero 1", marks=pytest.mark.slow),
        pytest.param(["2"], id="zero 2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_like_one(tmp_path, stage):
    base = random_base(context=64)
    run = RunDirectory(tmp_path / "one")
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, 12, accumulate=2)
    one.fit([JsonlLogger(run.metrics, 0)])
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(JOB), str(tmp_path / "two"), "12", *stage],
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}, check=True, timeout=240,
    )  # fmt: skip
    other = RunDirectory(tmp_path / "two")
    curves = [logged_metrics(each) for each in (run, other)]
    for ours, theirs in zip(*curves, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)
    weights, theirs = load_file(run.head), load_file(other.head)
    for name, value in weights.items():
        assert torch.allclose(value, theirs[name], atol=1e-4), name


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which is not here")
@pytest.mark.parametrize(("arguments", "output"), [([], ["0 threads left"] * 4), (["held"], [])])
def test_processes_that_exit_right_after_a_collective_do_not_abort(arguments, output):
    """No gloo thread is left that could abort the process; where the group is referenced, they stay and do no harm."""
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
        [sys.executable, str(ALONE_JOB), "0", "2"], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
