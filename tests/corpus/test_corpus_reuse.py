"""A finished corpus is not used otherwise than it was made, and survives a full disk."""

from __future__ import annotations

import os
import shutil

import pytest
from test_bad_inputs import PART, TINY, TRAIN, content, error_of, run, world  # noqa: F401
from tiny_models import tiny_tokenizer

STORED = [*TRAIN, "corpus.path=done", "hidden_states=offline", "hidden_states.path=store"]


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("train.py", [*TRAIN, "corpus.path=done", "base.path=other"],
         "holds answers of base, but this run's base is other (another weights)"),
        ("data/prepare.py", [*TINY, "answers.max_new_tokens=9", "out=done"], "answers.max_new_tokens=8 (now 9)"),
        ("train.py", [*STORED, "hidden_states.precision=float8"], "must be one of float32, bfloat16, int8, got float8"),
        ("train.py", [*STORED, "hidden_states.limit_gb=1e-6"], "limit_gb=1e-06; give hidden_states=online"),
        ("train.py", [*STORED, "corpus.path=good.jsonl", "hidden_states.limit_gb=1e-6"],
         "hidden_states=offline would store at least "),
    ],
    ids=["another base", "other settings", "no precision", "no room", "no room for the prompts alone"],
)  # fmt: skip
def test_a_finished_corpus_is_not_used_otherwise(world, monkeypatch, capsys, script, arguments, sentence):  # noqa: F811
    assert sentence in error_of(world, monkeypatch, capsys, script, *arguments)


def test_a_corpus_of_another_tokenizer_is_neither_resumed_nor_trained_on(world, monkeypatch, capsys):  # noqa: F811
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["word"])
    for file in (world / "base").iterdir():
        (world / "retokenized").mkdir(exist_ok=True)
        (world / "retokenized" / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(world / "retokenized")
    for script, arguments in (("train.py", [*TRAIN, "corpus.path=done"]), ("data/prepare.py", [*TINY, "out=done"])):
        message = error_of(world, monkeypatch, capsys, script, *arguments, "base.path=retokenized")
        assert "another tokenizer" in message


def test_a_plan_repairs_nothing(world, monkeypatch, capsys):  # noqa: F811
    shutil.copytree(world / "done", world / "harmed")
    for file in (world / "harmed").glob("*-0*"):
        file.unlink()
    before = content(world / "harmed")
    message = error_of(world, monkeypatch, capsys, "train.py", *TRAIN, "prepared=harmed", "plan_only=true")
    assert message.endswith("rows-00000.arrow is missing or damaged; run data/prepare.py again to redo it")
    assert content(world / "harmed") == before


def test_a_disk_that_fills_up_keeps_finished_files(world, monkeypatch, capsys):  # noqa: F811
    """Simulated; test_full_disk.py has a disk that is really full."""
    synced, fsync = [], os.fsync

    def full(number: int) -> None:
        synced.append(number)
        if len(synced) > 4:  # the manifest, the plan and two parts
            raise OSError(28, "No space left on device")
        fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = error_of(world, monkeypatch, capsys, "data/prepare.py", *TINY, "out=full")
    assert "No space left on device" in message
    assert message.endswith("make room or choose another place, then run again: what was finished is kept")
    assert sorted(content(world / "full")) == ["manifest.json", "part-00000.jsonl", "part-00001.jsonl"]
    kept = {name: (world / "full" / name).stat().st_mtime_ns for name in ("part-00000.jsonl", PART)}
    assert run(monkeypatch, "data/prepare.py", *TINY, "out=full") == 0
    assert content(world / "full") == content(world / "done")
    assert kept == {name: (world / "full" / name).stat().st_mtime_ns for name in kept}
