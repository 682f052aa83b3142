"""Preparation of a corpus: interruptions leave no trace, masks are exact."""

import json
import os
from collections import Counter

import pytest
from prompts import generated_tokens
from tiny_models import random_base

from ctcdraft.corpus import arrow_files, finished, part_files, prepared
from ctcdraft.corpus.generation import requests
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.errors import InputError

PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"turn {turn}" + "!" * n for turn in range(1, 2 + n % 2)), None) for n in range(1, 12)
]
TURNS = sum(len(prompt.turns) for prompt in PROMPTS)
GREEDY = TransformersAnswers(3, 12, 0.0, 0, 1)
SAMPLED = TransformersAnswers(3, 12, 1.0, 0, 2)
BATCHES = 4  # of GREEDY: 11 samples in batches of 3


class KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def base():
    return random_base()


def prepare(base, out, answers=GREEDY, prompts=PROMPTS, shard=prepared.SINGLE_SHARD):
    return prepared.prepare(base, Corpus.from_prompts(prompts), answers, out, {"corpus": {"name": "test"}}, shard)


def content(out):
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def prepare_until(monkeypatch, batches, base, out, answers=GREEDY):
    """Prepare a corpus until KilledError is raised in the last turn of batch number `batches`, counted from 0."""
    with monkeypatch.context() as patch:
        killed_after(patch, batches)
        with pytest.raises(KilledError):
            prepare(base, out, answers)


def killed_after(monkeypatch, batches):
    generate, asked = requests.MultiTurnGenerator.__call__, []

    def dying(self, batch):
        asked.append(len(batch))
        lines = generate(self, batch)
        if len(asked) > batches:
            raise KilledError
        return lines

    monkeypatch.setattr(requests.MultiTurnGenerator, "__call__", dying)


def test_rows_hold_the_prompt_the_answer_and_an_exact_mask(base, tmp_path):
    manifest = prepare(base, tmp_path)
    corpus = prepared.read_corpus(tmp_path, base.fingerprint())
    assert sorted((row.id, row.turn + n) for row in corpus.rows for n in range(len(row.spans))) == sorted(
        (prompt.id, turn) for prompt in PROMPTS for turn in range(len(prompt.turns))
    )
    asked = {prompt.id: prompt for prompt in PROMPTS}
    for row in corpus.rows:
        for turn, (start, end, ended) in enumerate(row.spans, row.turn):
            text = base.tokenizer.decode(row.tokens_L[:start].tolist())
            assert text.endswith(asked[row.id].turns[turn] + "<|end|><|assistant|>")
            answer = row.tokens_L[start:end].tolist()
            assert [answer] == generated_tokens(GREEDY, base, [row.tokens_L[:start].tolist()])
            assert ended == (answer[-1] in base.stop_token_ids)
    counts = manifest["counts"]
    assert (counts["prompts"], counts["answers"], counts["cut_prompts"]) == (len(PROMPTS), TURNS, 0)
    assert manifest["conversations"] == {"read": len(PROMPTS), "kept": len(PROMPTS)}
    assert counts["tokens"] == sum(len(row.tokens_L) for row in corpus.rows)
    assert counts["answer_tokens"] == sum(int(row.mask_L.sum()) for row in corpus.rows)
    assert counts["ended_share"] == sum(ended for row in corpus.rows for *_, ended in row.spans) / TURNS
    assert counts["rows"] == len(corpus.rows)
    rows = Counter(row.id for row in corpus.rows)
    assert counts["conversations_in_one_row"] == sum(count == 1 for count in rows.values())
    assert counts["conversations_in_several_rows"] == sum(count > 1 for count in rows.values())


def test_a_second_turn_holds_the_first_response_of_the_base_model(base, tmp_path):
    prepare(base, tmp_path)
    rows = {(row.id, row.turn): row for row in prepared.read_corpus(tmp_path, base.fingerprint()).rows}
    first, second = rows["p1", 0], rows["p1", 1]  # two rows: encoding its text again changes the bytes
    history = second.tokens_L[: len(first.tokens_L)].tolist()
    first_text = base.tokenizer.decode(first.tokens_L.tolist(), skip_special_tokens=True)
    assert base.tokenizer.decode(history, skip_special_tokens=True).startswith(first_text[:8])


@pytest.mark.parametrize("answers", [GREEDY, SAMPLED])
@pytest.mark.parametrize("batches", [0, 2, 3])
def test_a_killed_and_resumed_preparation_equals_an_uninterrupted_one(base, tmp_path, monkeypatch, answers, batches):
    prepare(base, tmp_path / "whole", answers)
    prepare_until(monkeypatch, batches, base, tmp_path / "killed", answers)
    assert len(part_files.list_parts(tmp_path / "killed")) == batches
    assert not prepared.is_complete(tmp_path / "killed")
    with pytest.raises(InputError, match=r"is not complete; run data/prepare.py again to resume it"):
        prepared.read_corpus(tmp_path / "killed", base.fingerprint())
    prepare(base, tmp_path / "killed", answers)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.parametrize("torn_at", [-1, -30, 10, 0])
