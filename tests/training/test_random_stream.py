"""A training step draws nothing from torch's global random stream, so that no checkpoint needs to keep its state.

Batches, anchors and EAGLE's noise have generators of their own, keyed by seed and step or by the batch. Where a part
with dropout is added, this fails: either its draws are keyed too, or resuming is no longer equal to not having stopped.
"""

from __future__ import annotations

from math import isfinite

import pytest
import torch
from entry_parts import REPOSITORY
from hydra.utils import instantiate
from tiny_models import random_base
from training_parts import make_trainer

from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.training.lora import KLRegularizedObjective, LoRAAdapter
from ctcdraft.training.run_directory import RunDirectory

CONFIGS = REPOSITORY / "configs"
OBJECTIVES = {file.stem.removeprefix("of_") for file in (CONFIGS / "objective").glob("of_*.yaml")}
LEARNING = sorted(OBJECTIVES - {"early_exit"})  # has no weights of its own


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


CASES = [
    *([f"drafter={name}"] for name in LEARNING),
    *([f"drafter/body={name}"] for name in options("drafter/body")),
    *([f"drafter/correction={name}"] for name in options("drafter/correction") if name != "frame_gru"),
    ["drafter=domino"],  # frame_gru: not with objectives of alignments
    ["drafter=eagle", "objective=eagle_ctc"],
    ["drafter=draft_model", "+drafter.lora_rank=4"],
    ["objective=prefix_ctc"],
]


def unmoved(one) -> bool:
    """Return whether two training steps and a validation leave the generator unchanged."""
    before = torch.get_rng_state()
    for _ in range(2):
        assert isfinite(one.train_step()["loss"])
        one.step += 1
    one.validate()
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_no_shipped_head_draws_from_the_global_stream(arguments, folder, tmp_path):
    base = random_base(context=64)
    if "drafter=draft_model" in arguments:
        arguments = [argument.replace("+drafter.lora", "drafter.lora") for argument in arguments] + [
            f"drafter.path={folder}"
        ]
    config = compose_config("train", *arguments)
    drafter = build_drafter(config.drafter, base)
    one = make_trainer(RunDirectory(tmp_path), base, 5, drafter=drafter, objective=instantiate(config.objective))
    assert unmoved(one)


def test_nor_does_a_base_that_learns_too(tmp_path):
    base = random_base(context=64)
    one = make_trainer(RunDirectory(tmp_path), base, 5)
    adapter = LoRAAdapter(base, one.drafter, 2, 4, ["q_proj"], 1e-3, 1.0)
    one.engine.add_param_group(list(adapter.parameters.values()), 1e-3)
    one.batches.reading, one.objective = adapter.read, KLRegularizedObjective(one.objective, adapter)
    assert unmoved(one)


def test_a_checkpoint_of_before_that_has_random_states_is_gone_on_with(tmp_path):
    base = random_base(context=64)
    run = RunDirectory(tmp_path)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, 5)
    one.fit([])
    state = run.load_state()
    assert "rng" not in state
    run.save_state(5, state | {"rng": [[torch.get_rng_state()]]}, keep=1)
    other = make_trainer(run, base, 5)
    other.restore()
    assert other.step == 5
    for name, value in one.drafter.trainable_state_dict().items():
        assert torch.equal(value, other.drafter.trainable_state_dict()[name]), name
