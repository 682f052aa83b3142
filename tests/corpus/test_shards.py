"""Shards: many processes write the same bytes as one, in any order, and never two the same part."""

import fcntl
import os
import subprocess
import sys

import pytest
from tiny_models import random_base

from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.part_files import writer_lock
from ctcdraft.corpus.token_store import Row
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError

PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"turn {turn}" + "!" * n for turn in range(1, 2 + n % 3)), None) for n in range(1, 12)
]
SAMPLED = TransformersAnswers(4, 10, 1.0, 0, 2)  # 22 samples: 6 batches


@pytest.fixture(scope="module")
def base():
    return random_base()


def prepare(base, out, shard=prepared.SINGLE_SHARD):
    return prepared.prepare(base, Corpus.from_prompts(PROMPTS), SAMPLED, out, {}, shard)


def turns_of(corpus):
    """Return the rows by turn: each response behind its whole prompt."""
    return [
        Row(row.id, row.turn + n, row.category, row.tokens_L[:end], [(start, end, ended)], row.sample)
        for row in corpus.rows
        for n, (start, end, ended) in enumerate(row.spans)
    ]


def content(out):
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


@pytest.mark.parametrize("of", [2, 5, 9])  # 9: three shards have nothing to do
def test_shards_merged_equal_one_process(base, tmp_path, of):
    prepare(base, tmp_path / "one")
    numbers = [*range(2, of + 1), 1]
    manifests = [prepare(base, tmp_path / "many", Shard(number, of)) for number in numbers]
    assert [manifest["complete"] for manifest in manifests] == [False] * (of - 1) + [True]
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_a_shard_writes_its_own_batches_and_no_others(base, tmp_path):
    prepare(base, tmp_path, Shard(2, 3))
    assert [file.name for file in part_files.list_parts(tmp_path)] == ["part-00001.jsonl", "part-00004.jsonl"]
    with pytest.raises(InputError, match=r"is not complete; run data/prepare.py again"):
        prepared.read_corpus(tmp_path, base.fingerprint())


def test_parts_from_two_machines_are_merged_in_one_folder(base, tmp_path):
    prepare(base, tmp_path / "one")
    for number in (1, 2):
        prepare(base, tmp_path / f"machine{number}", Shard(number, 2))
    for file in part_files.list_parts(tmp_path / "machine2"):
        file.rename(tmp_path / "machine1" / file.name)
    written = {file: file.stat().st_mtime_ns for file in part_files.list_parts(tmp_path / "machine1")}
    assert prepare(base, tmp_path / "machine1")["complete"]
    assert written == {file: file.stat().st_mtime_ns for file in part_files.list_parts(tmp_path / "machine1")}
    assert content(tmp_path / "machine1") == content(tmp_path / "one")


def test_every_sample_of_every_turn_exists_once_and_samples_differ(base, tmp_path):
    prepare(base, tmp_path)
    rows = turns_of(prepared.read_corpus(tmp_path, base.fingerprint()))
    wanted = [(one.id, turn, sample) for one in PROMPTS for turn in range(len(one.turns)) for sample in (0, 1)]
    assert sorted((row.id, row.turn, row.sample) for row in rows) == sorted(wanted)
    responses = {(row.id, row.turn, row.sample): row.tokens_L[row.mask_L].tolist() for row in rows}
    assert all(responses[one.id, 0, 0] != responses[one.id, 0, 1] for one in PROMPTS)


def test_each_sample_continues_after_its_own_first_response(base, tmp_path):
    prepare(base, tmp_path)
    rows = {(row.id, row.turn, row.sample): row for row in turns_of(prepared.read_corpus(tmp_path, base.fingerprint()))}
    for sample in (0, 1):
        first, second = rows["p1", 0, sample], rows["p1", 1, sample]
        first_text = base.tokenizer.decode(first.tokens_L[first.mask_L].tolist(), skip_special_tokens=True)
        history = base.tokenizer.decode(second.tokens_L[~second.mask_L].tolist())
        assert f"<|assistant|>{first_text}<|end|>" in history


