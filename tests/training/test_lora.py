"""LoRA of the base model: gradients, resuming, and refusal of a head with another base model."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from entry_parts import expect_error, run_script, train_args
from tiny_models import random_base
from training_parts import ctc_head, logged_metrics, make_trainer

from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.objectives.base import WeightedSum
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.lora import KLRegularizedObjective, LoRAAdapter
from ctcdraft.training.run_directory import RunDirectory

HOW = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"], "learning_rate": 1e-2, "weight": 0.5}


def adapting(run, base, steps=6, **changes):
    """Return a trainer that trains a LoRA of the base model too."""
    drafter = ctc_head(base)
    one = make_trainer(run, base, steps, drafter=drafter)
    one.adapter = LoRAAdapter(base, drafter, **{**HOW, **changes})
    one.engine.add_param_group(list(one.adapter.parameters.values()), one.adapter.learning_rate)
    one.batches.compute_states = one.adapter.read
    one.objective = KLRegularizedObjective(one.objective, one.adapter)
    return one


def test_all_linear_layers_but_the_lm_head_are_a_word_of_peft():
    base = random_base()
    adapter = LoRAAdapter(base, ctc_head(base), **{**HOW, "targets": "all-linear"})
    assert {name.split(".")[-4] for name in adapter.parameters} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def shaken(adapter):
    for value in adapter.parameters.values():
        value.data += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)


def begun(folder, path):
    """Return a trainer restored from the run at `path`, with its own copy of the base model."""
    run, base = RunDirectory(path), load_base(folder, "float32", "cpu")
    if not run.config.exists():
        run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = adapting(run, base)
    one.restore()
    return one


def to_its_end(one):
    one.fit([JsonlLogger(one.run.metrics, one.step)])
    return one


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    return to_its_end(begun(folder, tmp_path_factory.mktemp("runs") / "whole"))


def test_resuming_equals_not_having_stopped(folder, whole, tmp_path):
    stopped = begun(folder, tmp_path / "run")
    while stopped.step < 3:
        stopped.train_step()
        stopped.step += 1
    stopped.save()
    again = to_its_end(begun(folder, tmp_path / "run"))
    assert logged_metrics(again.run) == logged_metrics(whole.run)[3:]
    for one, other in (
        (again.drafter.trainable_state_dict(), whole.drafter.trainable_state_dict()),
        (again.adapter.state(), whole.adapter.state()),
    ):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    files = ("drafter.safetensors", "adapter/adapter_model.safetensors")
    assert all((again.run.path / name).read_bytes() == (whole.run.path / name).read_bytes() for name in files)
    assert logged_metrics(whole.run)[0]["base_divergence"] == 0
    assert logged_metrics(whole.run)[-1]["base_divergence"] > 1e-3


def test_a_head_and_an_adapter_of_different_steps_are_refused(folder, whole, tmp_path):
    run = RunDirectory(Path(shutil.copytree(whole.run.path, tmp_path / "run")))
    run.load_head(ctc_head(load_base(folder, "float32", "cpu")))
    run.set_adapter("another adapter")  # as if the disk was full before the head was written
    with pytest.raises(InputError, match=r"are of different steps; resume="):
        run.load_head(ctc_head(load_base(folder, "float32", "cpu")))


def test_an_adapter_that_cannot_be_merged_is_refused_in_one_sentence(folder, whole, monkeypatch):
    """Such as one for a quantised base, into which peft merges nothing."""

    def fail(self):
        raise RuntimeError("no memory left\nfor weights")

    monkeypatch.setattr(peft.PeftModel, "merge_and_unload", fail, raising=False)
    with pytest.raises(InputError, match=r"cannot merge .*: no memory left.*; check base\.adapted="):
        load_base(folder, "float32", "cpu", adapted=str(whole.run.adapter))


def test_the_saved_adapter_gives_the_base_the_head_was_trained_with(folder, whole):
    """Loaded in peft's layout, it has the same fingerprint and the hidden states of training."""
    plain = load_base(folder, "float32", "cpu")
    adapted = load_base(folder, "float32", "cpu", adapted=str(whole.run.adapter))
    whole.run.refuse_other_base(adapted.fingerprint())
    assert adapted.fingerprint()["weights"] == plain.fingerprint()["weights"]
    assert "changed by LoRA" in adapted.execution_mode
    assert adapted.name.endswith("changed by LoRA")
    assert not any(value.requires_grad for value in adapted.parameters())
    tokens = torch.arange(20, 40)[None]
    states = [base.hidden_states(tokens, torch.ones_like(tokens)) for base in (plain, adapted, whole.adapter.base)]
    assert torch.allclose(states[1], states[2], atol=1e-4)
    assert not torch.allclose(states[1], states[0], atol=1e-2)
    with pytest.raises(
        InputError, match=r"trained together with a LoRA of its base, and this base is unchanged; .*checkpoint="
    ):
        whole.run.refuse_other_base(plain.fingerprint())


