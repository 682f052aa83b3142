"""Sequential drafters: every parameter trains, the base model stays frozen, and a checkpoint restores the drafter."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from sequential_parts import SEQUENTIAL_CASES, make_sequential_drafter, saved_lm
from tiny_models import random_base
from training_parts import make_trainer

from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.distillation import Distill, kl
from ctcdraft.planning.training import plan_training
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory


def lora(base, folder):
    torch.manual_seed(0)
    return DraftModel(base, saved_lm(folder), 4, 3, DynamicTree(3, 4))


CASES = {
    **SEQUENTIAL_CASES,
    "kangaroo": (lambda base, folder: make_sequential_drafter("kangaroo", base, folder, 3), Distill(3, 1.0, kl)),
    "draft_model": (lambda base, folder: make_sequential_drafter("draft_model", base, folder, 3), CrossEntropy(3, 1.0)),
    "draft_model_distilled": (
        lambda base, folder: make_sequential_drafter("draft_model", base, folder, 3),
        Distill(3, 1.0, kl),
    ),
    "draft_model_lora": (lora, Distill(3, 1.0, kl)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_falls_and_every_parameter_learns(case, tmp_path):
    base = random_base(context=64)
    make, objective = CASES[case]
    drafter = make(base, tmp_path)
    run = RunDirectory(tmp_path / "run")
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, steps=30, drafter=drafter, objective=objective)
    one.settings = replace(one.settings, probe_every=30)  # validated once, so the saved head is the last one
    assert f"initialised {drafter.initialised}" in plan_training(
        base, drafter, objective, one.batches, one.engine, 30, 1, 2
    )
    before = {name: value.detach().clone() for name, value in drafter.trainable_state_dict().items()}
    frozen = {name: value.clone() for name, value in base.lm.state_dict().items()}
    one.fit([JsonlLogger(run.metrics, 0)])
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    for name, value in drafter.trainable_state_dict().items():
        assert not torch.equal(value, before[name]), f"{name} never moved"
    for name, value in base.lm.state_dict().items():
        assert torch.equal(value, frozen[name]), f"the base's {name} moved"
    other = make(base, tmp_path)
    run.load_head(other)
    for name, value in drafter.trainable_state_dict().items():
        assert torch.equal(value, other.trainable_state_dict()[name])


@pytest.mark.parametrize("case", ["hydra_own", "eagle_ctc", "eagle3.1", "draft_model_distilled"])
def test_it_trains_and_decodes_in_float32_beside_a_bfloat16_base(case, tmp_path):
    base = random_base(context=64)
    base.lm.to(torch.bfloat16)
    make, objective = CASES[case]
    for autocast in (False, True):
        run = RunDirectory(tmp_path / str(autocast))
        run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
        one = make_trainer(run, base, steps=3, drafter=make(base, tmp_path), objective=objective, autocast=autocast)
        assert one.fit([JsonlLogger(run.metrics, 0)]) >= 1.0
        assert {value.dtype for value in one.drafter.trainable_parameters()} == {torch.float32}


def test_a_draft_model_trains_without_dropout(tmp_path):
    """gpt2 has dropout; no checkpoint holds its random state, so a resumed run would differ."""
    base = random_base(context=64)
    drafter = make_sequential_drafter("draft_model_gpt2", base, tmp_path, 3).train()
    batch = make_trainer(None, base, steps=1, drafter=drafter, objective=CrossEntropy(3, 1.0)).batches.batch(0)
    assert torch.equal(drafter(batch).logits(), drafter(batch).logits())


def test_lora_trains_little_and_starts_as_the_model_is(tmp_path):
    base = random_base(context=64)
    whole, part = make_sequential_drafter("draft_model", base, tmp_path, 3), lora(base, tmp_path)
    assert {name.split(".")[-3] for name in part.trainable_state_dict()} <= {"lora_A", "lora_B"}
    assert sum(p.numel() for p in part.trainable_parameters()) < sum(p.numel() for p in whole.trainable_parameters())
    tokens = torch.arange(20, 30)
    plain = DraftModel(base, saved_lm(tmp_path), None, 3, DynamicTree(3, 4))
    with torch.inference_mode():
        logits = [one.lm.read(tokens, one.lm.new_cache(16)).logits_NV for one in (part.eval(), plain.eval())]
    assert torch.equal(*logits)


def test_a_draft_model_that_cannot_serve_is_refused_in_one_sentence(tmp_path):
    base = random_base(context=64)
    with pytest.raises(InputError, match=r"drafter\.path="):
        DraftModel(base, None, None, 3, DynamicTree(3, 4))

    def other_tokenizer():
        from tiny_models import tiny_tokenizer

        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["one more"])
        return tokenizer

    with pytest.raises(InputError, match=r"another tokenizer \(262 tokens\) than the base random-llama \(261\)"):
        DraftModel(base, saved_lm(tmp_path / "other", tokenizer=other_tokenizer), None, 3, DynamicTree(3, 4))
    with pytest.raises(InputError, match=r"lora_rank must be an integer >= 1, got 0"):
        DraftModel(base, saved_lm(tmp_path / "same"), 0, 3, DynamicTree(3, 4))
    short = DraftModel(base, saved_lm(tmp_path / "short", context=20), None, 3, DynamicTree(3, 4))
    with pytest.raises(InputError, match=r"exceeds the context length 20 of the draft model short"):
        make_trainer(None, base, steps=1, drafter=short, objective=CrossEntropy(3, 1.0)).train_step()


def test_eagles_noise_is_added_in_training_only_and_follows_from_the_batch(tmp_path):
    base = random_base(context=64)
    drafter = make_sequential_drafter("eagle", base, tmp_path, 3)
    batches = make_trainer(None, base, steps=1).batches
    one, other = batches.batch(0), batches.batch(1)
    drafter.noise = 0.1
    assert torch.equal(drafter.noisy_states(one), one.states_BLD)  # not training
    drafter.train()
    off = drafter.noisy_states(one) - one.states_BLD
    assert torch.equal(drafter.noisy_states(one), drafter.noisy_states(one))
    assert 0.09 < float(off.abs().max()) <= 0.1 + 1e-6
    assert abs(float(off.mean())) < 0.01
    assert not torch.equal(off[0, 0], (drafter.noisy_states(other) - other.states_BLD)[0, 0])
    drafter.noise_length = 512
    scaled = drafter.noisy_states(one) - one.states_BLD
    for row, (anchors, lengths) in enumerate(zip(one.anchors_BA, one.lengths_BA, strict=True)):
        tokens = int((anchors + 2 + lengths)[lengths > 0].max())  # one text per row, from position 0 on
        torch.testing.assert_close(scaled[row], off[row] * 512 / tokens, rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match=r"drafter\.noise must be a number >= 0, got -1"):
        type(drafter)(base, 3, DynamicTree(3, 4), noise=-1)
