"""Many processes make one corpus: the same bytes whoever asks, in whatever order, and never two at one piece."""

import fcntl
import os
import subprocess
import sys

import pytest
from tiny_models import random_base

from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.part_files import writer_lock
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError

PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"turn {turn}" + "!" * n for turn in range(1, 2 + n % 3)), None) for n in range(1, 12)
]
DRAWING = TransformersAnswers(4, 10, 1.0, 0, 2)  # 22 dialogues: 6 batches


@pytest.fixture(scope="module")
def base():
    return random_base()


def prepare(base, out, shard=prepared.SINGLE_SHARD):
    return prepared.prepare(base, Corpus.from_prompts(PROMPTS), DRAWING, out, {}, shard)


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


def test_every_sample_of_every_turn_is_there_once_and_samples_differ(base, tmp_path):
    prepare(base, tmp_path)
    rows = prepared.read_corpus(tmp_path, base.fingerprint()).rows
    wanted = [(one.id, turn, sample) for one in PROMPTS for turn in range(len(one.turns)) for sample in (0, 1)]
    assert sorted((row.id, row.turn, row.sample) for row in rows) == sorted(wanted)
    said = {(row.id, row.turn, row.sample): row.tokens_L[row.mask_L].tolist() for row in rows}
    assert all(said[one.id, 0, 0] != said[one.id, 0, 1] for one in PROMPTS)


def test_each_sample_goes_on_after_its_own_first_answer(base, tmp_path):
    prepare(base, tmp_path)
    rows = {(row.id, row.turn, row.sample): row for row in prepared.read_corpus(tmp_path, base.fingerprint()).rows}
    for sample in (0, 1):
        first, second = rows["p1", 0, sample], rows["p1", 1, sample]
        words = base.tokenizer.decode(first.tokens_L[first.mask_L].tolist(), skip_special_tokens=True)
        history = base.tokenizer.decode(second.tokens_L[~second.mask_L].tolist())
        assert f"<|assistant|>{words}<|end|>" in history


def test_two_writers_of_one_piece_are_refused(base, tmp_path):
    with writer_lock(tmp_path, Shard(1, 1)):
        for shard in (Shard(1, 1), Shard(1, 2), Shard(2, 2)):
            with pytest.raises(InputError, match=rf"process {os.getpid()} on .* is writing into .*; wait for it, stop"):
                prepare(base, tmp_path, shard)
    assert list(tmp_path.iterdir()) == []
    with writer_lock(tmp_path, Shard(1, 2)), pytest.raises(InputError, match=r"is writing into .*writer-1-of-2.lock"):
        prepare(base, tmp_path, Shard(2, 3))


def test_a_complete_corpus_is_nobodys_to_write(base, tmp_path):
    prepare(base, tmp_path)
    with writer_lock(tmp_path, prepared.SINGLE_SHARD):
        assert prepare(base, tmp_path)["complete"]
        part_files.part_path(tmp_path, 1).unlink()
        with pytest.raises(InputError, match="is writing into"):
            prepare(base, tmp_path)


def test_siblings_write_side_by_side_and_leave_each_others_drafts_alone(base, tmp_path):
    with writer_lock(tmp_path, Shard(1, 2)):
        (tmp_path / "part-00000.jsonl.1.partial").write_text("a sibling is at it")
        prepare(base, tmp_path, Shard(2, 2))
        assert (tmp_path / "part-00000.jsonl.1.partial").exists()
    prepare(base, tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))


def test_the_lock_of_a_dead_process_stops_nobody(base, tmp_path):
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


def test_a_lock_that_is_let_go_at_once_is_waited_for(tmp_path):
    """A sibling that looks whether somebody is alive holds the lock for an instant."""
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


def test_a_shard_that_is_none_is_one_sentence():
    with pytest.raises(InputError, match=r"shard must be i/N .*, got 3/2"):
        Shard.parse("3/2")
