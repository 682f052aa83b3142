"""Foreign config files given to every entry point that instantiates them: no code that they name is run."""

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
    """Return a node that calls a function of ctcdraft which starts a process and leaves a marker file."""
    return {
        "_target_": "ctcdraft.training.search.run_trial",
        "command": ["touch", str(marker)],
        "folder": str(marker) + "-folder",
        "trial": None,
    }


@pytest.fixture
def folder(world, monkeypatch, tmp_path):
    """Return a folder with a copy of the run of `world`, which a test may change."""
    monkeypatch.chdir(world)
    shutil.copytree("run", tmp_path / "run")
    return tmp_path


def changed(run: Path, *keys_and_values) -> str:
    config = OmegaConf.load(run / "config.yaml")
    for key, value in keys_and_values:
        OmegaConf.update(config, key, value, merge=False)
    OmegaConf.save(config, run / "config.yaml")
    return str(run)


@pytest.mark.parametrize("node", ["drafter.frames", "drafter.body", "drafter.tree", "base.name", "base", "objective"])
def test_no_code_runs_from_a_run_that_is_evaluated(folder, monkeypatch, capsys, node):
    run = changed(folder / "run", (node, command(folder / "marker")))
    for arguments in ([f"checkpoint={run}"], [f"contestants=[{{merged:{{parts:{{first:{run}}}}}}}]"]):
        message = expect_error(monkeypatch, capsys, "evaluate.py", *arguments, f"out={folder}/out", *SHORT)
        assert f"{run}/config.yaml wants to call ctcdraft.training.search.run_trial ({node}" in message
        assert not list(folder.glob("marker*"))


@pytest.mark.parametrize(
    "node", ["drafter.frames", "base", "engine", "logger.mine", "corpus.cleaning.steps.mine", "hidden_states"]
)
def test_no_code_runs_from_a_run_that_is_resumed(folder, monkeypatch, capsys, node):
    run = changed(folder / "run", (node, command(folder / "marker")), ("trust", ["ctcdraft.training.search.run_trial"]))
    message = expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=6")
    assert f"{run}/config.yaml wants to call ctcdraft.training.search.run_trial ({node}" in message
    assert not list(folder.glob("marker*"))


def test_no_code_runs_from_a_run_that_is_published(folder):
    run = changed(folder / "run", ("drafter.frames", command(folder / "marker")))
    with pytest.raises(InputError, match=r"wants to call ctcdraft\.training\.search\.run_trial"):
        PublishedHead.from_run(run, load_base("base", "float32", "cpu"))
    assert not list(folder.glob("marker*"))


def test_no_code_runs_from_a_yaml_among_the_contestants(folder, monkeypatch, capsys):
    drafter = {
        "_target_": "ctcdraft.drafters.prompt_lookup.PromptLookup",
        "name": "x",
        "ngram": command(folder / "marker"),
    }
    files = {"plain.yaml": {**drafter, "span": 10}, "options.yaml": {"defaults": ["plain"]}}
    files["composite.yaml"] = {
        **OmegaConf.load(CONFIGS / "drafter" / "merged.yaml"),
        "parts": {"second": "prompt_lookup"},
    }
    files["composite.yaml"]["parts"]["first"] = str(folder / "plain.yaml")
    for name, values in files.items():
        OmegaConf.save(OmegaConf.create(values), folder / name)
    for name in files:
        arguments = [f"contestants=[{folder / name}]", "base=local", "base.path=base", f"out={folder}/out", *SHORT]
        message = expect_error(monkeypatch, capsys, "evaluate.py", *arguments)
        assert f"{folder}/plain.yaml wants to call ctcdraft.training.search.run_trial (ngram._target_)" in message
        assert not list(folder.glob("marker*"))


def test_a_value_merged_below_a_shipped_target_is_checked(folder, monkeypatch, capsys):
    """configs/objective/distill.yaml looks a function up by its path, which imports the module in the path."""
    (folder / "evil.py").write_text(f"open({str(folder / 'marker')!r}, 'w').close()\ndef run():\n    pass\n")
    monkeypatch.syspath_prepend(folder)
    drafter = {"defaults": ["/objective/distill"], "name": "x", "distance": {"path": "evil.run"}}
    drafter["_target_"] = "ctcdraft.drafters.prompt_lookup.PromptLookup"
    OmegaConf.save(OmegaConf.create(drafter), folder / "merged.yaml")
    arguments = [f"contestants=[{folder / 'merged.yaml'}]", "base=local", "base.path=base", f"out={folder}/out", *SHORT]
    message = expect_error(monkeypatch, capsys, "evaluate.py", *arguments)
    assert not (folder / "marker").exists()
    assert f"{folder}/merged.yaml wants to call hydra.utils.get_method (distance._target_)" in message


def test_a_resumed_run_sends_no_key_to_a_server(folder, monkeypatch, capsys):
    sent = []
    monkeypatch.setenv("SECRET", "open sesame")
    monkeypatch.setattr(
        "ctcdraft.corpus.generation.http.JSONClient.post", lambda server, *message: sent.append(server) or {}
    )
    given = {"url": "http://far.example/v1", "key_from": "SECRET", "model": "m", "seed": 0, "retries": 0}
    answers = compose_config(
        "train", "answers=openai", *[f"answers.{key}={value}" for key, value in given.items()]
    ).answers
    run = changed(folder / "run", ("answers", answers), ("prepared", str(folder / "gone")))
    message = expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=6")
    assert not sent
    server = "would request responses from the server at http://far.example/v1"
    assert f"{server}, and there is no complete corpus in {folder}" in message
    changed(folder / "run", ("prepared", "prepared"))  # complete, so no server is asked
    run_script(monkeypatch, "train.py", f"resume={run}", "trainer.steps=6")
    assert not sent


