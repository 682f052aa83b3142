"""Paths on the command line: `~`, spaces, commas, `=` and non-ASCII letters, through every entry point."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from entry_parts import REPOSITORY, expect_error, run_script, train_args
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from ctcdraft.config.cli import compose_config, dotted_keys, error_sentence
from ctcdraft.config.command_line import PATH_KEYS, PATH_LIST_KEYS, quote_paths
from ctcdraft.training import search

ODD = "my run, n=1 (ünï) it's"


def read(argument: str):
    return OverridesParser.create().parse_override(argument).value()


@pytest.fixture
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("run=~/x", "/home/me/x"),
        ("run=~", "/home/me"),
        ("out='~/a,b'", "/home/me/a,b"),
        ("corpus.path=~/data/my file.json", "/home/me/data/my file.json"),
        ("checkpoint=/a/b,c", "/a/b,c"),
        ("base.path=/x/y=z", "/x/y=z"),
        ("+corpus.leakage.benchmarks.mine=~/f", "/home/me/f"),
        ("run=/tmp/ünï", "/tmp/ünï"),
        ("run=/tmp/it's", "/tmp/it's"),
        ("run=a(1)[2]", "a(1)[2]"),
        ("run=2024", "2024"),
        ("run=1e3", "1e3"),
        ("run=${base.name}/ü", "${base.name}/ü"),
        ("resume=null", None),
        ("contestants=[~/a,b]", ["/home/me/a", "b"]),
        ("contestants=[ünï@direct, '~/a b']", ["ünï@direct", "/home/me/a b"]),
        ("contestants=[{draft_model:{path:~/m=1}}]", [{"draft_model": {"path": "/home/me/m=1"}}]),
        ("corpus.path=[~/a.json,~/b.json]", ["/home/me/a.json", "/home/me/b.json"]),
        ("base.config={model_type:llama}", {"model_type": "llama"}),
    ],
)
def test_hydra_reads_the_path_that_was_typed(home, argument, value):
    (quoted,) = quote_paths([argument])
    assert read(quoted) == value
    assert quote_paths([quoted]) == [quoted]  # sweep.py passes its arguments on to train.py


def test_arguments_that_need_no_quotes_stay_as_typed(home):
    arguments = [
        "run=runs/a b",
        "base.path=owner/name",
        "trainer.betas=[0.9,0.95]",
        "drafter.frames=8",
        "checkpoint=r@x",
    ]
    assert quote_paths(arguments) == arguments


def test_with_m_a_comma_is_a_sweep(home):
    assert quote_paths(["-m", "base.path=~/a,b,~/c=d", "objective=ctc,eagle"]) == [
        "-m", "base.path=/home/me/a,b,'/home/me/c=d'", "objective=ctc,eagle",
    ]  # fmt: skip
    swept = OverridesParser.create().parse_override(quote_paths(["--multirun", "run=~/a,~/b"])[1])
    assert list(swept.sweep_string_iterator()) == ["/home/me/a", "/home/me/b"]


def test_every_key_named_like_a_path_is_known_as_one():
    for verb, groups in (("train", ["hidden_states=offline", "answers=vllm"]), ("evaluate", []), ("prepare", [])):
        for key in dotted_keys(compose_config(verb, *groups)):
            name = key.rpartition(".")[2]
            if name.endswith(("path", "folder", "_file")) and name != "hub_file":
                assert name in PATH_KEYS, key
    named = {"run", "resume", "prepared", "out", "checkpoint"}
    assert named <= PATH_KEYS
    assert {"contestants", "reports"} == PATH_LIST_KEYS


@pytest.mark.parametrize(
    ("arguments", "reason", "corrected"),
    [
        (["run=my", "new", "run", "seed=1"], "new is not key=value", [["run=my new run", "seed=1"]]),
        (["contestants=a,b"], "takes several paths as a list", [["contestants=[a,b]"]]),
        (
            ["seed=1", "corpus.path=a.json,b.json"],
            "may be 2 existing paths or one",
            [["seed=1", 'corpus.path="a.json,b.json"'], ["seed=1", "corpus.path=[a.json,b.json]"]],
        ),
        (["base.name=ünï"], "cannot be read without quotes", [['base.name="ünï"']]),
        (["benchmark.instruction=Say: a=b!"], "cannot be read without quotes", [['benchmark.instruction="Say: a=b!"']]),
    ],
)
def test_an_ambiguous_argument_is_refused_with_a_correction(world, monkeypatch, capsys, arguments, reason, corrected):
    monkeypatch.chdir(world)
    for name in ("a.json", "b.json"):
        Path(name).touch()
    message = expect_error(monkeypatch, capsys, "train.py", *arguments)
    assert reason in message
    assert message.count("\n") == 1
    for command in corrected:
        assert shlex.join(["python", str(REPOSITORY / "train.py"), *command]) in message
        quote_paths(command)  # no longer refused


def test_an_existing_path_with_a_comma_is_one_path(world, monkeypatch):
    monkeypatch.chdir(world)
    for name in ("a.json", "b.json", "a.json,b.json"):
        Path(name).touch()
    assert read(quote_paths(["corpus.path=a.json,b.json"])[0]) == "a.json,b.json"
    Path("a.json,b.json").unlink()


def test_odd_paths_go_through_every_entry_point(world, monkeypatch):
    monkeypatch.chdir(world)
    monkeypatch.setenv("HOME", str(world / "home"))
    shutil.copytree("base", world / "home" / f"base {ODD}")
    shutil.copy("prompts.jsonl", world / "home" / "prompts, ü=1.jsonl")
    sources = [f"base.path=~/base {ODD}", "corpus.path=~/prompts, ü=1.jsonl"]
    run_script(
        monkeypatch, "data/prepare.py", "base=local", *sources, "answers.max_new_tokens=20", f"out=~/answers {ODD}"
    )
    odd = [*sources, f"prepared=~/answers {ODD}", "trainer.steps=2"]
    run_script(monkeypatch, "train.py", *train_args(*odd, f"run=~/{ODD}"))
    run = world / "home" / ODD
    assert (run / "drafter.safetensors").is_file()
    assert shlex.split((run / "command.txt").read_text())[-1] == f"run={run}-again"
    run_script(
        monkeypatch, "evaluate.py", f"contestants=['~/{ODD.replace(chr(39), chr(92) + chr(39))}',prompt_lookup]",
        "benchmark.path=~/prompts, ü=1.jsonl", "benchmark.limit=1", f"out=~/out {ODD}", "decoding.max_new_tokens=8",
        "warm_up_tokens=4", "timing.questions=0",
    )  # fmt: skip
    rows = json.loads((world / "home" / f"out {ODD}" / "report.json").read_text())["rows"]
    assert [row["drafter"] for row in rows] == ["autoregressive", "ctc", "prompt_lookup"]
    assert not (world / "~").exists()


def test_odd_paths_go_through_a_search(tmp_path, monkeypatch, capsys):
    searches = []
    monkeypatch.setattr(search, "run_search", lambda *values: searches.append(values) or 1.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = ["run=~/a,b", "base.path=~/c=d", "corpus.path=~/e,~/f", "drafter.frames=range(4,9)"]
    run_script(monkeypatch, "sweep.py", *arguments)
    ((command, run, space, *_),) = searches
    assert run == tmp_path / "a,b"
    assert read(command[-1]) == f"{tmp_path}/c=d"
    assert space["corpus.path"] == [f"{tmp_path}/e", f"{tmp_path}/f"]
    Path("file").touch()
    message = expect_error(monkeypatch, capsys, "sweep.py", "run=file/x", "drafter.frames=range(4,9)")
    assert message.startswith("sweep.py: run=file/x cannot be written")


LOOKUP = {"_target_": "ctcdraft.drafters.prompt_lookup.PromptLookup", "base": None, "ngram": 1, "span": 1}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: get_object("ctcdraft.drafters.parot.Parrot"),
            "Error loading 'ctcdraft.drafters.parot.Parrot' (",
        ),
        (
            lambda: instantiate(LOOKUP | {"spam": 1}),
            "PromptLookup() got an unexpected keyword argument 'spam'",
        ),
        (
            lambda: instantiate({"_target_": LOOKUP["_target_"], "base": None, "span": 1}),
            "positional argument: 'ngram",
        ),
        (lambda: instantiate({"_target_": "ctcdraft.objectives.ctc.PrefixCTC", "spam": 1}), "PrefixCTC() got an unexp"),
        (lambda: instantiate({"_target_": "ctcdraft.evaluation.benchmarks.gsm8k", "spam": 1}), "gsm8k() got an unexp"),
        (lambda: instantiate(LOOKUP | {"acceptance": 5}), None),  # a bug of the constructor keeps its traceback
    ],
)
def test_a_drafter_that_does_not_fit_its_class_is_one_sentence(make, sentence):
    with pytest.raises((ImportError, InstantiationException)) as raised:
        make()
    found = error_sentence(raised.value)
    assert (found is None) if sentence is None else (sentence in found and "\n" not in found)
