"""Bad input to data/prepare.py and train.py: one sentence, exit status 1, and finished files stay untouched."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.cli import CONFIGS, find_input_error, register_resolvers
from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.part_files import PLAN_FILE, writer_lock
from ctcdraft.corpus.token_store import refuse_wrong_masks
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base

ROOT = Path(__file__).resolve().parents[2]
TALK = [{"from": "human", "value": "Say it."}, {"from": "gpt", "value": "It."}]
PROMPTS = [{"id": f"p{n}", "category": "test", "turns": [f"prompt {n}"]} for n in range(6)]


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def run(patch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """Return the exit status of a script as a user calls it."""
    patch.setattr(sys, "argv", [script, "base=local", "base.path=base", "device=cpu", *arguments])
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


PREPARE = ["answers.max_new_tokens=8", "answers.batch_size=2"]
TINY = [*PREPARE, "corpus=tiny", "corpus.path=good.jsonl"]
TRAIN = [
    "trainer.steps=1", "trainer.batch_size=2", "trainer.probe_prompts=0", "drafter.frames=5", "objective.labels=3",
    "run=trained",
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with two base models, valid prompts and a complete corpus."""
    home = tmp_path_factory.mktemp("world")
    for name, seed in (("base", 0), ("other", 1)):
        random_lm(seed=seed, context=128).save_pretrained(home / name)
        tiny_tokenizer().save_pretrained(home / name)
    (home / "good.jsonl").write_bytes(lines(*PROMPTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert run(patch, "data/prepare.py", *TINY, "out=done") == 0
    return home


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of all files but plan.json, which holds the speed of the machine."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != PLAN_FILE}


def error_of(world: Path, patch: pytest.MonkeyPatch, capsys, script: str, *arguments: str) -> str:
    """Return the error of a call that must fail with one sentence and status 1 and leave the finished corpus alone."""
    patch.chdir(world)
    before = content(world / "done")
    capsys.readouterr()
    assert run(patch, script, *arguments) == 1
    message = [line for line in capsys.readouterr().err.split("\n") if line and "answering:" not in line]
    assert len(message) == 1, message
    assert message[0].startswith(f"{Path(script).name}: ")
    assert content(world / "done") == before
    return message[0]


# --- files of conversations ---------------------------------------------------------------------------------

FILES: dict[str, tuple[str, bytes, str]] = {
    "a truncated gzip": ("torn.jsonl.gz", gzip.compress(lines(*[{"conversations": TALK}] * 999))[:-12], "cannot read"),
    "a gzip that is torn inside": ("bad.jsonl.gz", b"\x1f\x8b\x08\x00rubbish of no length", "cannot read"),
    "a gz that is none": ("plain.jsonl.gz", bytes(range(128, 256)), "is not UTF-8 text"),
    "a line that is not JSON": ("a.jsonl", lines({"conversations": TALK}) + b"{'single': 1}\n", "line 2 of"),
    "a line cut off": ("b.jsonl", lines({"conversations": TALK})[:-9], "is not JSON"),
    "an array that ends early": ("c.json", json.dumps([{"conversations": TALK}] * 3).encode()[:-5], "is not JSON"),
    "Latin-1": ("d.jsonl", json.dumps({"conversations": TALK}).replace("Say", "\u00e9").encode("latin-1"), "not UTF-8"),
    "UTF-16": ("e.jsonl", lines({"conversations": TALK}).decode().encode("utf-16"), "is UTF-16 instead of UTF-8"),
    "wrong roles": ("f.jsonl", lines({"conversations": [{"from": "a bot", "value": "Hi"}]}), "speakers: a bot 1"),
    "an empty turn": ("g.jsonl", lines({"conversations": [{"from": "human", "value": " "}]}), "dropped: empties 1"),
    "a missing column": ("h.jsonl", lines({"text": "Hi"}), "no column `conversations` (found: text)"),
    "a message without a speaker": ("i.jsonl", lines({"messages": [{"content": "Hi"}]}), "without a speaker"),
    "conversations as text": ("j.jsonl", lines({"conversations": json.dumps(TALK)}), "a str as `conversations`"),
    "JSON of another shape": ("k.json", b"[1, 2, 3]", "is a int instead of an object"),
    "one object on many lines": ("l.json", json.dumps({"conversations": TALK}, indent=1).encode(), "line 1 of"),
    "an empty file": ("m.jsonl", b"", "holds no prompt"),
    "a file of white space": ("n.jsonl", b"\n  \n\n", "holds no prompt"),
    "JSON nested without end": ("o.jsonl", b'{"conversations": ' + b"[" * 200_000 + b"\n", "nested too deeply"),
    "zeros where text should be": ("p.jsonl", bytes(4096), "is not JSON"),
    "an empty gzip": ("q.jsonl.gz", gzip.compress(b""), "holds no prompt"),
}


@pytest.fixture(scope="module")
def sharegpt():
    """corpus=sharegpt as a function of its path, composed once: composing takes longer than reading a bad file."""
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = compose("prepare", ["corpus=sharegpt"])
    return lambda path: instantiate(config.corpus, path=str(path))


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_is_one_sentence(sharegpt, tmp_path, kind):
    name, data, sentence = FILES[kind]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InstantiationException) as refusal:
        sharegpt(tmp_path / name)
    message = str(find_input_error(refusal.value))
    assert sentence in message
    assert name in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["a truncated gzip", "wrong roles"])
