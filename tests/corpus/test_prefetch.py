"""Prefetched batches equal plain ones, exceptions of the thread are raised by the step, no thread outlives the run."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from tiny_models import random_base
from training_parts import make_trainer, random_sequences

from ctcdraft.corpus.batches import Batches, PrefetchingBatches, first_fit_packing, one_per_row
from ctcdraft.corpus.hidden_states import OfflineHiddenStates, OnlineHiddenStates
from ctcdraft.errors import InputError
from ctcdraft.training.run_directory import RunDirectory

STEPS = 9


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def batches(base, filling=one_per_row, source=OnlineHiddenStates) -> Batches:
    made = Batches(
        random_sequences(), base, rows_per_step=3, anchors=8, labels=3, seed=0, hidden_states=source, packing=filling
    )
    made.hidden_states.precompute()
    return made


def stored(folder):
    return partial(OfflineHiddenStates, path=str(folder), precision="bfloat16", rows=4, limit_gb=1.0)


@pytest.mark.parametrize("filling", [one_per_row, first_fit_packing(70)], ids=["rows", "packs"])
@pytest.mark.parametrize("states", ["live", "stored"])
def test_the_same_batches_bit_for_bit(base, tmp_path, filling, states):
    source = OnlineHiddenStates if states == "live" else stored(tmp_path)
    plain = batches(base, filling, source)
    with closing(PrefetchingBatches(batches(base, filling, source), STEPS)) as ahead:
        for step in [*range(STEPS), 2, 3, 7]:  # forwards, then out of order
            one, other = plain.batch(step), ahead.batch(step)
            for name, value in vars(one).items():
                assert torch.equal(value, getattr(other, name)), (step, name)


def where_it_ran(base, monkeypatch, source, folder=None):
    """Return the threads that read hidden states from disk, and those that ran the base model."""
    disk, read = [], []
    row, states = OfflineHiddenStates.row, type(base).hidden_states
    monkeypatch.setattr(
        OfflineHiddenStates, "row", lambda *a: (disk.append(threading.current_thread().name), row(*a))[1]
    )
    monkeypatch.setattr(
        type(base), "hidden_states", lambda *a: (read.append(threading.current_thread().name), states(*a))[1]
    )
    with closing(PrefetchingBatches(batches(base, source=source), STEPS)) as ahead:
        read.clear()
        for step in range(3):
            ahead.batch(step)
        assert ahead.pending is not None
        assert ahead.pending[0] == 3
        ahead.pending[1].result()  # the fourth is prepared before it is requested
    return {name.split("_")[0] for name in disk}, {name.split("_")[0] for name in read}


def test_files_are_read_in_the_thread_and_the_base_model_runs_in_the_step(base, monkeypatch, tmp_path):
    main = threading.current_thread().name
    assert where_it_ran(base, monkeypatch, stored(tmp_path)) == ({"prefetch"}, set())
    assert where_it_ran(base, monkeypatch, OnlineHiddenStates) == (set(), {main})


def new_run(folder, base) -> RunDirectory:
    run = RunDirectory(folder)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    return run


def test_resuming_with_packs_and_prefetching_equals_an_uninterrupted_run(base, tmp_path):
    """Killed after step 7 and resumed from the checkpoint of step 5: batches and head are bit-identical to those of an
    uninterrupted run without prefetching."""
    source, steps = stored(tmp_path / "states"), 13
    whole = make_trainer(new_run(tmp_path / "whole", base), base, steps)
    whole.batches = batches(base, first_fit_packing(70), source)
    whole.fit([])

    run = new_run(tmp_path / "killed", base)
    first = make_trainer(run, base, steps)
    with closing(PrefetchingBatches(batches(base, first_fit_packing(70), source), steps)) as first.batches:
        for first.step in range(7):
            if first.step == 5:
                first.save()
            first.train_step()
    second = make_trainer(run, base, steps)
    second.restore()
    assert second.step == 5
    seen = []
    with closing(PrefetchingBatches(batches(base, first_fit_packing(70), source), steps)) as second.batches:
        monitored = second.batches.batch
        second.batches.batch = lambda step: (seen.append((step, monitored(step))), seen[-1][1])[1]
        second.fit([])
    assert [step for step, _ in seen] == list(range(5, 13))
    for step, batch in seen:
        for name, value in vars(whole.batches.batch(step)).items():
            assert torch.equal(value, getattr(batch, name)), (step, name)
    for name, value in whole.drafter.trainable_state_dict().items():
        assert torch.equal(value, second.drafter.trainable_state_dict()[name]), name


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")}


class Failing(OnlineHiddenStates):
    """Hidden states whose fourth batch cannot be read."""

    requests = 0

    def stored_states(self, packs):
        self.requests += 1
        if self.requests == 4:
            raise InputError("the disk is full; make room and resume")


def test_an_exception_in_the_thread_is_raised_by_the_step_that_needs_the_batch(base):
    one = make_trainer(None, base, steps=STEPS)
    with closing(PrefetchingBatches(batches(base, source=Failing), STEPS)) as one.batches:
        for one.step in range(3):
            one.train_step()
        assert threads() == {"prefetch_0"}
        one.step = 3
        with pytest.raises(InputError, match=r"^the disk is full; make room and resume$"):
            one.train_step()
    assert not threads()


def test_no_thread_is_left_behind(base):
    """Neither after the last step, nor when a step fails while the next batch is being prepared."""
    with closing(PrefetchingBatches(batches(base), 2)) as ahead:
        ahead.batch(0)
        ahead.batch(1)
        assert ahead.pending is None
    assert not threads()
    one = make_trainer(None, base, steps=STEPS)
    one.objective = lambda emissions, batch: 1 / 0
    with closing(PrefetchingBatches(batches(base), STEPS)) as one.batches, pytest.raises(ZeroDivisionError):
        one.fit([])
    assert not threads()
