"""Configs are code: every YAML composes, every drafter is made on a random base and decodes losslessly."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_class, get_method, instantiate
from omegaconf import OmegaConf
from stepwise_parts import saved_lm
from tiny_models import random_base

from ctcdraft.config.build import build_drafter
from ctcdraft.config.cli import register_resolvers
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.base import DraftHead

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
VERBS = ("train", "evaluate", "prepare")


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


PROMPTS = (torch.tensor([0, 7, 9, 9, 30]), torch.arange(40, 60))


@pytest.fixture(autouse=True, scope="module")
def config_dir():
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        yield


@pytest.fixture(scope="module")
def base():
    return random_base()


@pytest.fixture(scope="module", params=[0.0, 0.8])
def truths(base, request):
    """Settings of one temperature, and what autoregression says to the prompts."""
    words = (f"decoding.temperature={request.param}", "decoding.max_new_tokens=30")
    how = instantiate(composed("train", *words).decoding)
    said = [answer(base, Autoregressive(base), seed, how) for seed in range(len(PROMPTS))]
    return how, said


def answer(base, drafter, seed: int, how) -> tuple[int, ...]:
    """Tokens of the seed's own prompt."""
    return generate(base, drafter, PROMPTS[seed], how, base.stop_token_ids, seed).tokens


def composed(verb: str, *overrides: str):
    return compose(verb, overrides=list(overrides), return_hydra_config=False)


@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs_compose_and_resolve(verb):
    values = OmegaConf.to_container(composed(verb), resolve=True)
    assert values["device"] in ("cpu", "cuda")
    assert "${" not in str(values)  # nothing is left to be filled in


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_a_corpus_follows_the_seed_unless_it_has_its_own(verb):
    """As where heads of several seeds learn from one corpus."""
    for corpus, place in (("tiny", "corpus"), ("sharegpt_gsm8k", "corpus.parts.gsm8k")):
        for words, seed in ((["seed=3"], 3), (["seed=3", "data_seed=0"], 0)):
            config = composed(verb, f"corpus={corpus}", *words)
            assert OmegaConf.select(config, place).seed == config.answers.seed == seed


def has_weights(drafter: str) -> bool:
    return issubclass(get_class(OmegaConf.load(CONFIGS / f"drafter/{drafter}.yaml")._target_), DraftHead)


FRAME_TREES = [
    option
    for option in options("drafter/tree")
    if hasattr(get_class(OmegaConf.load(CONFIGS / f"drafter/tree/{option}.yaml")._target_), "interprets_as")
]
GROUPS = [
    ("train", group, option)
    for group in ("base", "corpus", "corpus/cleaning", "corpus/leakage",
                  "drafter", "drafter/body", "drafter/tree", "drafter/correction",
                  "objective",
                  "decoding", "engine", "logger", "experiment", "answers")
    for option in options(group)
    if group != "drafter" or has_weights(option)
]  # fmt: skip
OF_EVALUATE = ("benchmark", "decoding", "base", "measure")
GROUPS += [("evaluate", group, option) for group in OF_EVALUATE for option in options(group)]


@pytest.mark.parametrize(("verb", "group", "option"), GROUPS)
def test_every_option_composes_and_names_real_code(verb, group, option):
    extra = ["base.path=somewhere"] if group == "base" and option == "local" else []
    extra += ["drafter=hydra"] if group == "drafter/tree" and option not in FRAME_TREES else []
    config = composed(verb, f"{group}={option}", *extra)
    for target in targets(OmegaConf.to_container(config, resolve=True)):
        assert callable(found(target)), target