def test_shards_that_begin_at_the_same_moment_share_one_manifest(base, tmp_path, monkeypatch):
    """The other shard writes the manifest and a part while this one looks for them, at each possible moment."""
    wanted = prepared.initial_manifest(base, Corpus.from_prompts(PROMPTS), SAMPLED)
    other = wanted | {"answers": wanted["answers"] | {"temperature": 0.5}}
    moments = ("list_parts", "read_manifest", "write_first_manifest")
    for number, moment in enumerate(moments):
        for theirs, refused in ((wanted, False), (other, True)):
            out = tmp_path / f"{number}{refused}"
            out.mkdir()
            with monkeypatch.context() as patch:
                patch.setattr(part_files, moment, between(getattr(part_files, moment), out, theirs, moment))
                if refused:
                    with pytest.raises(InputError, match=r"was made with answers\.temperature=0\.5 \(now 1\.0\)"):
                        prepared.begin_manifest(out, wanted)
                else:
                    assert prepared.begin_manifest(out, wanted) == wanted
            assert part_files.read_manifest(out) == theirs
            assert [file.name for file in sorted(out.iterdir())] == ["manifest.json", "part-00000.jsonl"]


def between(function, out, theirs, moment):
    """Return the function with a sibling's writing before a writing of this shard, or after a reading of it."""

    def disturbed(*arguments):
        seen = function(*arguments) if moment != "write_first_manifest" else None
        if not (out / "manifest.json").exists():
            part_files.write_manifest(out, theirs)
            part_files.write_part(part_files.part_path(out, 0), [])
        return function(*arguments) if moment == "write_first_manifest" else seen

    return disturbed


def test_a_kill_while_a_corpus_is_deleted_leaves_its_manifest(base, tmp_path, monkeypatch):
    """Parts without a manifest could not be resumed."""
    prepare(base, tmp_path)
    left, unlink = [3], type(tmp_path).unlink

    def killed(file, missing_ok=False):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        unlink(file, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            part_files.delete_corpus(tmp_path)
    assert 0 < len(part_files.list_parts(tmp_path)) < 6
    assert prepare(base, tmp_path)["complete"]
    part_files.delete_corpus(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_shard_are_refused(base, tmp_path):
    with writer_lock(tmp_path, Shard(1, 1)):
        for shard in (Shard(1, 1), Shard(1, 2), Shard(2, 2)):
            with pytest.raises(InputError, match=rf"process {os.getpid()} on .* is writing into .*; wait for it, stop"):
                prepare(base, tmp_path, shard)
    assert list(tmp_path.iterdir()) == []
    with writer_lock(tmp_path, Shard(1, 2)), pytest.raises(InputError, match=r"is writing into .*writer-1-of-2.lock"):
        prepare(base, tmp_path, Shard(2, 3))


def test_a_complete_corpus_needs_no_lock(base, tmp_path):
    prepare(base, tmp_path)
    with writer_lock(tmp_path, prepared.SINGLE_SHARD):
        assert prepare(base, tmp_path)["complete"]
        part_files.shard_path(tmp_path, 0).unlink()
        with pytest.raises(InputError, match="is writing into"):
            prepare(base, tmp_path)


def test_sibling_shards_write_side_by_side_and_keep_each_others_partial_files(base, tmp_path):
    with writer_lock(tmp_path, Shard(1, 2)):
        (tmp_path / "part-00000.jsonl.1.partial").write_text("a sibling is at it")
        prepare(base, tmp_path, Shard(2, 2))
        assert (tmp_path / "part-00000.jsonl.1.partial").exists()
    prepare(base, tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))


def test_the_lock_of_a_dead_process_locks_nothing(base, tmp_path):
    held = (
        "import os, sys; from pathlib import Path; from ctcdraft.corpus.part_files import writer_lock; "
        "from ctcdraft.distributed import Shard; lock = writer_lock(Path(sys.argv[1]), Shard(1, 2)); lock.__enter__(); "
        "print('held', flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", held, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (-9, "held\n"), done.stderr
    assert (tmp_path / "writer-1-of-2.lock").read_text().startswith("process ")
    assert prepare(base, tmp_path)["complete"]
    assert not list(tmp_path.glob("*.lock"))


def test_a_lock_that_is_held_for_an_instant_is_waited_for(tmp_path):
    """`is_locked` of a sibling shard holds the lock for an instant."""
    stream = (tmp_path / "writer.lock").open("w")
    fcntl.flock(stream, fcntl.LOCK_EX)
    opened = []

    def let_go(seconds):
        opened.append(seconds)
        stream.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", let_go)
        with writer_lock(tmp_path, Shard(1, 1)):
            assert len(opened) == 1


def test_an_invalid_shard_is_one_sentence():
    with pytest.raises(InputError, match=r"shard must be i/N .*, got 3/2"):
        Shard.parse("3/2")
