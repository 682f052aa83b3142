"""Bad input to data/prepare.py and train.py: one sentence, exit status 1, and finished files stay untouched."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from entry_parts import run_script
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.part_files import PLAN_FILE
from ctcdraft.corpus.token_store import refuse_wrong_masks
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base

TALK = [{"from": "human", "value": "Say it."}, {"from": "gpt", "value": "It."}]
PROMPTS = [{"id": f"p{n}", "category": "test", "turns": [f"prompt {n}"]} for n in range(6)]


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def run(patch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """Return the exit status of a script as a user calls it."""
    try:
        run_script(patch, script, "base=local", "base.path=base", "device=cpu", *arguments)
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


STEPS = "corpus.cleaning.steps"
KLINGON = f"{STEPS}.language.wanted=klingon"
CLOSED = "http://127.0.0.1:9/v1"
ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "a file that is not there": (["corpus.path=gone.jsonl"], "gone.jsonl is not there; give a file"),
    "a folder without files": (["corpus.path=hollow"], "hollow is a folder without .jsonl or .json files"),
    "a path of nothing": (["corpus.path=''"], "corpus.path"),
    "a truncated gzip": (["corpus=sharegpt", "corpus.path=torn.jsonl.gz"], "cannot read torn.jsonl.gz"),
    "wrong roles": (["corpus=sharegpt", "corpus.path=robot.jsonl"], "speakers: a bot 1"),
    "a limit of none": (["corpus.limit=0"], "corpus.limit=0 leaves nothing"),
    "a limit that is no number": (["corpus.limit=many"], "limit"),
    "an unknown step": ([f"+{STEPS}.rhymes=true"], "rhymes"),
    "a step that does not exist": ([f"+{STEPS}.rhymes._target_=ctcdraft.corpus.filters.Rhymes"], "Rhymes"),
    "a step taken out that is not there": ([f"~{STEPS}.rhymes"], "rhymes"),
    "an unknown language": (["corpus=sharegpt", "corpus.path=talk.jsonl", KLINGON], "=klingon is not among"),
    "a sequence of no words": (["corpus.leakage.words=0"], "corpus.leakage.words must be an integer >= 1, got 0"),
    "a benchmark that is not there": (["+corpus.leakage.benchmarks.mine=gone.npz"], "gone.npz"),
    "a benchmark of questions that is not there": (["+corpus.leakage.benchmarks.mine=gone.jsonl"], "gone.jsonl is not"),
    "records of another corpus": (["corpus=gsm8k"], "has no column `question` (found: id, category, turns)"),
    "a benchmark of numbers that is damaged": (["+corpus.leakage.benchmarks.mine=bad.npz"], "bad.npz"),
    "a chat template that is not there": (["base.chat_template_file=gone.jinja"], "cannot read the chat template"),
    "a chat template that is no template": (["base.chat_template_file=broken.jinja"], "template"),
    "answers of no tokens": (["answers.max_new_tokens=0"], "answers.max_new_tokens must be an integer >= 1, got 0"),
    "a batch of none": (["answers.batch_size=0"], "answers.batch_size must be an integer >= 1, got 0"),
    "a package that is absent": (["answers=vllm"], "answers=vllm needs the package vllm"),
    "an engine that does not exist": (["answers=oracle"], "oracle"),
    "a temperature that is none": (["answers.temperature=nan"], "temperature"),
    "a batch that is no number": (["answers.batch_size=few"], "batch_size"),
    "a server of no address": (["answers=openai", "answers.url=localhost:8000"], "is no address of a server"),
    "a server that is not there": (["answers=openai", f"answers.url={CLOSED}", "answers.retries=0"], "failed 1 times"),
    "a shard beyond the last": (["shard=3/2"], "shard must be i/N"),
    "overwriting by a shard": (["shard=2/2", "overwrite=true"], "overwrite=true with shard=2/2 would throw away"),
    "an out that is a file": (["out=good.jsonl"], "good.jsonl"),
    "an out below a file": (["out=good.jsonl/out"], "good.jsonl"),
    "a show of less than nothing": (["show=-1"], "show"),
    "a device that is none": (["device=abacus"], "abacus"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_bad_argument_is_one_sentence(world, monkeypatch, capsys, kind):
    arguments, sentence = ARGUMENTS[kind]
    (world / "hollow").mkdir(exist_ok=True)
    (world / "talk.jsonl").write_bytes(lines({"conversations": TALK}))
    (world / "robot.jsonl").write_bytes(lines({"conversations": [{"from": "a bot", "value": "Hi"}]}))
    (world / "torn.jsonl.gz").write_bytes(gzip.compress(lines(*[{"conversations": TALK}] * 999))[:-12])
    (world / "bad.npz").write_bytes(b"PK no archive")
    (world / "broken.jinja").write_text("{% for message in %}")
    before = (world / "good.jsonl").read_bytes()
    out = [] if any(argument.startswith("out=") for argument in arguments) else ["out=new2"]
    assert sentence in error_of(world, monkeypatch, capsys, "data/prepare.py", *TINY, *arguments, *out)
    assert not list(world.glob("new2/part-*"))
    assert "corpus=sharegpt" not in arguments or not (world / "new2").exists()
    assert (world / "good.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def base(world):
    return load_base(str(world / "base"), "float32", "cpu")


def damaged(world: Path, folder: Path, kind: str) -> str:
    """Copy the finished corpus into a folder and damage it; return the sentence that this must give."""
    damage, sentence = DAMAGES[kind]
    for file, data in content(world / "done").items():
        (folder / file).write_bytes(data)
    damage(folder)
    return sentence


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def masked(change: Callable[[list[int]], list[int]]) -> Callable[[Path], object]:
    """Write lines with masks, as older versions did, change the masks and correct the checksums."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        for file in part_files.list_parts(folder):
            lines = part_files.read_part(file) or []
            for line in lines:
                ((start, end, ended),) = line.pop("spans")
                line |= {"mask": change([0] * start + [1] * (end - start)), "ended": bool(ended)}
            part_files.write_part(file, lines)
            manifest["parts"][file.name] = part_files.file_checksum(file)
        del manifest["arrow"]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def of_parts(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    """Damage a corpus that has no shards, as those of older versions."""

    def without_shards(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        del manifest["arrow"]
        (folder / MANIFEST).write_text(json.dumps(manifest))
        (folder / SHARD).unlink()
        damage(folder)

    return without_shards


MANIFEST, PART, SHARD = "manifest.json", "part-00001.jsonl", "rows-00000.arrow"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a manifest cut off": (rewritten(MANIFEST, lambda text: text[:300]), "is not the manifest of a prepared corpus"),
    "a manifest of something else": (rewritten(MANIFEST, lambda text: b"[]"), "is not the"),
    "a manifest without parts": (
        rewritten(MANIFEST, lambda text: lines({"complete": True, "base": {}, "answers": {}})), "is not the"),
    "a shard cut off": (rewritten(SHARD, lambda data: data[:100]), f"{SHARD} is missing or damaged"),
    "a shard edited": (rewritten(SHARD, lambda data: data.replace(b"test", b"next", 1)), f"{SHARD} is missing or"),
    "a shard gone": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing or damaged"),
    "an old part cut off": (of_parts(rewritten(PART, lambda text: text[:100])), f"{PART} is missing or damaged"),
    "an old part edited": (
        of_parts(rewritten(PART, lambda text: text.replace(b'"cut":0', b'"cut":1', 1))), f"{PART} is missing or"),
    "an old part gone": (of_parts(lambda folder: (folder / PART).unlink()), f"{PART} is missing or damaged"),
    "a mask of ones": (masked(lambda mask: [1] * len(mask)), "is all ones"),
    "a mask of zeros": (masked(lambda mask: [0] * len(mask)), "is all zeros"),
    "a mask of other length": (masked(lambda mask: mask[1:]), r"has \d+ entries for \d+ tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_corpus_is_not_read(world, base, kind, tmp_path):
    sentence = damaged(world, tmp_path, kind)
    with pytest.raises(InputError, match=sentence) as refusal:
        refuse_wrong_masks(prepared.read_corpus(tmp_path, base.fingerprint()).rows, base.tokenizer, base.stop_token_ids)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["a manifest cut off", "a shard edited", "an old part edited", "a mask of ones"])
def test_a_damaged_corpus_is_not_trained_on(world, monkeypatch, capsys, kind, tmp_path):
    sentence = damaged(world, tmp_path, kind)
    assert sentence in error_of(world, monkeypatch, capsys, "train.py", *TRAIN, f"corpus.path={tmp_path}")
    assert not (world / "trained").exists()
