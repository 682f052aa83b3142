"""A value that no run can be trained with is refused in one sentence that names its key, before anything is loaded."""

from __future__ import annotations

import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_models import random_base

from ctcdraft.config.build import build_drafter
from ctcdraft.config.cli import CONFIGS, find_input_error, register_resolvers
from ctcdraft.errors import InputError
from ctcdraft.training.settings import refuse_impossible

TRAINER_VALUES = [
    "betas=[0.9]", "betas=0.9", "betas=[2,3]", "betas=[a,b]", "clip_norm=abc", "clip_norm=-1", "clip_norm=0",
    "clip_norm=null", "clip_value=-1", "clip_value=abc", "weight_decay=-1", "weight_decay=abc", "final_share=abc",
    "final_share=-2", "threads=-1", "threads=abc", "autocast=abc", "prefetch=abc", "pack=abc", "steps=null",
    "compile=true",
]  # fmt: skip
PART_VALUES = [
    "objective.labels=abc", "objective.labels=2.5", "objective=prefix_ctc objective.decay=abc",
    "objective=sum objective.weights.distill=abc", "objective=eagle objective.states=abc",
    "objective=eagle_ctc objective.frames=abc", "drafter.body.blocks=abc", "drafter=medusa drafter.body.blocks=0",
    "drafter=blockwise drafter.body.inner=abc", "drafter=blockwise drafter.paths.words=0",
    "drafter=ctc_gru drafter.correction.rank=2.5", "drafter=eagle drafter.noise=abc",
    "drafter=hydra drafter.layers=abc", "drafter=eagle drafter.growth.width=abc",
    "states=stored states.limit_gb=abc", "states=stored states.limit_gb=0", "states=stored states.rows=2.5",
    "states=stored states.precision=float8",
]  # fmt: skip


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def compose_train(*overrides):
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("train", overrides=["device=cpu", *overrides])


def refusal(call, *arguments):
    """Return the message of the InputError that a call must raise, also where Hydra wraps it."""
    with pytest.raises((InputError, InstantiationException)) as raised:
        call(*arguments)
    error = find_input_error(raised.value)
    assert error is not None, raised.value
    return str(error)


@pytest.fixture(scope="module")
def shipped():
    return compose_train()


@pytest.mark.parametrize("override", TRAINER_VALUES)
def test_a_wrong_trainer_value_is_refused_by_its_key(shipped, override):
    settings = OmegaConf.merge(shipped.trainer, OmegaConf.from_dotlist([override]))
    assert re.match(rf"trainer\.{override.split('=')[0]}\b", refusal(refuse_impossible, settings, 0))


@pytest.mark.parametrize("seed", ["abc", -1, 1.5, None])
def test_a_wrong_seed_is_refused(shipped, seed):
    assert re.match(r"seed\b", refusal(refuse_impossible, shipped.trainer, seed))


def test_the_shipped_configs_are_accepted(shipped):
    presets = ["demo", "eagle_ctc", *(file.stem for file in (CONFIGS / "experiment").glob("ablation_*.yaml"))]
    errors = {}
    for config in (shipped, *(compose_train(f"experiment={preset}") for preset in presets)):
        try:
            refuse_impossible(config.trainer, config.seed)
        except InputError as error:
            errors[config.run] = str(error)
    assert len(presets) == 10
    assert errors == {}


@pytest.mark.parametrize("overrides", PART_VALUES)
def test_a_wrong_value_of_another_part_is_refused_by_its_key(base, overrides):
    config = compose_train(*overrides.split())
    key = overrides.split()[-1].split("=")[0]
    part = key.split(".")[0]
    make = {
        "objective": lambda: instantiate(config.objective),
        "drafter": lambda: build_drafter(config.drafter, base),
        "states": lambda: instantiate(config.states)(base, []),
    }
    assert re.match(rf"{re.escape(key)}\b", refusal(make[part]))
