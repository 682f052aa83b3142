"""Values that nobody can train with are one sentence that names the key, before anything is loaded or measured."""

from __future__ import annotations

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

OF_TRAINER = [
    "betas=[0.9]", "betas=0.9", "betas=[2,3]", "betas=[a,b]", "clip_norm=abc", "clip_norm=-1", "clip_norm=0",
    "clip_norm=null", "clip_value=-1", "clip_value=abc", "weight_decay=-1", "weight_decay=abc", "final_share=abc",
    "final_share=-2", "threads=-1", "threads=abc", "autocast=abc", "prefetch=abc", "pack=abc", "steps=null",
    "compile=true",
]  # fmt: skip
OF_PARTS = [
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


def composed(*words):
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("train", overrides=["device=cpu", *words])


def said(call, *words):
    """The sentence of a call that must end in one, whoever has wrapped it."""
    with pytest.raises((InputError, InstantiationException)) as raised:
        call(*words)
    sentence = find_input_error(raised.value)
    assert sentence is not None, raised.value
    return str(sentence)


@pytest.fixture(scope="module")
def shipped():
    return composed()


@pytest.mark.parametrize("word", OF_TRAINER)
def test_of_the_trainer(shipped, word):
    settings = OmegaConf.merge(shipped.trainer, OmegaConf.from_dotlist([word]))
    assert said(refuse_impossible, settings, 0).startswith(f"trainer.{word.split('=')[0]}=")


@pytest.mark.parametrize("seed", ["abc", -1, 1.5, None])
def test_of_the_dice(shipped, seed):
    assert said(refuse_impossible, shipped.trainer, seed).startswith("seed=")


def test_what_ships_is_possible(shipped):
    presets = ["demo", "eagle_ctc", *(file.stem for file in (CONFIGS / "experiment").glob("ablation_*.yaml"))]
    sentences = {}
    for config in (shipped, *(composed(f"experiment={preset}") for preset in presets)):
        try:
            refuse_impossible(config.trainer, config.seed)
        except InputError as error:
            sentences[config.run] = str(error)
    assert len(presets) == 10
    assert sentences == {}


@pytest.mark.parametrize("words", OF_PARTS)
def test_of_what_the_trainer_is_made_of(base, words):
    config = composed(*words.split())
    key = words.split()[-1].split("=")[0]
    part = key.split(".")[0]
    make = {
        "objective": lambda: instantiate(config.objective),
        "drafter": lambda: build_drafter(config.drafter, base),
        "states": lambda: instantiate(config.states)(base, []),
    }
    assert said(make[part]).startswith(f"{key}=")
