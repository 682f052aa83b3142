"""Training lowers the loss, resumes bit for bit, leaves the base model unchanged, and its directory is a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import random_base
from training_parts import ctc_head, logged_metrics, make_trainer

from ctcdraft.errors import InputError
from ctcdraft.training.loggers import MACHINE_METRICS, JsonlLogger, StepTimer
from ctcdraft.training.run_directory import RunDirectory


@pytest.fixture
def base():
    return random_base(context=64)


def begun(path, base) -> RunDirectory:
    run = RunDirectory(path)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    return run


def fit(run, one) -> float:
    return one.fit([JsonlLogger(run.metrics, one.step)])


def test_resuming_equals_not_having_stopped(base, tmp_path):
    whole = make_trainer(begun(tmp_path / "whole", base), base, steps=13)
    fit(whole.run, whole)

    run = begun(tmp_path / "killed", base)
    first = make_trainer(run, base, steps=13)
    log = JsonlLogger(run.metrics, 0)
    for _ in range(7):  # the last checkpoint is of step 5: steps 6 and 7 are repeated
        figures = first.train_step() | dict.fromkeys(MACHINE_METRICS, 0)
        first.step += 1
        log.log(first.step, figures)
        if first.step == 5:
            first.save()
    log.close()
    second = make_trainer(run, base, steps=13)
    second.restore()
    assert second.step == 5
    fit(run, second)

    for name, value in whole.drafter.trainable_state_dict().items():
        assert torch.equal(value, second.drafter.trainable_state_dict()[name]), name
    lines = [logged_metrics(one) for one in (whole.run, run)]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[1]] == list(range(1, 14))


def test_the_loss_falls_and_every_parameter_learns(base, tmp_path):
    one = make_trainer(begun(tmp_path / "run", base), base, steps=60)
    before = {name: value.detach().clone() for name, value in one.drafter.trainable_state_dict().items()}
    frozen = {name: value.clone() for name, value in base.lm.state_dict().items()}
    fit(one.run, one)
    losses = [json.loads(line)["loss"] for line in one.run.metrics.read_text().splitlines()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for name, value in one.drafter.trainable_state_dict().items():
        assert not torch.equal(value, before[name]), f"{name} never moved"
    for name, value in base.lm.state_dict().items():
        assert torch.equal(value, frozen[name]), f"the base's {name} moved"


class Scripted:
    """A validation with given results, which records the heads it gets."""

    def __init__(self, *taus):
        self.taus, self.shown = list(taus), []

    def metrics(self, drafter):
        self.shown.append({name: value.detach().clone() for name, value in drafter.trainable_state_dict().items()})
        return {"tau": self.taus.pop(0)}


@pytest.mark.parametrize(("taus", "kept"), [((2.0, 1.0), 0), ((1.0, 2.0), 1), ((0.0, 0.0), 1)])
def test_the_head_of_the_best_validation_is_saved(base, tmp_path, taus, kept):
    """Validations after steps 6 and 8, checkpoints after 5 and 8; without any tau the last head is saved."""
    one = make_trainer(begun(tmp_path / "run", base), base, steps=8)
    one.validation = Scripted(*taus)
    assert fit(one.run, one) == max(taus)
    saved, state = load_file(one.run.head), one.run.load_state()
    for name, value in one.validation.shown[kept].items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(state["head"][name], one.validation.shown[-1][name])  # the state to resume from
    assert any(not torch.equal(one.validation.shown[0][name], one.validation.shown[1][name]) for name in saved)


class Slow(Scripted):
    """A validation that takes long."""

    def metrics(self, drafter):
        sleep(0.3)
        return super().metrics(drafter)


def test_the_time_of_a_step_excludes_validation(base, tmp_path):
    one = make_trainer(begun(tmp_path / "run", base), base, steps=8)
    one.validation, began = Slow(1.0, 2.0), perf_counter()
    fit(one.run, one)
    lines = [json.loads(line) for line in one.run.metrics.read_text().splitlines()]
    assert all(line["processor_seconds"] > 0 for line in lines)
    assert 0 < sum(line["wall_seconds"] for line in lines) < perf_counter() - began - 2 * 0.3


def test_processor_seconds_exclude_waiting():
    pace = StepTimer()
    sleep(0.2)
    figures = pace.metrics(10)
    assert figures["wall_seconds"] >= 0.2
    assert figures["processor_seconds"] < 0.1
    assert figures["tokens_per_second"] == 10 / figures["wall_seconds"]


def test_a_checkpoint_gives_the_head_back(base, tmp_path):
    one = make_trainer(begun(tmp_path / "run", base), base, steps=5)
    fit(one.run, one)
    torch.manual_seed(9)
    other = ctc_head(base)
    one.run.load_head(other)
    for name, value in one.drafter.trainable_state_dict().items():
        assert torch.equal(value, other.trainable_state_dict()[name])
    assert not [name for name in other.trainable_state_dict() if "words" in name or "embedding" in name]


def test_refusals_are_one_sentence_with_the_way_out(base, tmp_path):
    run = begun(tmp_path / "run", base)
    with pytest.raises(InputError, match=r"holds a run already.*resume=.*overwrite=true"):
        run.create("", {}, overwrite=False)
    assert run.load_state() is None
    torn = run.path / "resume-000000005.pt"
    torn.write_bytes(b"torn")
    with pytest.raises(InputError, match=r"no intact state \(resume-000000005\.pt: damaged\); remove these files"):
        run.load_state()
    torn.unlink()
    run.head.write_bytes(b"torn")
    with pytest.raises(InputError, match=r"drafter\.safetensors is damaged"):
        run.load_head(ctc_head(base))
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory(tmp_path / "nowhere").require()
    run.refuse_other_base(base.fingerprint())
    other = random_base(seed=1, context=64).fingerprint()
    apart = f"weights {base.weights_hash} there, {other['weights']} here"
    with pytest.raises(InputError, match=f"for base random-llama, and this is another base of that name .*: {apart}"):
        run.refuse_other_base(other)
    apart = r"this is base another \(they differ in width, taps: width 32 there, 5 here; taps"
    with pytest.raises(InputError, match=apart):
        run.refuse_other_base(base.fingerprint() | {"base": "another", "width": 5, "taps": ["last", 1]})
    quantised = base.fingerprint() | {"weights": "packed", "quantised": "torchao_int8"}
    run.refuse_other_base(quantised)  # the same base, whose weights cannot be compared any more
    for other in ({"base": "another"}, {"width": 5}, {"quantised": None}):
        with pytest.raises(InputError, match="trained for base random-llama"):
            run.refuse_other_base(quantised | other)
    run.refuse_other_corpus("any")  # a run that was made by hand has no corpus
    run.fingerprint.write_text(json.dumps(base.fingerprint() | {"corpus": "abc"}))
    run.refuse_other_corpus("abc")
    with pytest.raises(InputError, match=r"on another corpus \(abc\) than is prepared now \(def\)"):
        run.refuse_other_corpus("def")
    one = make_trainer(run, base, steps=5)
    fit(run, one)
    with pytest.raises(InputError, match="does not fit its drafter"):
        run.load_head(ctc_head(base, frames=5))


def test_overwriting_starts_afresh(base, tmp_path):
    run = begun(tmp_path / "run", base)
    run.head.write_text("old")
    run.create("new: 1\n", {}, overwrite=True)
    assert not run.head.exists()
    assert run.config.read_text() == "new: 1\n"


def test_a_killed_overwrite_leaves_nothing_to_resume_from(base, tmp_path, monkeypatch):
    """Killed before each of its files in turn: the next start overwrites, and a resumed run has no state of the old."""
    for kill in range(7):
        run = begun(tmp_path / str(kill), base)
        for file in (run.head, run.metrics, run.command, run.path / "resume-000000040.pt"):
            file.write_text("old")
        real, left = Path.unlink, [kill]

        def unlink(self, missing_ok=False, real=real, left=left):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(self, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                run.create("new: 1\n", {}, overwrite=True)
        assert run.config.exists() or not run.resume_files
        run.create("new: 1\n", {}, overwrite=True)
        assert not run.resume_files
        assert not run.head.exists()


def test_clipping_by_value_bounds_every_entry(base, tmp_path):
    one = make_trainer(begun(tmp_path / "run", base), base, steps=5, clip_value=1e-4)
    seen = []
    one.engine.optimisers[0].register_step_pre_hook(
        lambda optimiser, *rest: seen.append(
            max(float(p.grad.abs().max()) for group in optimiser.param_groups for p in group["params"])
        )
    )
    one.train_step()
    assert 0 < seen[0] <= 1e-4 * 1.001


def test_a_float32_head_trains_and_decodes_beside_a_bfloat16_base(tmp_path):
    """The default on an accelerator, with and without autocast."""
    base = random_base(context=64)
    base.lm.to(torch.bfloat16)
    for autocast in (False, True):
        one = make_trainer(begun(tmp_path / str(autocast), base), base, steps=6, autocast=autocast)
        assert fit(one.run, one) >= 1.0
        assert {value.dtype for value in one.drafter.trainable_parameters()} == {torch.float32}


def test_rotary_angles_survive_a_cast_of_the_module(base):
    drafter = ctc_head(base)
    positions = torch.arange(60)
    before = drafter.body.rotary(positions)
    after = ctc_head(random_base(context=64)).to(torch.bfloat16).body.rotary(positions)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