def test_no_code_runs_from_a_published_head(folder):
    PublishedHead.from_run(folder / "run", load_base("base", "float32", "cpu")).save_pretrained(folder / "head")
    message = json.loads((folder / "head" / "config.json").read_text())
    message["drafter"]["frames"] = command(folder / "marker")
    message["trust"] = ["ctcdraft.training.search.run_trial"]
    (folder / "head" / "config.json").write_text(json.dumps(message))
    with pytest.raises(InputError, match=r"config\.json wants to call ctcdraft\.training\.search\.run_trial \(draf"):
        PublishedHead.from_pretrained(folder / "head", model=random_lm(context=128), tokenizer=tiny_tokenizer())
    assert not list(folder.glob("marker*"))


def test_a_secret_of_the_environment_is_not_read(folder, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "open sesame")
    run = changed(folder / "run", ("drafter.name", "${oc.env:SECRET}"))
    message = expect_error(monkeypatch, capsys, "evaluate.py", f"checkpoint={run}", *SHORT)
    assert "interpolates ${oc.env:SECRET} (drafter.name)" in message


def test_a_custom_class_needs_trust_on_the_command_line(folder, monkeypatch, capsys):
    """Without trust the module is not imported either, or it would have created the file."""
    (folder / "mine.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\n{MODULE}")
    monkeypatch.syspath_prepend(folder)
    OmegaConf.save(OmegaConf.create({"_target_": "mine.Parrot", "name": "parrot"}), folder / "parrot.yaml")
    run = changed(folder / "run", ("drafter._target_", "mine.Own"), ("trust", ["mine.Own"]))
    command_line = ["evaluate.py", f"contestants=[{run},{folder}/parrot.yaml]", f"out={folder}/out", *SHORT]
    assert "add trust=[mine.Own]" in expect_error(monkeypatch, capsys, *command_line)
    assert "add trust=[mine.Parrot]" in expect_error(monkeypatch, capsys, *command_line, "trust=[mine.Own]")
    assert "add trust=[mine.Own]" in expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=5")
    assert not (folder / "imported").exists()
    run_script(monkeypatch, *command_line, "trust=[mine.Own,mine.Parrot]")
    rows = json.loads((folder / "out" / "report.json").read_text())["rows"]
    assert [row["drafter"] for row in rows] == ["autoregressive", "ctc", "parrot"]
    run_script(monkeypatch, "train.py", f"resume={run}", "trainer.steps=5", "trust=[mine.Own]")
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_published_head_of_a_custom_class_is_loaded_if_the_caller_trusts_it(folder, monkeypatch):
    (folder / "ours.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    run = changed(folder / "run", ("drafter._target_", "ours.Own"))
    PublishedHead.from_run(run, load_base("base", "float32", "cpu"), trust=["ours.Own"]).save_pretrained(
        folder / "head"
    )
    given = {"model": random_lm(context=128), "tokenizer": tiny_tokenizer()}
    with pytest.raises(InputError, match=r"add trust=\[ours\.Own\]"):
        PublishedHead.from_pretrained(folder / "head", **given)
    head = PublishedHead.from_pretrained(folder / "head", **given, trust=["ours.Own"])
    saved = load_file(folder / "run" / "drafter.safetensors")
    assert type(head.drafter).__name__ == "Own"
    assert all((value == saved[name]).all() for name, value in head.drafter.trainable_state_dict().items())


def test_a_drafter_without_weights_is_not_a_published_head(folder):
    PublishedHead.from_run(folder / "run", load_base("base", "float32", "cpu")).save_pretrained(folder / "head")
    message = json.loads((folder / "head" / "config.json").read_text())
    for drafter, sentence in (
        ({"_target_": "ctcdraft.drafters.autoregressive.Autoregressive"}, "which is not a draft head"),
        ("ctc", "missing or damaged"),
    ):
        (folder / "head" / "config.json").write_text(json.dumps(message | {"drafter": drafter}))
        with pytest.raises(InputError, match=sentence):
            PublishedHead.from_pretrained(folder / "head", model=random_lm(context=128), tokenizer=tiny_tokenizer())


def test_a_published_head_opens_no_other_place(folder):
    """A draft model's weights are of a folder or hub id that its config names; the caller has to trust it."""
    PublishedHead.from_run(folder / "run", load_base("base", "float32", "cpu")).save_pretrained(folder / "head")
    message = json.loads((folder / "head" / "config.json").read_text())
    target = "ctcdraft.drafters.draft_model.DraftModel"
    drafter = {"_target_": target, "name": "x", "path": str(folder / "elsewhere"), "lora_rank": None, "frames": 4}
    drafter["tree"] = {"_target_": "ctcdraft.drafters.trees.dynamic.DynamicTree", "width": 2, "children": 2}
    (folder / "head" / "config.json").write_text(json.dumps(message | {"drafter": drafter}))
    given = {"model": random_lm(context=128), "tokenizer": tiny_tokenizer()}
    with pytest.raises(InputError, match=f"wants to call {target}"):
        PublishedHead.from_pretrained(folder / "head", **given)
    with pytest.raises(InputError, match=r"no base LLM at .*elsewhere"):
        PublishedHead.from_pretrained(folder / "head", **given, trust=[target])


def test_training_with_a_custom_class_needs_no_trust(folder, monkeypatch):
    """The command line is written by the user, so it is trusted."""
    (folder / "yours.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    run_script(monkeypatch, "train.py", *train_args(f"run={folder}/own", "drafter._target_=yours.Own"))
    assert (folder / "own" / "drafter.safetensors").is_file()