@pytest.mark.parametrize("drafter", [name for name in options("drafter") if has_weights(name)])
def test_every_drafter_is_taught_what_it_was_published_with(drafter):
    """And only where nothing else is asked for."""
    target = composed("train", f"drafter={drafter}").objective._target_
    assert (CONFIGS / f"objective/of_{drafter}.yaml").is_file()
    assert target.startswith("ctcdraft.objectives.")
    assert (target == composed("train", "objective=ctc").objective._target_) == (drafter in ("ctc", "ctc_gru"))
    assert composed("train", f"drafter={drafter}", "objective=sum").objective._target_.endswith("WeightedSum")


def targets(node):
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)


def found(target: str):
    try:
        return get_class(target)
    except ValueError:
        return get_method(target)


@pytest.mark.parametrize("key", ["drafter.framse=8", "trainer.step=3", "nonsense=1", "drafter=ctcc"])
def test_a_misspelt_key_is_refused(key):
    with pytest.raises((ConfigCompositionException, MissingConfigException), match=key.split("=")[0]):
        composed("train", key)


def dials(drafter: str) -> set[str]:
    """The config groups a drafter's YAML chooses from, those of the drafter it builds on included."""
    found = set()
    for entry in OmegaConf.load(CONFIGS / f"drafter/{drafter}.yaml").get("defaults", []):
        found |= dials(entry) if isinstance(entry, str) else {str(group).split()[-1] for group in entry}
    return found


CASES = [(name, tree) for name in options("drafter") for tree in (FRAME_TREES if "body" in dials(name) else [None])]


def test_the_cases_are_all_there():
    """Every drafter that computes frames with every tree of frames; the others once."""
    with_frames = {name for name, tree in CASES if tree is not None}
    assert {"ctc", "ctc_gru", "transducer", "medusa", "blockwise"} <= with_frames
    assert {"hydra", "eagle", "draft_model", "autoregressive", "cascade"}.isdisjoint(with_frames)
    assert {name for name, _ in CASES} == set(options("drafter"))


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_every_drafter_decodes_losslessly(base, truths, name, tree, tmp_path):
    """Untrained heads say junk, which is the harder case: nothing they propose may leak into the text."""
    node = OmegaConf.load(CONFIGS / f"drafter/{name}.yaml")
    if "defaults" in node:
        chosen = [f"drafter/tree={tree}"] if tree is not None else []
        chosen += [f"drafter.path={saved_lm(tmp_path)}"] if "path" in node else []
        node = composed("train", f"drafter={name}", *chosen).drafter
    torch.manual_seed(0)
    if "parts" in node:
        fillers = {"second": "prompt_lookup", "model": {"draft_model": {"path": saved_lm(tmp_path)}}}
        needed = {role: fillers[role] for role, part in node.parts.items() if part is None}
        drafter = build_contestant(resolve({name: {"parts": needed}}), base).drafter
    else:
        drafter = build_drafter(node, base)
    how, said = truths
    assert [answer(base, drafter, seed, how) for seed in range(len(PROMPTS))] == said


@pytest.mark.parametrize("decoding", options("decoding"))
def test_every_verifier_says_the_bases_words_at_temperature_0(base, decoding):
    """Drawn and computed guesses alike; the lossy one too, because a one-hot law leaves it no choice."""
    node = composed("train", "drafter=ctc", "drafter/tree=sampled3").drafter
    how = instantiate(composed("train", f"decoding={decoding}", "decoding.temperature=0").decoding)
    torch.manual_seed(0)
    drafter = build_drafter(node, base)
    for seed in range(len(PROMPTS)):
        assert answer(base, drafter, seed, how) == answer(base, Autoregressive(base), seed, how)


def test_whatever_is_read_beside_the_code_is_installed_with_it():
    """From a clone everything is there; a wheel holds only what is named."""
    named = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {package: CONFIGS.parent.joinpath(*package.split(".")) for package in named}
    installed = {file for package, kinds in named.items() for kind in kinds for file in folders[package].glob(kind)}
    there = {file for file in (CONFIGS.parent / "ctcdraft").rglob("*.*") if file.is_file()}
    assert {file for file in there if file.suffix not in (".py", ".pyc")} == installed
