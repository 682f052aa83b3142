"""The allow-list of classes that a config file may instantiate: it is complete, and other names are refused."""

from __future__ import annotations

from functools import partial

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from ctcdraft.config.allowed import (
    ALLOWED_TARGETS,
    GET_METHOD,
    PARTIAL_TARGETS,
    parse_trust,
    read_drafter_config,
    read_run_config,
)
from ctcdraft.config.cli import CONFIGS, compose_config
from ctcdraft.errors import InputError

ROLES = {"outside": "drafter"} | {
    role: role for role in ALLOWED_TARGETS if role != "prompts"
}  # folder of configs/ -> node of a config


def targets(node):
    """Yield every (_target_, _partial_) of plain values, and every `path` of hydra.utils.get_method."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"], node.get("_partial_", False)
        if node.get("_target_") == GET_METHOD:
            yield node["path"], False
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from targets(value)


def shipped(folder: str) -> set[tuple[str, bool]]:
    files = (CONFIGS / folder).rglob("*.yaml")
    return {target for file in files for target in targets(OmegaConf.to_container(OmegaConf.load(file), resolve=False))}


@pytest.mark.parametrize("folder", ROLES)
def test_every_target_of_the_shipped_configs_is_allowed(folder):
    names = {name for name, _ in shipped(folder)}
    assert names
    assert names <= set(ALLOWED_TARGETS[ROLES[folder]])


def test_every_node_of_a_run_has_a_list():
    config = compose_config("train", "drafter=ctc")
    nodes = {node for node in config if list(targets(OmegaConf.to_container(config[node], resolve=True) if
             OmegaConf.is_config(config[node]) else None))}  # fmt: skip
    assert nodes <= set(ALLOWED_TARGETS)
    assert {
        "base",
        "drafter",
        "objective",
        "corpus",
        "prompts",
        "answers",
        "hidden_states",
        "engine",
        "decoding",
    } <= nodes


def test_every_allowed_name_exists_and_is_partial_where_configs_use_it_so():
    names = {name for allowed in ALLOWED_TARGETS.values() for name in allowed}
    assert all(callable(get_object(name)) for name in names)
    assert {name for folder in ROLES for name, partial in shipped(folder) if partial} <= PARTIAL_TARGETS <= names
    others = {"ctcdraft.training.search.run_trial", "ctcdraft.evaluation.benchmarks.gsm8k"}
    assert not others & names


@pytest.mark.parametrize(
    "overrides",
    [
        ["corpus=sharegpt_gsm8k", "drafter=medusa", "objective=sum", "engine=deepspeed", "adapt=lora"],
        ["corpus=sharegpt", "drafter=transducer", "decoding=k_sequential", "answers=vllm", "logger=wandb"],
        [
            "drafter=draft_model",
            "drafter.path=somewhere",
            "decoding=typical",
            "hidden_states=offline",
            "logger=tensorboard",
        ],
        ["drafter=hydra", "engine=muon", "answers=openai"],
        ["corpus=shipped_head"],
    ],
)
def test_the_config_of_a_run_is_read_as_it_was_written(tmp_path, overrides):
    file = tmp_path / "config.yaml"
    config = compose_config("train", "device=cpu", *overrides)
    file.write_text(OmegaConf.to_yaml(config, resolve=True))
    assert read_run_config(file, nodes=None) == read_run_config(file) == OmegaConf.load(file)


FORBIDDEN = {
    "a function of ctcdraft": ({"_target_": "ctcdraft.training.search.run_trial"}, r"wants to call ctcdraft\.training"),
    "a function of Python": ({"_target_": "os.system"}, r"wants to call os\.system .*trust=\[os\.system\]"),
    "a class of another node": ({"_target_": "ctcdraft.corpus.sources.gsm8k"}, "wants to call"),
    "a name looked up": ({"_target_": GET_METHOD, "path": "os.system"}, "wants to call"),
    "a name that is a list": ({"_target_": ["os.system"]}, "not the name of a class"),
    "an empty name": ({"_target_": None}, "not the name of a class"),
    "the environment": ("${oc.env:HOME}", "interpolates"),
    "an interpolation within": (["a", {"b": "x${oc.env:HOME}"}], "interpolates"),
    "an interpolated key": ({"${oc.env:HOME}": 1}, "interpolates"),
    "positional arguments": ({"_target_": "ctcdraft.drafters.trees.dynamic.DynamicTree", "_args_": [1, 2]}, "_args_"),
    "an unused _partial_": (
        {"_target_": "ctcdraft.drafters.trees.dynamic.DynamicTree", "_partial_": True},
        "_partial_",
    ),
    "no recursion": ({"_target_": "ctcdraft.drafters.trees.dynamic.DynamicTree", "_recursive_": False}, "_recursive_"),
    "another conversion": (
        {"_target_": "ctcdraft.drafters.trees.dynamic.DynamicTree", "_convert_": "object"},
        "_convert_",
    ),
    "remote code": ({"trust_remote_code": True}, "trust_remote_code"),
    "a generate of its own": ({"options": {"custom_generate": "folder"}}, "custom_generate"),
    "a module by name": ({"torch_autocast": {"lower_precision_safe_modules": ["a.B"]}}, "lower_precision"),
    "kernels from a hub": ({"attention": "someone/kernels"}, "sets .*attention"),
    "a class of a model": ({"auto_map": {"AutoModelForCausalLM": "folder--code.Model"}}, "auto_map"),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_forbidden_content_of_a_file_is_an_input_error(tmp_path, case):
    value, sentence = FORBIDDEN[case]
    for read, values in (
        (read_run_config, {"drafter": {"frames": value}}),
        (read_run_config, {"base": {"config": [value]}}),
        (read_run_config, {"objective": {"parts": {"one": value}}}),
        (partial(read_run_config, nodes=None), {"engine": {"deepspeed": value}}),
        (partial(read_run_config, nodes=None), {"nonsense": value}),
        (read_drafter_config, {"frames": {"deep": [[value]]}}),
    ):
        file = tmp_path / "config.yaml"
        OmegaConf.save(OmegaConf.create(values), file)
        with pytest.raises(InputError, match=sentence) as error:
            read(file)
        assert "\n" not in str(error.value)
        assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "a: &a [*a]", "a: !!python/object/apply:os.getcwd []", "a: !!binary aGk="]
)
def test_a_file_that_is_not_plain_yaml_is_an_input_error(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml"):
        read_run_config(tmp_path / "config.yaml")


def test_trust_is_a_list_of_names():
    assert parse_trust(None) == parse_trust([]) == ()
    assert parse_trust("mine.Drafter") == parse_trust(["mine.Drafter"]) == ("mine.Drafter",)
    for wrong in (["Drafter"], ["mine."], [3], ["mine.*"], ["a b.c"]):
        with pytest.raises(InputError, match=r"trust must list classes"):
            parse_trust(wrong)
