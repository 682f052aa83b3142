"""Config files from elsewhere given to every entry point that instantiates them: nothing that they name is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from entry_parts import expect_error, run_script, train_args
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.cli import CONFIGS, compose_config
from ctcdraft.errors import InputError
from ctcdraft.hub import PublishedHead
from ctcdraft.models.loading import load_base

SHORT = ["benchmark.path=prompts.jsonl", "benchmark.limit=1", "decoding.max_new_tokens=6", "timing.questions=0"]
MODULE = """
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.parallel import ParallelDrafter

class Own(ParallelDrafter):
    pass

class Parrot(Autoregressive):
    pass
"""


def command(marker) -> dict:
    """The runner of a search's trials, which starts a process: it is one of ctcdraft's functions."""
    return {
        "_target_": "ctcdraft.training.search.run_trial",
        "command": ["touch", str(marker)],
        "folder": str(marker) + "-folder",
        "trial": None,
    }


@pytest.fixture
def here(world, monkeypatch, tmp_path):
    """The world of the entry points, in a copy of its run that a test may change."""
    monkeypatch.chdir(world)
    shutil.copytree("run", tmp_path / "run")
    return tmp_path


def changed(run: Path, *keys_and_values) -> str:
    config = OmegaConf.load(run / "config.yaml")
    for key, value in keys_and_values:
        OmegaConf.update(config, key, value, merge=False)
    OmegaConf.save(config, run / "config.yaml")
    return str(run)


@pytest.mark.parametrize("node", ["drafter.frames", "drafter.body", "drafter.paths", "base.name", "base", "objective"])
def test_no_code_runs_from_a_run_that_is_evaluated(here, monkeypatch, capsys, node):
    run = changed(here / "run", (node, command(here / "marker")))
    for words in ([f"checkpoint={run}"], [f"contestants=[{{cascade:{{parts:{{second:{run}}}}}}}]"]):
        said = expect_error(monkeypatch, capsys, "evaluate.py", *words, f"out={here}/out", *SHORT)
        assert f"{run}/config.yaml wants to call ctcdraft.training.search.run_trial ({node}" in said
        assert not list(here.glob("marker*"))


@pytest.mark.parametrize(
    "node", ["drafter.frames", "base", "engine", "logger.mine", "corpus.cleaning.steps.mine", "states"]
)
def test_no_code_runs_from_a_run_that_goes_on(here, monkeypatch, capsys, node):
    run = changed(here / "run", (node, command(here / "marker")), ("trust", ["ctcdraft.training.search.run_trial"]))
    said = expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=6")
    assert f"{run}/config.yaml wants to call ctcdraft.training.search.run_trial ({node}" in said
    assert not list(here.glob("marker*"))


def test_no_code_runs_from_a_run_that_is_published(here):
    run = changed(here / "run", ("drafter.frames", command(here / "marker")))
    with pytest.raises(InputError, match=r"wants to call ctcdraft\.training\.search\.train"):
        PublishedHead.from_run(run, load_base("base", "float32", "cpu"))
    assert not list(here.glob("marker*"))


def test_no_code_runs_from_a_yaml_among_the_contestants(here, monkeypatch, capsys):
    drafter = {
        "_target_": "ctcdraft.drafters.prompt_lookup.PromptLookup",
        "name": "x",
        "ngram": command(here / "marker"),
    }
    files = {"plain.yaml": {**drafter, "span": 10}, "options.yaml": {"defaults": ["plain"]}}
    files["composite.yaml"] = {
        **OmegaConf.load(CONFIGS / "drafter" / "cascade.yaml"),
        "parts": {"first": "prompt_lookup"},
    }
    files["composite.yaml"]["parts"]["second"] = str(here / "plain.yaml")
    for name, values in files.items():
        OmegaConf.save(OmegaConf.create(values), here / name)
    for name in files:
        words = [f"contestants=[{here / name}]", "base=local", "base.path=base", f"out={here}/out", *SHORT]
        said = expect_error(monkeypatch, capsys, "evaluate.py", *words)
        assert f"{here}/plain.yaml wants to call ctcdraft.training.search.run_trial (ngram._target_)" in said
        assert not list(here.glob("marker*"))


def test_a_value_does_not_come_under_a_name_of_configs(here, monkeypatch, capsys):
    """configs/objective/distill.yaml looks a function up by its path, which imports what the path begins with."""
    (here / "evil.py").write_text(f"open({str(here / 'marker')!r}, 'w').close()\ndef run():\n    pass\n")
    monkeypatch.syspath_prepend(here)
    drafter = {"defaults": ["/objective/distill"], "name": "x", "distance": {"path": "evil.run"}}
    drafter["_target_"] = "ctcdraft.drafters.prompt_lookup.PromptLookup"
    OmegaConf.save(OmegaConf.create(drafter), here / "merged.yaml")
    words = [f"contestants=[{here / 'merged.yaml'}]", "base=local", "base.path=base", f"out={here}/out", *SHORT]
    said = expect_error(monkeypatch, capsys, "evaluate.py", *words)
    assert not (here / "marker").exists()
    assert f"{here}/merged.yaml wants to call hydra.utils.get_method (distance._target_)" in said


def test_a_run_that_goes_on_sends_no_key_to_a_server(here, monkeypatch, capsys):
    sent = []
    monkeypatch.setenv("SECRET", "open sesame")
    monkeypatch.setattr(
        "ctcdraft.corpus.generation.http.JSONClient._post", lambda server, *said: sent.append(server) or {}
    )
    given = {"url": "http://far.example/v1", "key_from": "SECRET", "model": "m", "seed": 0, "retries": 0}
    answers = compose_config(
        "train", "answers=openai", *[f"answers.{key}={value}" for key, value in given.items()]
    ).answers
    run = changed(here / "run", ("answers", answers), ("prepared", str(here / "gone")))
    said = expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=6")
    assert not sent
    assert (
        f"would request responses from the server at http://far.example/v1, and there is no complete corpus in {here}"
        in said
    )
    changed(here / "run", ("prepared", "prepared"))  # which is complete: no server is asked
    run_script(monkeypatch, "train.py", f"resume={run}", "trainer.steps=6")
    assert not sent


def test_no_code_runs_from_a_published_head(here):
    PublishedHead.from_run(here / "run", load_base("base", "float32", "cpu")).save_pretrained(here / "head")
    said = json.loads((here / "head" / "config.json").read_text())
    said["drafter"]["frames"] = command(here / "marker")
    said["trust"] = ["ctcdraft.training.search.run_trial"]
    (here / "head" / "config.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"config\.json wants to call ctcdraft\.training\.search\.train \(drafter\.fr"):
        PublishedHead.from_pretrained(here / "head", model=random_lm(context=128), tokenizer=tiny_tokenizer())
    assert not list(here.glob("marker*"))


def test_a_secret_of_the_environment_is_not_read(here, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "open sesame")
    run = changed(here / "run", ("drafter.name", "${oc.env:SECRET}"))
    said = expect_error(monkeypatch, capsys, "evaluate.py", f"checkpoint={run}", *SHORT)
    assert "interpolates ${oc.env:SECRET} (drafter.name)" in said


def test_a_class_of_ones_own_needs_trust_on_the_command_line(here, monkeypatch, capsys):
    """And imports nothing without: the module would have said so."""
    (here / "mine.py").write_text(f"open({str(here / 'imported')!r}, 'w').close()\n{MODULE}")
    monkeypatch.syspath_prepend(here)
    OmegaConf.save(OmegaConf.create({"_target_": "mine.Parrot", "name": "parrot"}), here / "parrot.yaml")
    run = changed(here / "run", ("drafter._target_", "mine.Own"), ("trust", ["mine.Own"]))
    asked = ["evaluate.py", f"contestants=[{run},{here}/parrot.yaml]", f"out={here}/out", *SHORT]
    assert "add trust=[mine.Own]" in expect_error(monkeypatch, capsys, *asked)
    assert "add trust=[mine.Parrot]" in expect_error(monkeypatch, capsys, *asked, "trust=[mine.Own]")
    assert "add trust=[mine.Own]" in expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=5")
    assert not (here / "imported").exists()
    run_script(monkeypatch, *asked, "trust=[mine.Own,mine.Parrot]")
    rows = json.loads((here / "out" / "report.json").read_text())["rows"]
    assert [row["drafter"] for row in rows] == ["autoregressive", "ctc", "parrot"]
    run_script(monkeypatch, "train.py", f"resume={run}", "trainer.steps=5", "trust=[mine.Own]")
    assert len((here / "run" / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_head_of_ones_own_class_is_loaded_where_its_reader_trusts_it(here, monkeypatch):
    (here / "ours.py").write_text(MODULE)
    monkeypatch.syspath_prepend(here)
    run = changed(here / "run", ("drafter._target_", "ours.Own"))
    PublishedHead.from_run(run, load_base("base", "float32", "cpu"), trust=["ours.Own"]).save_pretrained(here / "head")
    given = {"model": random_lm(context=128), "tokenizer": tiny_tokenizer()}
    with pytest.raises(InputError, match=r"add trust=\[ours\.Own\]"):
        PublishedHead.from_pretrained(here / "head", **given)
    head = PublishedHead.from_pretrained(here / "head", **given, trust=["ours.Own"])
    saved = load_file(here / "run" / "drafter.safetensors")
    assert type(head.drafter).__name__ == "Own"
    assert all((value == saved[name]).all() for name, value in head.drafter.trainable_state_dict().items())


def test_a_drafter_without_weights_is_no_head(here):
    PublishedHead.from_run(here / "run", load_base("base", "float32", "cpu")).save_pretrained(here / "head")
    said = json.loads((here / "head" / "config.json").read_text())
    for drafter, sentence in (
        ({"_target_": "ctcdraft.drafters.autoregressive.Autoregressive"}, "a drafter that is no head"),
        ("ctc", "missing or damaged"),
    ):
        (here / "head" / "config.json").write_text(json.dumps(said | {"drafter": drafter}))
        with pytest.raises(InputError, match=sentence):
            PublishedHead.from_pretrained(here / "head", model=random_lm(context=128), tokenizer=tiny_tokenizer())


def test_training_with_ones_own_class_needs_no_trust(here, monkeypatch):
    """What the command line composes is the user's own word."""
    (here / "yours.py").write_text(MODULE)
    monkeypatch.syspath_prepend(here)
    run_script(monkeypatch, "train.py", *train_args(f"run={here}/own", "drafter._target_=yours.Own"))
    assert (here / "own" / "drafter.safetensors").is_file()
