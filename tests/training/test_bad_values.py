"""Every config value that cannot be trained with is refused in one sentence that names the key, before any work."""

from __future__ import annotations

import re
from itertools import product

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_models import random_base

from ctcdraft.config.cli import CONFIGS, find_input_error, register_resolvers
from ctcdraft.config.drafters import build_drafter
from ctcdraft.config.schema import check_config
from ctcdraft.errors import InputError

TRAINER_VALUES = [
    "betas=[0.9]", "betas=0.9", "betas=[2,3]", "betas=[a,b]", "max_grad_norm=abc", "max_grad_norm=-1",
    "max_grad_norm=0", "max_grad_norm=null",
    "clip_value=-1", "clip_value=abc", "weight_decay=-1", "weight_decay=abc", "min_lr_ratio=abc",
    "min_lr_ratio=-2", "num_threads=-1", "num_threads=abc", "autocast=abc", "prefetch=abc", "pack_length=abc",
    "steps=null", "compile=true",
]  # fmt: skip
OTHER_VALUES = ["seed=abc", "seed=-1", "seed=1.5", "seed=null", "decoding.top_p=2", "drafter.frames=0", "plan.flops=0"]
PART_VALUES = [
    "objective.labels=abc", "objective.labels=2.5", "objective=prefix_ctc objective.decay=abc",
    "objective=sum objective.weights.distill=abc", "objective=eagle objective.hidden_states=abc",
    "objective=eagle_ctc objective.frames=abc", "drafter.body.blocks=abc", "drafter=medusa drafter.body.blocks=0",
    "drafter=blockwise drafter.body.inner=abc", "drafter=blockwise drafter.tree.children=0",
    "drafter=ctc_gru drafter.correction.rank=2.5", "drafter=eagle drafter.noise=abc",
    "drafter=hydra drafter.layers=abc", "drafter=eagle drafter.tree.width=abc",
    "hidden_states=offline hidden_states.precision=float8",
]  # fmt: skip


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def compose_train(*arguments):
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("train", overrides=["device=cpu", *arguments])


def input_error(call):
    """Return the message of the InputError that `call` raises, by itself or wrapped by Hydra."""
    with pytest.raises((InputError, InstantiationException)) as raised:
        call()
    sentence = find_input_error(raised.value)
    assert sentence is not None, raised.value
    return str(sentence)


@pytest.fixture(scope="module")
def shipped():
    return compose_train()


@pytest.mark.parametrize("argument", [*(f"trainer.{argument}" for argument in TRAINER_VALUES), *OTHER_VALUES])
def test_a_single_value_out_of_range(shipped, argument):
    config = OmegaConf.merge(shipped, OmegaConf.from_dotlist([argument]))
    assert input_error(lambda: check_config(config)).startswith(f"{argument.split('=')[0]} must be ")


OPTION_VALUES = [
    *("adapt.rank=0", "adapt.alpha=a", "adapt.learning_rate=0", "adapt.weight=-1"),
    *("hidden_states.limit_gb=abc", "hidden_states.limit_gb=0", "hidden_states.rows=2.5"),
]


@pytest.mark.parametrize("argument", OPTION_VALUES)
def test_a_value_of_an_option_out_of_range(argument):
    config = compose_train("adapt=lora", "hidden_states=offline", argument)
    assert input_error(lambda: check_config(config)).startswith(f"{argument.split('=')[0]} must be ")


def switches():
    """Yield the key of every value in configs/ that is true or false, as on a command line."""
    for file in sorted(CONFIGS.rglob("*.yaml")):
        group = [part for part in file.relative_to(CONFIGS).parts[:-1] if part not in ("benchmark", "outside")]
        yield from booleans(yaml.safe_load(file.read_text()), [] if group == ["experiment"] else group)


def booleans(node, path):
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, bool) and key != "_partial_" and "config" not in path and "of" not in path:
            yield ".".join([*path, key])
        yield from booleans(value, [*path, key])


def test_words_are_no_booleans():
    """`overwrite=no` would count as true, and delete what is there."""
    keys = set(switches())
    assert {"overwrite", "base.static_shapes", "drafter.body.causal", "drafter.own_heads"} <= keys
    for key, word in product(keys, ("no", "maybe", 2)):
        config = OmegaConf.create()
        OmegaConf.update(config, key, word)
        with pytest.raises(InputError, match=rf"^{re.escape(key)} must be true or false, got {word}$"):
            check_config(config)


def test_shipped_experiments_pass(shipped):
    presets = ["demo", "eagle_ctc", *(file.stem for file in (CONFIGS / "experiment").glob("ablation_*.yaml"))]
    sentences = {}
    for config in (shipped, *(compose_train(f"experiment={preset}") for preset in presets)):
        try:
            check_config(config)
        except InputError as error:
            sentences[config.run] = str(error)
    assert len(presets) == 10
    assert sentences == {}


@pytest.mark.parametrize("arguments", PART_VALUES)
def test_a_part_refuses_a_value_out_of_range(base, arguments):
    config = compose_train(*arguments.split())
    key = arguments.split()[-1].split("=")[0]
    part = key.split(".")[0]
    make = {
        "objective": lambda: instantiate(config.objective),
        "drafter": lambda: build_drafter(config.drafter, base),
        "hidden_states": lambda: instantiate(config.hidden_states)(base, []),
    }
    assert re.match(rf"{re.escape(key)}( must be |=)", input_error(make[part]))
