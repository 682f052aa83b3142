"""Configs: every YAML composes and names existing code, and every drafter decodes losslessly on a random base."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, InstantiationException, MissingConfigException
from hydra.utils import get_class, get_method, instantiate
from omegaconf import OmegaConf
from sequential_parts import saved_lm
from tiny_models import random_base

from ctcdraft.config.cli import register_resolvers
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.config.drafters import build_drafter
from ctcdraft.config.schema import check_config
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.objectives.compatibility import describe_reading
from ctcdraft.objectives.ctc import CTC

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
def references(base, request):
    """Return decoding settings of one temperature and the autoregressive responses to the prompts."""
    overrides = (f"decoding.temperature={request.param}", "decoding.max_new_tokens=30")
    settings = instantiate(composed("train", *overrides).decoding)
    return settings, [response(base, Autoregressive(base), seed, settings) for seed in range(len(PROMPTS))]


def response(base, drafter, seed: int, settings) -> tuple[int, ...]:
    """Return the tokens generated for the prompt number `seed`."""
    return generate(base, drafter, PROMPTS[seed], settings, base.stop_token_ids, seed).tokens


def composed(verb: str, *overrides: str):
    return compose(verb, overrides=list(overrides), return_hydra_config=False)


@pytest.mark.parametrize("verb", VERBS)
def test_the_entry_points_compose_and_resolve(verb):
    values = OmegaConf.to_container(composed(verb), resolve=True)
    assert values["device"] in ("cpu", "cuda")
    assert "${" not in str(values)  # every interpolation is resolved


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_a_corpus_follows_the_seed_unless_it_has_its_own(verb):
    """data_seed= lets heads of several seeds be trained on one corpus."""
    for corpus, place in (("tiny", "corpus"), ("sharegpt_gsm8k", "corpus.parts.gsm8k")):
        for overrides, seed in ((["seed=3"], 3), (["seed=3", "data_seed=0"], 0)):
            config = composed(verb, f"corpus={corpus}", *overrides)
            assert OmegaConf.select(config, place).seed == config.answers.seed == seed


def has_weights(drafter: str) -> bool:
    return issubclass(get_class(OmegaConf.load(CONFIGS / f"drafter/{drafter}.yaml")._target_), DraftHead)


FRAME_TREES = [
    option
    for option in options("drafter/tree")
    if hasattr(get_class(OmegaConf.load(CONFIGS / f"drafter/tree/{option}.yaml")._target_), "interprets_as")
]
GROUPS = [
    ("evaluate" if (group, option) == ("experiment", "evaluate_8b") else "train", group, option)
    for group in ("base", "corpus", "corpus/cleaning", "corpus/leakage",
                  "drafter", "drafter/body", "drafter/tree", "drafter/correction",
                  "objective",
                  "decoding", "engine", "logger", "experiment", "answers")
    for option in options(group)
    if group != "drafter" or has_weights(option)
]  # fmt: skip
EVALUATE_GROUPS = ("benchmark", "decoding", "base", "measure")
GROUPS += [("evaluate", group, option) for group in EVALUATE_GROUPS for option in options(group)]


@pytest.mark.parametrize(("verb", "group", "option"), GROUPS)
def test_every_option_composes_and_names_real_code(verb, group, option):
    extra = ["base.path=somewhere"] if group == "base" and option == "local" else []
    extra += ["drafter=hydra"] if group == "drafter/tree" and option not in FRAME_TREES else []
    config = composed(verb, f"{group}={option}", *extra)
    check_config(config)
    for target in targets(OmegaConf.to_container(config, resolve=True)):
        assert callable(target_object(target)), target


@pytest.mark.parametrize("drafter", [name for name in options("drafter") if has_weights(name)])
def test_every_drafter_has_its_published_objective_by_default(drafter):
    target = composed("train", f"drafter={drafter}").objective._target_
    assert (CONFIGS / f"objective/of_{drafter}.yaml").is_file()
    assert target.startswith("ctcdraft.objectives.")
    assert (target == composed("train", "objective=ctc").objective._target_) == (drafter == "ctc")
    assert composed("train", f"drafter={drafter}", "objective=sum").objective._target_.endswith("WeightedSum")


def test_eagle_and_kangaroo_are_trained_on_all_windows_unless_told_otherwise():
    def anchors(*overrides):
        return composed("train", *overrides).trainer.anchors_per_sequence

    assert anchors("drafter=eagle") is anchors("drafter=eagle3_1") is anchors("drafter=kangaroo") is None
    assert anchors("drafter=hydra") == 64
    assert anchors("drafter=eagle", "trainer.anchors_per_sequence=9") == 9
    assert anchors("drafter=eagle", "experiment=demo") == 32  # an experiment's own


def targets(node):
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)


def target_object(target: str):
    try:
        return get_class(target)
    except ValueError:
        return get_method(target)


@pytest.mark.parametrize("key", ["drafter.framse=8", "trainer.step=3", "nonsense=1", "drafter=ctcc"])
def test_a_misspelt_key_is_refused(key):
    with pytest.raises((ConfigCompositionException, MissingConfigException), match=key.split("=")[0]):
        composed("train", key)


def option_groups(drafter: str) -> set[str]:
    """Return the config groups in a drafter's defaults list, those of the drafter it builds on included."""
    groups = set()
    for entry in OmegaConf.load(CONFIGS / f"drafter/{drafter}.yaml").get("defaults", []):
        groups |= option_groups(entry) if isinstance(entry, str) else {str(group).split()[-1] for group in entry}
    return groups


