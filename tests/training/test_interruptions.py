"""Kills, signals, damaged files, a full disk, gradients that are not finite: the final weights do not change."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time

import pytest
import torch
from tiny_models import random_base
from training_parts import Sometimes, logged_metrics, make_trainer

from ctcdraft.errors import InputError
from ctcdraft.training import run_directory
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory

STEPS = 40


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """An undisturbed run."""
    return trained(base, tmp_path_factory.mktemp("whole"))


def trained(base, path, loggers=(), steps=STEPS, **changes):
    """Continue a run from its checkpoint to its end; return the trainer."""
    run = RunDirectory(path)
    if not run.config.exists():
        run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, steps, **changes)
    one.restore()
    one.fit([JsonlLogger(run.metrics, one.step), *loggers])
    return one


def assert_same(one, other):
    for name, value in one.drafter.trainable_state_dict().items():
        assert torch.equal(value, other.drafter.trainable_state_dict()[name]), name
    assert logged_metrics(one.run) == logged_metrics(other.run)
    assert one.run.head.read_bytes() == other.run.head.read_bytes()


def lines(run):
    return run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0


def killed_at(base, path, step, jitter):
    """Train in a child process, and kill it a moment after it has logged `step` steps."""
    child = os.fork()
    if child == 0:
        try:
            trained(base, path)
        finally:
            os._exit(1)
    while lines(RunDirectory(path)) < step:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended before it was killed"
        time.sleep(0.0005)
    time.sleep(jitter)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_weights_are_the_same(base, whole, tmp_path, kills):
    rng = random.Random(kills)
    run, stood = RunDirectory(tmp_path), []
    for step in sorted(rng.randint(0, STEPS - 3) for _ in range(kills)):
        killed_at(base, tmp_path, step, rng.uniform(0, 0.01))
        stood.append(len(run.resume_files) and int(run.resume_files[0].stem.split("-")[1]))
    print(f"{kills} kills; the checkpoint after each of them: {stood}")
    assert stood == sorted(stood)
    assert 0 < stood[-1] < STEPS
    assert_same(whole, trained(base, tmp_path))
    assert [file.name for file in run.resume_files] == ["resume-000000040.pt", "resume-000000035.pt"]
    assert not list(tmp_path.glob("resume*.partial"))


class SignalAt:
    """A logger that sends the process a signal when a step is logged."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def log(self, step, figures):
        if step == self.step:
            os.kill(os.getpid(), self.number)

    def close(self):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_state_and_prints_how_to_resume(base, whole, tmp_path, capsys, number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left:
        trained(base, tmp_path, [SignalAt(7, number)])
    assert left.value.code == 128 + number
    assert f"{number.name} after step 7: the state is saved; continue with resume={tmp_path}" in capsys.readouterr().out
    assert signal.getsignal(number) is before
    assert RunDirectory(tmp_path).load_state()["step"] == 7
    assert_same(whole, trained(base, tmp_path))


def test_a_damaged_state_falls_back_to_the_one_before(base, whole, tmp_path, capsys):
    """One flipped bit, which torch.load would not notice; then a truncated file."""
    with pytest.raises(SystemExit):
        trained(base, tmp_path, [SignalAt(33, signal.SIGTERM)])
    newest, before = RunDirectory(tmp_path).resume_files
    assert [newest.stem, before.stem] == ["resume-000000033", "resume-000000030"]
    spoilt = bytearray(newest.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    newest.write_bytes(spoilt)
    again = trained(base, tmp_path)
    assert f"{newest.name} in {tmp_path} is damaged; resuming from {before.name} instead" in capsys.readouterr().out
    assert_same(whole, again)
    assert not newest.exists()
    RunDirectory(tmp_path).save_state(37, {}, keep=1)  # a state of step 40 would be a damaged one
    assert [file.stem for file in RunDirectory(tmp_path).resume_files] == ["resume-000000037"]
    for file in RunDirectory(tmp_path).resume_files:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="has no intact state"):
        trained(base, tmp_path)


def full_disk(monkeypatch, times):
    """Let writing fail in the middle of so many states."""
    real, left = run_directory.atomic_write, [times]

    def write_whole(path, write):
        def half(draft):
            draft.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        full = left[0] and path.name.startswith("resume")
        left[0] -= bool(full)
        real(path, half if full else write)

    monkeypatch.setattr(run_directory, "atomic_write", write_whole)


def test_training_continues_after_a_full_disk_at_a_checkpoint(base, whole, tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, 2)
    assert_same(whole, trained(base, tmp_path))
    lines = [line for line in capsys.readouterr().out.splitlines() if "No space left" in line]
    assert [line.split(":")[0] for line in lines] == ["step 5", "step 10"]
    assert lines[0].endswith("(training continues, and the next checkpoint tries again)")


def test_a_disk_that_stays_full_keeps_what_was_written(base, whole, tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        trained(base, tmp_path, [SignalAt(33, signal.SIGTERM)])
    full_disk(monkeypatch, -1)
    with pytest.raises(InputError, match=r"cannot write .*resume-000000040\.pt.*No space left.*make room"):
        trained(base, tmp_path)
    monkeypatch.undo()
    assert [file.stem for file in RunDirectory(tmp_path).resume_files] == ["resume-000000033", "resume-000000030"]
    assert_same(whole, trained(base, tmp_path))


def test_a_metrics_line_that_a_full_disk_refused_is_written_later(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl", 0)
    real = logger._file

    class Full:
        def write(self, payload):
            raise OSError(errno.ENOSPC, "No space left on device")

    logger.log(1, {"loss": 1.0})
    logger._file = Full()
    logger.log(2, {"loss": float("nan")})
    logger._file = real
    logger.log(3, {"loss": 3.0})
    logger.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 3.0}]


def test_a_checkpoint_is_due_by_minutes_too(base, tmp_path):
    trained(base, tmp_path, steps=7, checkpoint_every=1000, checkpoint_minutes=1e-9, keep=3, patience=1)
    assert [int(file.stem[-2:]) for file in RunDirectory(tmp_path).resume_files] == [7, 6, 5]


def test_steps_with_nan_are_skipped_and_counted(base, tmp_path):
    one = trained(base, tmp_path, steps=12, objective=Sometimes(3, 4, 7))
    figures = [json.loads(line) for line in one.run.metrics.read_text().splitlines()]
    assert [line.get("skipped", 0) for line in figures] == [0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert [line["gradient_norm"] is None for line in figures] == [n in (3, 4, 7) for n in range(1, 13)]
    assert all(value.isfinite().all() for value in one.drafter.trainable_parameters())


def test_a_skipped_step_leaves_weights_and_gradients_alone(base, tmp_path):
    one = make_trainer(RunDirectory(tmp_path), base, 5, objective=Sometimes(1))
    before = [value.detach().clone() for value in one.drafter.trainable_parameters()]
    one.train_step()
    for value, old in zip(one.drafter.trainable_parameters(), before, strict=True):
        assert torch.equal(value, old)
        assert value.grad is None


def test_too_many_skipped_steps_stop_the_run(base, tmp_path):
    with pytest.raises(
        InputError, match=r"step 6 is nan.*2 other skipped steps.*trainer\.max_nonfinite_steps=3.*lower trainer\.lear"
    ):
        trained(base, tmp_path, objective=Sometimes(2, *range(4, 100)))
    assert RunDirectory(tmp_path).load_state()["step"] == 5


def test_a_run_that_non_finite_gradients_stop_keeps_its_weights(base, tmp_path):
    run, weights = RunDirectory(tmp_path), []
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, STEPS, objective=Sometimes(*range(8, 100)), checkpoint_every=1000)

    class Keep(JsonlLogger):
        def log(self, step, metrics):
            weights.append({name: value.clone() for name, value in one.drafter.trainable_state_dict().items()})

    with pytest.raises(InputError, match="the weights before these steps are in"):
        one.fit([Keep(run.metrics, 0)])
    saved = run.load_state()["head"]
    assert all(torch.equal(value, saved[name]) for name, value in weights[6].items())
    assert run.head.is_file()


def test_a_validation_that_fails_keeps_the_steps_before_it(base, whole, tmp_path, monkeypatch):
    def fail(validation, drafter):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("ctcdraft.training.trainer.DecodingValidation.metrics", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            trained(base, tmp_path, checkpoint_every=1000)
    assert RunDirectory(tmp_path).last_step == 6
    resumed = trained(base, tmp_path, checkpoint_every=1000)
    for name, value in whole.drafter.trainable_state_dict().items():
        assert torch.equal(value, resumed.drafter.trainable_state_dict()[name])
