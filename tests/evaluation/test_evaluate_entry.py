"""The entry point evaluate.py: from a run directory to report.json, and one sentence for each mistake."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.config import contestants
from ctcdraft.config.cli import REPOSITORY, register_resolvers
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.config.drafters import build_drafter
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.training.run_directory import RunDirectory


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    random_lm().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def resolvers():
    register_resolvers()


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory, base_folder):
    """An untrained head in a run directory, as train.py leaves it."""
    with hydra.initialize_config_dir(str(REPOSITORY / "configs"), version_base=None):
        given = ["base=local", f"base.path={base_folder}", "device=cpu", "drafter=ctc", "drafter.frames=3"]
        config = hydra.compose("train", given)
    base = load_base(str(base_folder), "float32", "cpu")
    torch.manual_seed(0)
    drafter = build_drafter(config.drafter, base)
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "untrained")
    run.create(OmegaConf.to_yaml(config, resolve=True), base.fingerprint(), overwrite=False)
    run.save_head(drafter)
    return run.path


def evaluate(*arguments, cwd):
    command = [sys.executable, str(REPOSITORY / "evaluate.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def entry():
    """evaluate.py as a module, for tests that need no process of their own."""
    spec = importlib.util.spec_from_file_location("evaluate_entry", REPOSITORY / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_run_directory_becomes_a_report(run_directory, tmp_path):
    short = ["benchmark.limit=2", "decoding.max_new_tokens=6", "device=cpu", "timing.questions=1"]
    process = evaluate(f"checkpoint={run_directory}", *short, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    report = json.loads((run_directory / "evaluation" / "tiny-greedy" / "report.json").read_text())
    assert [row["drafter"] for row in report["rows"]] == ["autoregressive", "ctc", "prompt_lookup"]
    head = report["rows"][1]
    assert head["lossless"]["equal"] == head["prompts"] == 2
    assert head["draft_parameters"] > 0
    assert head["time"]["tree"] > 0
    assert head["decoding"] == "greedy"
    assert "prompt_lookup" in process.stdout
    assert not list(tmp_path.iterdir())  # nothing is written to the working directory


def test_a_missing_benchmark_is_one_sentence_through_hydra_too(tmp_path):
    process = evaluate("contestants=[prompt_lookup]", "base=tiny", "benchmark.path=absent.jsonl", cwd=tmp_path)
    assert process.returncode == 1
    assert process.stderr.startswith("evaluate.py: absent.jsonl")
    assert process.stderr.count("\n") == 1


def test_a_report_of_more_questions_is_refused_before_the_base_is_loaded(run_directory, tmp_path):
    row = {"drafter": "ctc", "benchmark": "tiny", "prompts": 120}
    written = json.dumps({"rows": [row], "environment": {"questions": {"asked": 120, "finished": 120}}})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text(written)
    arguments = [f"checkpoint={run_directory}", "base.path=absent", "out=out", "benchmark.limit=2"]
    process = evaluate(*arguments, cwd=tmp_path)
    assert process.returncode == 1
    assert process.stderr == (
        "evaluate.py: out holds a report of 120 questions of tiny, and this evaluation asks 2 questions; give "
        "benchmark.limit=120 or more to resume, choose another out=, or add overwrite=true to replace it\n"
    )
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.json"]
    assert "absent" in evaluate(*arguments, "overwrite=true", cwd=tmp_path).stderr  # the base model is loaded next
    assert (tmp_path / "out" / "report.json").read_text() == written


def names(entry, **given):
    return list(entry.resolve_contestants(OmegaConf.create({"checkpoint": None, "contestants": [], **given})))


def test_contestants_and_their_names(entry, run_directory):
    run = str(run_directory)
    assert names(entry, checkpoint=run) == ["autoregressive", "ctc", "prompt_lookup"]
    assert names(entry, contestants=["prompt_lookup", "autoregressive"]) == ["autoregressive", "prompt_lookup"]
    both = names(entry, contestants=[run, f"{run}@collapse"])
    assert both == ["autoregressive", "ctc", "ctc@collapse"]
    same = names(entry, contestants=[run, f"{run}/../{Path(run).name}"])
    assert same == ["autoregressive", "ctc", "ctc:untrained"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "leaves nothing to compare"),
        ({"contestants": ["missing"]}, "neither a run directory"),
        ({"contestants": ["ctc"]}, "has weights: train it"),
        ({"checkpoint": "absent"}, "neither a run directory"),
        ({"contestants": "missing"}, "contestant missing is neither"),
        ({"contestants": 5}, "contestants must be a list"),
    ],
)
def test_invalid_contestants_are_refused(entry, given, sentence):
    with pytest.raises(InputError, match=sentence):
        names(entry, **given)


@pytest.mark.parametrize(
    "wrong",
    [
        *("seed=-1", "seed=abc", "threads=0", "threads=two", "warm_up_tokens=-1", "timing.questions=1.5"),
        *("trace.questions=-1", "trace.tokens=1", "trace.tokens_per_frame=0", "sizing.prompts=0", "sizing.repeats=0"),
    ],
)
def test_values_out_of_range_are_refused(entry, wrong):
    with hydra.initialize_config_dir(str(REPOSITORY / "configs"), version_base=None):
        config = hydra.compose("evaluate", [wrong])
    key, value = wrong.split("=")
    with pytest.raises(InputError, match=f"^{key} must be an integer >= .*, got {value}$"):
        entry.check_config(config)


def test_an_unknown_tree_is_refused(entry, run_directory, base):
    with pytest.raises(InputError, match=r"@sideways is not an option of drafter/tree; the options are .*collapse"):
        build_contestant(resolve(f"{run_directory}@sideways"), base)


@pytest.fixture(scope="module")
def base(base_folder):
    return load_base(str(base_folder), "float32", "cpu")


def test_a_contestant_has_the_weights_of_its_run(entry, run_directory, base, tmp_path):
    trained = tmp_path / "trained"
    shutil.copytree(run_directory, trained)
    head = RunDirectory(trained).head
    save_file({name: value + 1 for name, value in load_file(head).items()}, head)
    before, after = (build_contestant(resolve(str(run)), base) for run in (run_directory, trained))
    for run, one in ((run_directory, before), (trained, after)):
        saved, own = load_file(RunDirectory(run).head), one.drafter.trainable_state_dict()
        assert set(own) == set(saved)
        assert all(torch.equal(own[name], saved[name]) for name in saved)
    assert before.identity != after.identity


def test_a_head_with_another_tree(entry, run_directory, base):
    plain, collapsed = (build_contestant(resolve(f"{run_directory}{at}"), base) for at in ("", "@collapse"))
    assert isinstance(plain.drafter.frame_tree, PrefixSearch)
    assert isinstance(collapsed.drafter.frame_tree, Collapse)
    assert plain.identity != collapsed.identity


def test_identity_is_weights_and_yaml(entry, run_directory, base, tmp_path, monkeypatch):
    """A wider beam over the same weights is another contestant, whether set in the run or by @TREE."""
    one = build_contestant(resolve(str(run_directory)), base)
    assert one.identity == build_contestant(resolve(str(run_directory)), base).identity
    wider = tmp_path / "wider"
    shutil.copytree(run_directory, wider)
    config = OmegaConf.load(wider / "config.yaml")
    config.drafter.tree.tokens_per_frame += 1
    OmegaConf.save(config, wider / "config.yaml")
    assert build_contestant(resolve(str(wider)), base).identity != one.identity

    shutil.copytree(contestants.DRAFTER_CONFIGS / "tree", tmp_path / "drafter" / "tree")
    monkeypatch.setattr(contestants, "DRAFTER_CONFIGS", tmp_path / "drafter")
    contestant = f"{run_directory}@collapse"
    before = build_contestant(resolve(contestant), base).identity
    file = tmp_path / "drafter" / "tree" / "collapse.yaml"
    file.write_text(file.read_text().replace("raw_paths: 42", "raw_paths: 41"))
    assert build_contestant(resolve(contestant), base).identity != before


def test_another_base_is_refused_in_one_sentence(entry, run_directory):
    with pytest.raises(InputError, match="was trained for base") as caught:
        build_contestant(resolve(str(run_directory)), random_base(seed=1))
    assert "\n" not in str(caught.value)


def test_no_base(entry):
    with pytest.raises(InputError, match="no base"):
        entry.load_base(OmegaConf.create({"base": {"path": None}}), {})


def test_the_base_of_the_run_may_have_moved(entry, run_directory, base_folder):
    config = {"base": {"path": str(base_folder)}, "device": "cpu", "dtype": "float64"}
    base = entry.load_base(OmegaConf.create(config), {"ctc": resolve(str(run_directory))})
    assert base.dtype == torch.float64


@pytest.mark.parametrize("name", ["tiny", "mt_bench", "gsm8k"])
@pytest.mark.parametrize("decoding", ["greedy", "sampling"])
def test_every_benchmark_composes_with_every_decoding(name, decoding):
    with hydra.initialize_config_dir(str(REPOSITORY / "configs"), version_base=None):
        config = hydra.compose("evaluate", [f"benchmark={name}", f"decoding={decoding}", "benchmark.limit=3"])
        longer = hydra.compose("evaluate", [f"benchmark={name}", "decoding.max_new_tokens=7"])
    assert config.benchmark.name == name
    assert config.decoding.max_new_tokens == (128 if name == "tiny" else 1024)
    assert config.decoding.temperature == (1.0 if decoding == "sampling" else 0.0)
    assert longer.decoding.max_new_tokens == 7