def reads_tokens(tree: str) -> bool:
    return get_class(OmegaConf.load(CONFIGS / f"drafter/tree/{tree}.yaml")._target_).interprets_as == "tokens"


CASES = [
    (name, tree)
    for name in options("drafter")
    for tree in (FRAME_TREES if "body" in option_groups(name) else [None])
    if name != "domino" or reads_tokens(tree)
]


def test_the_cases_cover_every_drafter():
    """Every drafter that computes frames with every tree of frames; the others once."""
    with_frames = {name for name, tree in CASES if tree is not None}
    assert {
        "ctc",
        "ctc_gru",
        "transducer",
        "medusa",
        "blockwise",
        "dflash",
        "dspark",
        "domino",
        "peagle",
    } <= with_frames
    assert {"hydra", "eagle", "draft_model", "autoregressive", "merged"}.isdisjoint(with_frames)
    assert {name for name, _ in CASES} == set(options("drafter"))


def test_a_correction_of_frame_k_for_token_k_refuses_alignments(base):
    with pytest.raises(InstantiationException, match="PrefixSearch reads frames as alignments; use drafter/tree=per_"):
        build_drafter(composed("train", "drafter=domino", "drafter/tree=prefix_search").drafter, base)
    drafter = build_drafter(composed("train", "drafter=domino", "drafter.frames=4").drafter, base)
    with pytest.raises(InputError, match="FrameGRUCorrection corrects frame k for label k; use objective=cross_entr"):
        describe_reading(CTC(4), drafter, 4)


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_every_drafter_decodes_losslessly(base, references, name, tree, tmp_path):
    """Untrained heads propose random tokens: nothing of it may leak into the text."""
    node = OmegaConf.load(CONFIGS / f"drafter/{name}.yaml")
    if "defaults" in node:
        chosen = [f"drafter/tree={tree}"] if tree is not None else []
        chosen += [f"drafter.path={saved_lm(tmp_path)}"] if "path" in node else []
        node = composed("train", f"drafter={name}", *chosen).drafter
    torch.manual_seed(0)
    if "parts" in node:
        fillers = {"first": "junk", "model": {"draft_model": {"path": saved_lm(tmp_path)}}}
        needed = {role: fillers[role] for role, part in node.parts.items() if part is None}
        drafter = build_contestant(resolve({name: {"parts": needed}}), base).drafter
    else:
        drafter = build_drafter(node, base)
    settings, expected = references
    assert [response(base, drafter, seed, settings) for seed in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("decoding", [name for name in options("decoding") if name != "relaxed"])
def test_every_verifier_gives_the_autoregressive_tokens_at_temperature_0(base, decoding):
    """For sampled draft tokens too, and for typical acceptance: a one-hot distribution leaves one token to accept."""
    node = composed("train", "drafter=ctc", "drafter/tree=sampled3").drafter
    settings = instantiate(composed("train", f"decoding={decoding}", "decoding.temperature=0").decoding)
    torch.manual_seed(0)
    drafter = build_drafter(node, base)
    for seed in range(len(PROMPTS)):
        assert response(base, drafter, seed, settings) == response(base, Autoregressive(base), seed, settings)


@pytest.mark.parametrize("decoding", options("decoding"))
def test_no_step_pays_for_what_instantiation_wraps_functions_in(decoding):
    verify = instantiate(composed("train", f"decoding={decoding}").decoding).verify
    assert not any(isinstance(part, partial) for part in (verify, getattr(verify, "rule", None)))


def test_every_data_file_of_the_package_is_installed_with_it():
    """A wheel contains only the data files named in pyproject.toml."""
    named = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {package: CONFIGS.parent.joinpath(*package.split(".")) for package in named}
    installed = {file for package, kinds in named.items() for kind in kinds for file in folders[package].glob(kind)}
    files = {file for file in (CONFIGS.parent / "ctcdraft").rglob("*.*") if file.is_file()}
    files = {file for file in files if "__pycache__" not in file.parts}  # numba keeps machine code there
    assert {file for file in files if file.suffix != ".py"} == installed