def test_a_torn_part_is_redone_whole_and_the_others_are_kept(base, tmp_path, monkeypatch, torn_at):
    prepare(base, tmp_path / "whole")
    prepare_until(monkeypatch, 3, base, tmp_path / "torn")
    last = part_files.part_path(tmp_path / "torn", 2)
    last.write_bytes(last.read_bytes()[:torn_at])
    kept = [os.stat(part_files.part_path(tmp_path / "torn", number)).st_mtime_ns for number in range(2)]
    prepare(base, tmp_path / "torn")
    assert content(tmp_path / "torn") == content(tmp_path / "whole")
    assert kept == [os.stat(part_files.part_path(tmp_path / "torn", number)).st_mtime_ns for number in range(2)]


def test_a_batch_that_lost_a_line_is_redone_whole(base, tmp_path, monkeypatch):
    prepare(base, tmp_path / "whole")
    prepare_until(monkeypatch, 1, base, tmp_path / "half")
    part = part_files.part_path(tmp_path / "half", 0)
    part.write_bytes(part.read_bytes().split(b"\n")[0] + b"\n")
    prepare(base, tmp_path / "half")
    assert content(tmp_path / "half") == content(tmp_path / "whole")


def test_the_order_of_the_prompts_does_not_matter(base, tmp_path):
    prepare(base, tmp_path / "forwards", SAMPLED)
    prepare(base, tmp_path / "backwards", SAMPLED, PROMPTS[::-1])
    assert content(tmp_path / "forwards") == content(tmp_path / "backwards")


def test_a_complete_corpus_is_left_as_it_is(base, tmp_path, monkeypatch):
    prepare(base, tmp_path)
    before = content(tmp_path)
    killed_after(monkeypatch, 0)  # any generation would raise
    prepare(base, tmp_path)
    assert content(tmp_path) == before
    assert prepared.is_complete(tmp_path)


def by_turn(out, manifest):
    """Rewrite a corpus as older versions wrote it: a line for every turn, with a mask, and no shards."""
    for name in manifest["parts"]:
        lines = []
        for row in part_files.read_part(out / name):
            for turn, (start, end, ended) in enumerate(row["spans"], row["turn"]):
                mask = [0] * start + [1] * (end - start)
                line = row | {"turn": turn, "tokens": row["tokens"][:end], "mask": mask, "ended": bool(ended)}
                lines.append({key: value for key, value in line.items() if key != "spans"})
        part_files.write_part(out / name, lines)
        manifest["parts"][name] = part_files.file_checksum(out / name)
    del manifest["arrow"], manifest["counts"]["rows"]
    part_files.write_manifest(out, manifest)
    for shard in part_files.list_shards(out):
        shard.unlink()


@pytest.mark.parametrize("writable", [True, False])
def test_a_corpus_of_an_older_version_keeps_its_rows_by_turn(base, tmp_path, monkeypatch, writable):
    by_turn(tmp_path, prepare(base, tmp_path))
    parts = {file.name: file.read_bytes() for file in part_files.list_parts(tmp_path)}
    killed_after(monkeypatch, 0)  # nothing is answered again
    prepare(base, tmp_path)
    if not writable:
        full = InputError("no room")
        monkeypatch.setattr(arrow_files, "write_shards", lambda *arguments: (_ for _ in ()).throw(full))
    first, again = (prepared.read_corpus(tmp_path, base.fingerprint()).rows for _ in range(2))
    assert len(first) == len(again) == TURNS
    assert all(len(row.spans) == 1 for row in again)
    for one, other in zip(first, again, strict=True):
        assert (one.id, one.turn, one.spans, one.tokens_L.tolist()) == (
            other.id, other.turn, other.spans, other.tokens_L.tolist(),
        )  # fmt: skip
    assert part_files.shard_path(tmp_path, 0).exists() == writable
    assert parts == {file.name: file.read_bytes() for file in part_files.list_parts(tmp_path)}
    prepare(base, tmp_path)


def test_exported_parts_are_those_that_were_written_and_are_read_again(base, tmp_path):
    prepare(base, tmp_path / "one")
    before = content(tmp_path / "one")
    for file in part_files.list_parts(tmp_path / "one"):
        file.unlink()
    rows = prepared.read_corpus(tmp_path / "one", base.fingerprint()).rows  # the shards are enough
    prepare(base, tmp_path / "one")
    exported = finished.export_parts(tmp_path / "one", tmp_path / "two")
    parts = {name: data for name, data in before.items() if name.startswith("part")}
    assert content(tmp_path / "two").keys() == {*parts, "manifest.json"}
    assert all(content(tmp_path / "two")[name] == data for name, data in parts.items())
    assert exported == {k: v for k, v in json.loads(before["manifest.json"]).items() if k != "arrow"}
    again = prepared.read_corpus(tmp_path / "two", base.fingerprint()).rows
    assert [(row.id, row.turn, row.spans) for row in rows] == [(row.id, row.turn, row.spans) for row in again]
    assert content(tmp_path / "two") == before  # shards and manifest included
    with pytest.raises(InputError, match=r"export=.*one is not an empty folder"):
        finished.export_parts(tmp_path / "two", tmp_path / "one")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"export=.*file is not an empty folder"):
        finished.export_parts(tmp_path / "two", tmp_path / "file")
