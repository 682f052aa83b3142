"""Rows of the token store equal the lines that were put in, in memory and memory-mapped."""

import random

import datasets
import pytest
import torch

from ctcdraft.corpus import arrow_files
from ctcdraft.corpus.lines import mask_spans, with_spans
from ctcdraft.corpus.part_files import list_shards
from ctcdraft.corpus.token_store import Column, TokenStore, row_from_line
from ctcdraft.errors import InputError


def some_lines(count=20):
    rng = random.Random(0)
    for number in range(count):
        key = {"id": f"p{number // 2}", "turn": number % 2, "sample": number % 3, "category": rng.choice(["a", "b"])}
        if number == 5:
            yield key | {"dropped": "nothing was said"}
            continue
        length = rng.randrange(6, 30)
        spans = [[2, 3, rng.choice((0, 1))], [5, length, rng.choice((0, 1))]][number % 2 :]
        yield key | {"tokens": rng.choices(range(50_000), k=length), "spans": spans, "cut": 0, "ids": "generated"}


def parts():
    lines = list(some_lines())
    return [lines[:7], lines[7:8], lines[8:]]


@pytest.fixture(params=["in memory", "memory-mapped", "in many shards and batches"])
def table(request, tmp_path, monkeypatch):
    if request.param == "in memory":
        return arrow_files.in_memory(parts())
    if request.param == "in many shards and batches":
        monkeypatch.setattr(arrow_files, "BATCH_ROWS", 3)
        monkeypatch.setattr(arrow_files, "SHARD_BYTES", 700)
    shards = arrow_files.write_shards(tmp_path, parts())
    assert shards == list_shards(tmp_path)
    assert (len(shards) > 2) == (request.param == "in many shards and batches")
    return arrow_files.open_shards(shards)


def test_rows_equal_their_lines(table):
    store, lines = TokenStore(table), [line for line in some_lines() if "dropped" not in line]
    assert len(store) == len(lines) == 19
    for row, line in zip(store, lines, strict=True):
        assert (row.id, row.turn, row.category, row.sample) == tuple(
            line[key] for key in ("id", "turn", "category", "sample")
        )
        assert row.tokens_L.dtype == torch.int32
        assert row.tokens_L.tolist() == line["tokens"]
        assert list(map(list, row.spans)) == line["spans"]
        assert row.mask_L.tolist() == [any(s <= at < e for s, e, _ in row.spans) for at in range(len(row.tokens_L))]
    assert [row.id for row in store[4:9:2]] == [line["id"] for line in lines[4:9:2]]
    assert store[-1].id == lines[-1]["id"]
    assert row_from_line(lines[3]).tokens_L.tolist() == lines[3]["tokens"]
    with pytest.raises(IndexError):
        store[19]


def test_parts_are_written_again_as_they_were(table):
    assert [(number, part) for number, part in arrow_files.parts_of(table)] == list(enumerate(parts()))


def test_the_library_datasets_opens_a_shard(tmp_path):
    (shard,) = arrow_files.write_shards(tmp_path, parts())
    found = datasets.Dataset.from_file(str(shard))
    assert len(found) == 20
    assert found[0]["tokens"] == next(some_lines())["tokens"]
    assert found[0]["spans"] == next(some_lines())["spans"]
    assert found[5]["dropped"] == "nothing was said"


def test_a_store_without_rows_is_empty(tmp_path):
    assert list(TokenStore(arrow_files.open_shards(arrow_files.write_shards(tmp_path, [])))) == []


def test_names_that_are_no_text_are_kept_readable(tmp_path):
    line = next(some_lines()) | {"category": 3, "id": "a\ud800"}
    assert (row_from_line(line).category, row_from_line(line).id) == ("3", "a\\ud800")


def test_a_column_has_the_values_of_the_kept_rows():
    held = TokenStore(arrow_files.in_memory(parts()))
    column = Column(held, [7, 2], lambda one: one.tokens_L[:3].long())
    assert [tokens.tolist() for tokens in column] == [held[index].tokens_L[:3].tolist() for index in (7, 2)]
    assert column[0].dtype == torch.int64
    assert len(column[:1]) == 1


def test_a_line_of_an_older_version_gets_spans():
    old = {"id": "p0", "tokens": [1, 2, 3, 4, 5], "mask": [0, 1, 1, 0, 1], "ended": False}
    assert with_spans(old) == {"id": "p0", "tokens": [1, 2, 3, 4, 5], "spans": [(1, 3, 1), (4, 5, 0)]}
    assert with_spans(with_spans(old)) == with_spans(old)
    assert mask_spans([0, 0], True) == []
    with pytest.raises(InputError, match=r"the answer mask of p0 has 1 entries for 5 tokens; prepare"):
        with_spans(old | {"mask": [1]})
