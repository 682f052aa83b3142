"""Repair of a damaged corpus: nothing that is there is answered again or lost."""

import os

import pytest
from test_prepared import BATCHES, PROMPTS, SAMPLED, base, content, prepare, prepare_until  # noqa: F401

from ctcdraft.corpus import arrow_files, part_files, prepared
from ctcdraft.corpus.generation import requests, shared
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("parts_too", [False, True])
def test_damaged_shards_are_refused_and_then_redone_from_the_parts(base, tmp_path, damage, parts_too):  # noqa: F811
    prepare(base, tmp_path)
    before = content(tmp_path)
    harmed = [part_files.shard_path(tmp_path, 0), part_files.part_path(tmp_path, 1)]
    for file in harmed[: 1 + parts_too]:
        if damage == "truncate":
            file.write_bytes(file.read_bytes()[:-20])
        elif damage == "flip":
            data = bytearray(file.read_bytes())
            # In a part the first digit of a token: it is still JSON, and only its checksum is wrong.
            data[data.index(b'"tokens":[') + 10 if file.suffix == ".jsonl" else len(data) // 2] ^= 1
            file.write_bytes(data)
        else:
            file.unlink()
    with pytest.raises(InputError, match=r"rows-00000.arrow is missing or damaged; run data/prepare.py again"):
        prepared.read_corpus(tmp_path, base.fingerprint())
    kept = os.stat(part_files.part_path(tmp_path, 0)).st_mtime_ns
    prepare(base, tmp_path)
    assert content(tmp_path) == before
    assert kept == os.stat(part_files.part_path(tmp_path, 0)).st_mtime_ns


def two_shards(base, out, monkeypatch):  # noqa: F811
    """Prepare a corpus of two shards without parts; return the content that it had with them."""
    monkeypatch.setattr(arrow_files, "BATCH_ROWS", 5)
    monkeypatch.setattr(arrow_files, "SHARD_BYTES", 1)
    prepare(base, out)
    whole = content(out)
    for file in part_files.list_parts(out):
        file.unlink()
    return whole


def test_a_corpus_without_parts_is_neither_deleted_nor_answered_again(base, tmp_path, monkeypatch):  # noqa: F811
    whole = two_shards(base, tmp_path, monkeypatch)
    shards = part_files.list_shards(tmp_path)
    assert len(shards) > 2
    shards[-1].unlink()
    damaged = content(tmp_path)
    for other in ({"answers": SAMPLED}, {"prompts": PROMPTS[1:]}):
        with pytest.raises(InputError, match="holds a corpus that was made with"):
            prepare(base, tmp_path, **other)
        # Nothing is lost: the parts that intact shards have are not answered again.
        assert damaged.items() <= content(tmp_path).items()
    asked = []
    generate = requests.MultiTurnGenerator.__call__
    monkeypatch.setattr(
        requests.MultiTurnGenerator, "__call__", lambda self, batch: asked.append(batch) or generate(self, batch)
    )
    prepare(base, tmp_path)
    assert content(tmp_path) == whole
    assert 0 < len(asked) < BATCHES, "only what the missing shard had"


def test_a_killed_repair_keeps_parts_that_were_answered_with_other_bytes(base, tmp_path, monkeypatch):  # noqa: F811
    prepare(base, tmp_path)
    for number in (0, 2):
        part_files.part_path(tmp_path, number).write_text("")
    part_files.shard_path(tmp_path, 0).unlink()
    join = shared.join_turns
    # As on another processor, where a near tie is answered otherwise.
    monkeypatch.setattr(shared, "join_turns", lambda lines: [line | {"cut": 7} for line in join(lines)])
    prepare_until(monkeypatch, 1, base, tmp_path)
    again = part_files.part_path(tmp_path, 0).read_bytes()
    assert b'"cut":7' in again
    assert not prepared.is_complete(tmp_path)
    prepare_until(monkeypatch, 0, base, tmp_path)
    assert part_files.part_path(tmp_path, 0).read_bytes() == again
    assert prepare(base, tmp_path, shard=Shard(2, 2))["complete"] is False
    assert prepare(base, tmp_path, shard=Shard(1, 2))["complete"]
    assert part_files.part_path(tmp_path, 0).read_bytes() == again
