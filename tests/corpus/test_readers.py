"""Readers: chunk sizes do not matter, and everything wrong with the bytes is one sentence."""

import gzip
import json

import pytest

from ctcdraft.corpus import readers as reading
from ctcdraft.corpus.readers import read_hub_records, read_records
from ctcdraft.errors import InputError

ENTRIES = [
    {"a": "text with ] and , and } in it", "b": [1, 2.5, -3e7, None, True]},
    {"escaped": '\\" \\ \\n \u2028 \ud83d\ude00 é'.encode("utf-16", "surrogatepass").decode("utf-16")},
    {},
    {"deep": {"er": [{"est": ""}]}},
]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_an_array_is_the_same_in_any_chunks(tmp_path, monkeypatch, chunk, layout):
    monkeypatch.setattr(reading, "CHUNK_CHARACTERS", chunk)
    (tmp_path / "a.json").write_text(" \n" + json.dumps(ENTRIES, **layout) + "\n", encoding="utf-8")
    records = list(read_records(str(tmp_path / "a.json")))
    assert [entry for _, entry in records] == ENTRIES
    assert records[2][0] == f"entry 3 of {tmp_path / 'a.json'}"


def test_an_array_keeps_unpaired_surrogates_long_integers_and_nan(tmp_path):
    """Empties drops texts with unpaired surrogates; a parser that replaces them, as yajl does, would hide them."""
    (tmp_path / "a.json").write_text('[{"a": "half \\ud83d"}, {"a": 123456789012345678901234567890}, {"a": NaN}]')
    half, long, nan = (entry["a"] for _, entry in read_records(str(tmp_path / "a.json")))
    assert (half, long) == ("half \ud83d", 123456789012345678901234567890)
    assert nan != nan


def test_a_byte_order_mark_and_a_missing_gz_ending_do_not_matter(tmp_path):
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(ENTRIES).encode())
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(b'{"a": 1}\n\n{"a": 2}'))
    (tmp_path / "plain.jsonl.gz").write_text('{"a": 3}')
    (tmp_path / "placeholder.jsonl.gz").write_bytes(gzip.compress(b""))
    assert [entry for _, entry in read_records(str(tmp_path / "marked.json"))] == ENTRIES
    assert [entry["a"] for _, entry in read_records(str(tmp_path / "p*"))] == [1, 2, 3]


PACKED = gzip.compress(b'{"a": "b"}\n' * 5000)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl.gz", PACKED[:-12], "cannot read .*a.jsonl.gz: Compressed file ended"),
        ("a.jsonl.gz", PACKED[:12] + b"\xff" * 20 + PACKED[32:], "cannot read .*a.jsonl.gz"),
        ("a.jsonl", b'{"a": 1}\n{"a": \xe9}', r"line 2 of .* is not UTF-8 text \(byte 6\)"),
        ("a.json", b'[{"a": "\xe9"}]', r"a.json is not UTF-8 text \(near entry 1\)"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "a.jsonl is UTF-16 instead of UTF-8"),
        ("a.jsonl", b'{"a": 1}\nnot json', "line 2 of .* is not JSON"),
        ("a.jsonl", b'{"a": 1}\n[2]', "line 2 of .* is a list instead of an object"),
        ("a.jsonl", b"[" * 100_000, "nested too deeply|is not JSON"),
        ("a.jsonl", b'{"a": ' + b"[" * 200_000 + b"\n", "line 1 of .* is nested too deeply"),
        ("a.jsonl.gz", bytes(range(128, 256)), "line 1 of .* is not UTF-8 text"),
        ("a.jsonl", bytes(4096), "line 1 of .* is not JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": "b', "line 2 of .* is not JSON"),
        ("a.json", b'{\n "a": 1\n}', "line 1 of .* is not JSON"),
        ("a.json", b"[1]", "entry 1 of .* is a int instead of an object"),
        ("a.json", b'[{"a": 1}, {"a": ]', "entry 2 of .* is not JSON"),
        ("a.json", b'[{"a": 1}, {"a": 2}', "entry 2 of .* is not JSON"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "entry 1 of .* is not JSON"),
        ("a.json", b'[{"a": 1}] {"a": 2}', "continues after the end of its array"),
        ("a.json", b'[{"a": "never closed}]', "entry 1 of .* is not JSON"),
        ("a.json", b"[", "entry 1 of .* is not JSON"),
    ],
)
def test_unreadable_bytes_are_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence) as caught:
        list(read_records(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_file_is_not_read_beyond_the_requested_record(tmp_path):
    """The wrong line is a megabyte behind the first one, so reading one record does not reach it."""
    for name, begin, between in (("a.jsonl", "", "\n"), ("a.json", "[", ",")):
        text = begin + between.join(['{"a": "' + "x" * 1000 + '"}'] * 3000) + between + "wrong"
        (tmp_path / name).write_text(text)
        assert next(read_records(str(tmp_path / name)))[1]["a"] == "x" * 1000
        with pytest.raises(InputError, match=r"3001 of .* is not JSON"):
            list(read_records(str(tmp_path / name)))


def test_a_data_set_that_cannot_be_built_is_one_sentence(monkeypatch):
    import datasets

    def broken(*args, **kwargs):
        raise datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset\nmore")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(InputError, match=r"cannot get owner/name from the hub \(An error occurred .*\); give a local"):
        read_hub_records("owner/name")