def test_gradients_reach_the_lora_weights():
    """Compared with finite differences of the loss, with a large step because the base normalises in float32."""
    base = random_base(context=64).double()
    one = adapting(None, base)
    one.drafter.double()
    shaken(one.adapter)

    def loss():
        batch = one.batches.batch(0)
        return one.objective(one.drafter(batch), batch).value

    loss().backward()
    for name, value in one.adapter.parameters.items():
        place, step = int(value.grad.abs().argmax()), 1e-3
        flat = value.data.view(-1)
        flat[place] += step
        above = loss().detach()
        flat[place] -= 2 * step
        below = loss().detach()
        flat[place] += step
        assert float((above - below) / (2 * step)) == pytest.approx(float(value.grad.view(-1)[place]), rel=1e-2), name


def test_an_objective_of_several_counts_is_still_one_with_the_divergence():
    parts = {"first": CrossEntropy(2, decay=1.0), "second": CrossEntropy(2, decay=0.5)}
    for objective in (WeightedSum(2, parts, {"first": 1.0, "second": 1.0}), parts["first"]):
        several = getattr(objective, "several_counts", False)
        assert several == (objective is not parts["first"])
        assert KLRegularizedObjective(objective, None).several_counts == several


def test_the_divergence_equals_that_of_two_separate_models():
    base = random_base(context=64)
    before = copy.deepcopy(base.lm)
    one = adapting(None, base)
    shaken(one.adapter)
    batch = one.batches.batch(0)
    apart, count = 0.0, 0
    with torch.no_grad():
        was, now = (lm(batch.tokens_BL).logits.log_softmax(dim=-1) for lm in (before, base.lm))
        for row, anchors in enumerate(batch.anchors_BA.tolist()):
            for column, anchor in enumerate(anchors):
                if batch.lengths_BA[row, column] > 0:
                    p, q = was[row, anchor], now[row, anchor]
                    apart, count = apart + float((p.exp() * (p - q)).sum()), count + 1
    assert float(one.adapter.divergence(batch).detach()) == pytest.approx(apart / count, rel=1e-4)
    assert apart > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["nowhere"]}, r"adapt\.targets=\['nowhere'\] do not fit"),
        ({"targets": ["lm_head"]}, "include the lm_head or the embedding .* leave them out"),
    ],
)
def test_a_wrong_value_is_refused(changes, message):
    base = random_base(context=64)
    with pytest.raises(InputError, match=message):
        LoRAAdapter(base, ctc_head(base), **{**HOW, **changes})


@pytest.mark.parametrize(
    "arguments", ["hidden_states=offline", "engine=deepspeed", "base.quantization=torchao_int8", "base.device_map=auto"]
)
def test_parts_that_need_an_unchanged_base_are_refused_before_loading(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    message = expect_error(monkeypatch, capsys, "train.py", *train_args("adapt=lora", "base.path=nowhere", arguments))
    assert "adapt=lora" in message


@pytest.mark.slow
def test_train_resume_and_evaluate_from_the_command_line(world, monkeypatch, capsys):
    """The head is evaluated with its own base only, and a head of the unchanged base is refused with it."""
    monkeypatch.chdir(world)
    how = ["adapt=lora", "adapt.rank=2", "adapt.learning_rate=0.01"]
    run_script(monkeypatch, "train.py", *train_args(*how, "run=adapted"))
    run_script(monkeypatch, "train.py", "resume=adapted", "trainer.steps=6")
    asked = ["benchmark.path=prompts.jsonl", "benchmark.limit=3", "decoding.max_new_tokens=12"]
    run_script(monkeypatch, "evaluate.py", "checkpoint=adapted", *asked, "out=out")
    report = json.loads(Path("out/report.json").read_text())
    assert all(row["lossless"]["equal"] == 3 for row in report["rows"])
    assert "changed by LoRA" in Path("out/report.md").read_text()
    own = ["base=local", "base.path=base", "out=other"]
    assert "this base is unchanged" in expect_error(
        monkeypatch, capsys, "evaluate.py", "checkpoint=adapted", *asked, *own
    )
    both = ["contestants=[adapted,run]", "out=both"]
    assert "was trained for the unchanged base" in expect_error(monkeypatch, capsys, "evaluate.py", *asked, *both)
