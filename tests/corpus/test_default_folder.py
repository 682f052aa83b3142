"""The default folder of a prepared corpus: one for each prompt file, and the older name where it holds that file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from entry_parts import REPOSITORY, expect_error, run_script, train_args
from hydra import compose, initialize_config_dir

from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.corpus.part_files import default_folder, file_names


def talks(file, *texts):
    file.write_text("".join(json.dumps({"conversations": [{"from": "human", "value": one}]}) + "\n" for one in texts))


@pytest.mark.parametrize(
    ("corpus", "folder"),
    [
        ({"name": "sharegpt", "path": None}, "b-sharegpt"),
        ({"name": "sharegpt", "path": "/data/lima.jsonl"}, "b-sharegpt-lima"),
        ({"name": "sharegpt", "path": "chats/lima.jsonl.gz"}, "b-sharegpt-lima"),
        ({"name": "sharegpt", "path": ["a.json", "b c,d.jsonl"]}, "b-sharegpt-a+b_c_d"),
        ({"name": "sharegpt", "path": "chats/"}, "b-sharegpt-chats"),
        ({"name": "sharegpt", "path": "chats/part-*.jsonl"}, "b-sharegpt-part"),
        ({"name": "tiny", "path": f"{REPOSITORY}/data/tiny/prompts/train.jsonl"}, "b-tiny"),
        ({"name": "two", "path": None, "parts": {"a": {"path": "x.jsonl"}, "b": {"path": "y.jsonl"}}}, "b-two-x+y"),
        ({"name": "two", "path": None, "parts": {"a": {"path": None}, "b": {}}}, "b-two"),
    ],
)
def test_a_folder_is_named_by_what_it_is_made_from(corpus, folder):
    assert default_folder("home", "b", corpus) == str(Path("home") / folder)
    assert len(file_names(corpus | {"path": ["x" * 50, "y" * 50]})) == 60


@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_both_entry_points_look_in_the_same_folder(verb):
    register_resolvers()
    key = {"prepare": "out", "train": "prepared"}[verb]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        for arguments, folder in (
            (["corpus=tiny"], "tiny-tiny"),
            (["corpus=sharegpt"], "tiny-sharegpt"),
            (["corpus=sharegpt", "corpus.path=lima.jsonl"], "tiny-sharegpt-lima"),
            (["corpus=sharegpt_gsm8k", "corpus.parts.gsm8k.path=train.jsonl"], "tiny-sharegpt_gsm8k-train"),
        ):
            assert compose(verb, arguments)[key] == str(REPOSITORY / "data" / "prepared" / folder)


def test_responses_in_a_folder_of_the_older_name_are_used(tmp_path):
    def corpus_of(path):
        return {"name": "sharegpt", "path": path}

    old = tmp_path / "b-sharegpt"
    old.mkdir()
    (old / "manifest.json").write_text(json.dumps({"settings": {"corpus": corpus_of("/elsewhere/lima.jsonl")}}))
    assert default_folder(str(tmp_path), "b", corpus_of("lima.jsonl")) == str(old)
    assert default_folder(str(tmp_path), "b", corpus_of("other.jsonl")) == str(tmp_path / "b-sharegpt-other")
    (tmp_path / "b-sharegpt-lima").mkdir()
    assert default_folder(str(tmp_path), "b", corpus_of("lima.jsonl")) == str(tmp_path / "b-sharegpt-lima")
    for damaged in ("{", "[]", '{"settings": null}'):
        (old / "manifest.json").write_text(damaged)
        assert default_folder(str(tmp_path), "b", corpus_of("any.jsonl")) == str(tmp_path / "b-sharegpt-any")


def default_out(monkeypatch, world):
    """Put default folders below the test folder instead of below the repository."""
    monkeypatch.chdir(world)
    monkeypatch.setattr("ctcdraft.config.cli.register_resolvers", lambda: register_in(world))


def register_in(world):
    from omegaconf import OmegaConf

    register_resolvers()
    homes = {"data/prepared": str(world / "data" / "prepared")}
    OmegaConf.register_new_resolver("repo", lambda path: homes.get(path, str(REPOSITORY / path)), replace=True)


def test_a_second_file_is_neither_refused_nor_taken_for_the_first(world, monkeypatch, capsys):
    """data/prepare.py, then train.py, both with the default folder."""
    default_out(monkeypatch, world)
    talks(world / "first.jsonl", *(f"say {n}" for n in range(6)))
    talks(world / "second.jsonl", *(f"tell {n}" for n in range(6)))
    arguments = ["base=local", "base.path=base", "corpus=sharegpt", "answers.max_new_tokens=8", "device=cpu"]
    for file in ("first", "second"):
        run_script(monkeypatch, "data/prepare.py", *arguments, f"corpus.path={file}.jsonl")
        assert f"6 answers to 6 prompts in {world}/data/prepared/base-sharegpt-{file}" in capsys.readouterr().out
    more = [
        argument
        for argument in train_args("run=second", "trainer.steps=1", "trainer.batch_size=2")
        if "prepared" not in argument
    ]
    run_script(monkeypatch, "train.py", *more, *arguments, "corpus.path=second.jsonl")
    manifests = {
        file: json.loads((world / f"data/prepared/base-sharegpt-{file}/manifest.json").read_text())["hash"]
        for file in ("first", "second")
    }
    assert manifests["first"] != manifests["second"]
    assert json.loads((world / "second" / "fingerprint.json").read_text())["corpus"] == manifests["second"]
    assert "answering" not in capsys.readouterr().err  # the corpus of data/prepare.py is used


def test_the_error_distinguishes_files_of_one_name(world, monkeypatch, capsys):
    default_out(monkeypatch, world)
    for home, verb in (("one", "walk"), ("two", "run")):
        (world / home).mkdir()
        talks(world / home / "chats.jsonl", *(f"{verb} {n}" for n in range(4)))
    arguments = ["base=local", "base.path=base", "corpus=sharegpt", "answers.max_new_tokens=8", "device=cpu"]
    run_script(monkeypatch, "data/prepare.py", *arguments, "corpus.path=one/chats.jsonl")
    capsys.readouterr()
    message = expect_error(monkeypatch, capsys, "data/prepare.py", *arguments, "corpus.path=two/chats.jsonl")
    assert "base-sharegpt-chats holds a corpus that was made with other prompts, " in message
    assert "corpus.path=one/chats.jsonl (now two/chats.jsonl); repeat those settings" in message
    assert "choose another place (out= of data/prepare.py, prepared= of train.py)" in message