def test_a_bad_file_ends_with_status_one(world, monkeypatch, capsys, kind):
    name, data, sentence = FILES[kind]
    (world / name).write_bytes(data)
    arguments = [*PREPARE, "corpus=sharegpt", f"corpus.path={name}", "out=new"]
    assert sentence in error_of(world, monkeypatch, capsys, "data/prepare.py", *arguments)
    assert not (world / "new").exists()


# --- command-line arguments ----------------------------------------------------------------------------------

STEPS = "corpus.cleaning.steps"
KLINGON = f"{STEPS}.language.wanted=klingon"
NOBODY = "http://127.0.0.1:9/v1"
WORDS: dict[str, tuple[list[str], str]] = {
    "a file that is not there": (["corpus.path=gone.jsonl"], "gone.jsonl is not there"),
    "a folder without files": (["corpus.path=hollow"], "hollow is a folder without .jsonl or .json files"),
    "a path of nothing": (["corpus.path=''"], "corpus.path"),
    "a negative limit": (["corpus.limit=-1"], "corpus.limit=-1 leaves nothing"),
    "a limit that is no number": (["corpus.limit=many"], "limit"),
    "an unknown step": ([f"+{STEPS}.rhymes=true"], "rhymes"),
    "a step that does not exist": ([f"+{STEPS}.rhymes._target_=ctcdraft.corpus.filters.Rhymes"], "Rhymes"),
    "a step taken out that is not there": ([f"~{STEPS}.rhymes"], "rhymes"),
    "an unknown language": (["corpus=sharegpt", "corpus.path=talk.jsonl", KLINGON], "=klingon is not among"),
    "a sequence of no words": (["corpus.leakage.words=0"], "corpus.leakage.words must be an integer >= 1, got 0"),
    "a benchmark that is not there": (["+corpus.leakage.benchmarks.mine=gone.npz"], "gone.npz"),
    "a benchmark of numbers that is damaged": (["+corpus.leakage.benchmarks.mine=bad.npz"], "bad.npz"),
    "a chat template that is not there": (["base.chat_template_file=gone.jinja"], "cannot read the chat template"),
    "a chat template that is no template": (["base.chat_template_file=broken.jinja"], "template"),
    "answers of no tokens": (["answers.max_new_tokens=0"], "answers.max_new_tokens must be an integer >= 1, got 0"),
    "an engine that does not exist": (["answers=oracle"], "oracle"),
    "a temperature that is none": (["answers.temperature=nan"], "temperature"),
    "a batch that is no number": (["answers.batch_size=few"], "batch_size"),
    "a server of no address": (["answers=openai", "answers.url=localhost:8000"], "is no address of a server"),
    "a server that is not there": (["answers=openai", f"answers.url={NOBODY}", "answers.retries=0"], "failed 1 times"),
    "a shard beyond the last": (["shard=3/2"], "shard must be i/N"),
    "an out that is a file": (["out=good.jsonl"], "good.jsonl"),
    "an out below a file": (["out=good.jsonl/out"], "good.jsonl"),
    "a show of less than nothing": (["show=-1"], "show"),
    "a device that is none": (["device=abacus"], "abacus"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WORDS)
def test_a_bad_argument_is_one_sentence(world, monkeypatch, capsys, kind):
    arguments, sentence = WORDS[kind]
    (world / "hollow").mkdir(exist_ok=True)
    (world / "talk.jsonl").write_bytes(lines({"conversations": TALK}))
    (world / "bad.npz").write_bytes(b"PK no archive")
    (world / "broken.jinja").write_text("{% for message in %}")
    before = (world / "good.jsonl").read_bytes()
    out = [] if any(argument.startswith("out=") for argument in arguments) else ["out=new2"]
    assert sentence in error_of(world, monkeypatch, capsys, "data/prepare.py", *TINY, *arguments, *out)
    assert not list(world.glob("new2/part-*"))
    assert (world / "good.jsonl").read_bytes() == before


# --- a damaged prepared corpus ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(world):
    return load_base(str(world / "base"), "float32", "cpu")


def copied(world: Path, folder: Path) -> Path:
    for file, data in content(world / "done").items():
        (folder / file).write_bytes(data)
    return folder


def ones(folder: Path) -> None:
    change_lines(folder, lambda line: line | {"mask": [1] * len(line["mask"])})


def zeros(folder: Path) -> None:
    change_lines(folder, lambda line: line | {"mask": [0] * len(line["mask"])})


def change_lines(folder: Path, change: Callable[[part_files.Line], part_files.Line]) -> None:
    """Change lines and correct their checksums, so that only the content is wrong."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in part_files.list_parts(folder):
        part_files.write_part(file, [change(line) for line in part_files.read_part(file) or []])
        manifest["parts"][file.name] = part_files.file_checksum(file)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edited(folder: Path) -> None:
    file = part_files.part_path(folder, 1)
    file.write_bytes(file.read_bytes().replace(b'"ended":false', b'"ended":true', 1))


def uneven(folder: Path) -> None:
    change_lines(folder, lambda line: line | {"mask": line["mask"][1:]})


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size]) and None


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a manifest cut off": (cut("manifest.json", 300), "is not the manifest of a prepared corpus"),
    "a manifest of something else": (lambda folder: (folder / "manifest.json").write_text("[]") and None, "is not the"),
    "a manifest without parts": (lambda folder: (folder / "manifest.json").write_text(
        json.dumps({"complete": True, "base": {}, "answers": {}})) and None, "is not the"),
    "a part cut off": (cut("part-00001.jsonl", 100), "part-00001.jsonl is missing or damaged"),
    "a part edited": (edited, "part-00001.jsonl is missing or damaged"),
    "a part gone": (lambda folder: part_files.part_path(folder, 1).unlink(), "part-00001.jsonl is missing or damaged"),
    "a mask of ones": (ones, "is all ones"),
    "a mask of zeros": (zeros, "is all zeros"),
    "a mask of other length": (uneven, r"has \d+ entries for \d+ tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_corpus_is_not_read(world, base, kind, tmp_path):
    damage, sentence = DAMAGES[kind]
    folder = copied(world, tmp_path)
    damage(folder)
    with pytest.raises(InputError, match=sentence) as refusal:
        refuse_wrong_masks(prepared.read_corpus(folder, base.fingerprint()).rows, base.tokenizer, base.stop_token_ids)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["a manifest cut off", "a part edited", "a mask of ones"])
def test_a_damaged_corpus_is_not_trained_on(world, monkeypatch, capsys, kind, tmp_path):
    damage, sentence = DAMAGES[kind]
    damage(copied(world, tmp_path))
    assert sentence in error_of(world, monkeypatch, capsys, "train.py", *TRAIN, f"corpus.path={tmp_path}")
    assert not (world / "trained").exists()


def test_a_corpus_of_another_base_is_not_trained_on(world, monkeypatch, capsys):
    message = error_of(world, monkeypatch, capsys, "train.py", *TRAIN, "corpus.path=done", "base.path=other")
    assert "holds answers of base, but this run's base is other (another weights)" in message


def test_a_corpus_of_another_tokenizer_is_neither_resumed_nor_trained_on(world, monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["word"])
    for file in (world / "base").iterdir():
        (world / "retokenized").mkdir(exist_ok=True)
        (world / "retokenized" / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(world / "retokenized")
    for script, arguments in (("train.py", [*TRAIN, "corpus.path=done"]), ("data/prepare.py", [*TINY, "out=done"])):
        message = error_of(world, monkeypatch, capsys, script, *arguments, "base.path=retokenized")
        assert "another tokenizer" in message


def test_other_settings_leave_finished_files_untouched(world, monkeypatch, capsys):
    message = error_of(world, monkeypatch, capsys, "data/prepare.py", *TINY, "answers.max_new_tokens=9", "out=done")
    assert "answers.max_new_tokens=8 (now 9)" in message


def test_a_second_writer_is_refused(world, monkeypatch, capsys):
    with writer_lock(world / "taken", Shard(1, 1)):
        message = error_of(world, monkeypatch, capsys, "data/prepare.py", *TINY, "out=taken")
    assert f"process {os.getpid()} on" in message
    assert "is writing into taken" in message


def test_a_disk_that_fills_up_keeps_finished_files(world, monkeypatch, capsys):
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
    kept = {name: (world / "full" / name).stat().st_mtime_ns for name in ("part-00000.jsonl", "part-00001.jsonl")}
    assert run(monkeypatch, "data/prepare.py", *TINY, "out=full") == 0
    assert content(world / "full") == content(world / "done")
    assert kept == {name: (world / "full" / name).stat().st_mtime_ns for name in kept}


def test_wrong_settings_of_stored_states_are_one_sentence(world, monkeypatch, capsys):
    stored = ["corpus.path=done", "hidden_states=offline", "hidden_states.path=store"]
    for arguments, sentence in (
        (["hidden_states.precision=float8"], "must be one of float32, bfloat16, int8, got float8"),
        (["hidden_states.limit_gb=1e-6"], "is not enough for one shard"),
    ):
        assert sentence in error_of(world, monkeypatch, capsys, "train.py", *TRAIN, *stored, *arguments)
