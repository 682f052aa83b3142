"""JSON objects out of files or of the hub, one after the other. It knows no shape of conversation.

Nothing is read whole: a line, or an entry of an array, is in memory only while it is looked at. A file of a million
lines costs what is kept of it.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ctcdraft.errors import InputError

Paths = str | Sequence[str]
Record = tuple[str, dict[str, Any]]  # where it stands, for the error sentences, and what it says

CHUNK_CHARACTERS = 1 << 20  # characters of an array looked at together


def read_records(path: Paths) -> Iterator[Record]:
    """Every JSON object of a file, of several, of a glob or of a folder; gzip is known by its first bytes."""
    for file in find_files(path):
        for where, entry in read_entries(file):
            if not isinstance(entry, dict):
                raise InputError(f"{where} is a {type(entry).__name__} instead of an object; check corpus.path=")
            yield where, entry


def read_entries(file: Path) -> Iterator[tuple[str, Any]]:
    """An array's entries or a file's lines; what the file system or gzip find wrong is one sentence."""
    try:
        with open_decompressed(file) as stream:
            begins = stream.peek(4096)[:4096].lstrip()[:1]
            yield from read_array(stream, file) if begins == b"[" else read_lines(stream, file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {file}: {error}; fetch it again, or check corpus.path=") from error


@contextmanager
def open_decompressed(file: Path) -> Iterator[Any]:
    """The bytes of the text, unpacked, behind a byte order mark."""
    with file.open("rb") as packed:
        is_gzip = packed.read(2) == b"\x1f\x8b"
    with gzip.open(file) if is_gzip else file.open("rb") as stream:
        begins = stream.peek(4)
        if begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{file} is UTF-16 instead of UTF-8 text; save it as UTF-8")
        if begins.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield stream


def read_lines(stream: IO[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    # Bytes are split at newlines alone; text would also be split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            where = f"line {number} of {file}"
            yield where, parse_json(decode_utf8(line, where), where)


def read_array(stream: IO[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    """The entries of one JSON array, a chunk of text at a time.

    What a chunk cuts off cannot be told from an error until more has been read, so an entry that does not parse
    at the end of what is there is tried again with twice as much.
    """
    text = codecs.getreader("utf-8")(stream)
    decoder = json.JSONDecoder()
    rest, number, more = "", 0, True

    def read(size: int) -> str:
        try:
            return text.read(size)
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8 text (near entry {number + 1}); save it as UTF-8") from error

    while not rest:
        rest = read(CHUNK_CHARACTERS).lstrip()
    rest = rest.removeprefix("[")
    while True:
        where = f"entry {number + 1} of {file}"
        at = skip_whitespace(rest, 0)
        while not rest.startswith("]", at):
            try:
                entry, end = decoder.raw_decode(rest, at)
                after = skip_whitespace(rest, end)
                if after == len(rest) and more:
                    break  # a number may go on, and what separates entries is still to come
                if rest[after : after + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' or ']'", rest, after)
            except json.JSONDecodeError as error:
                if more and ("Unterminated" in error.msg or error.pos > len(rest) - 16):
                    break
                # Its line and column count from wherever this chunk began.
                raise InputError(f"{where} is not JSON ({error.msg}); correct or remove it") from error
            except RecursionError as error:
                raise InputError(f"{where} is nested too deeply to be a conversation; remove it") from error
            number += 1
            yield where, entry
            where = f"entry {number + 1} of {file}"
            at = skip_whitespace(rest, after + 1) if rest[after] == "," else after
        if rest.startswith("]", at):
            if (rest[at + 1 :] + read(CHUNK_CHARACTERS)).strip():
                raise InputError(f"{file} goes on after the end of its array; correct it, or write an object a line")
            return
        rest = rest[at:]
        added = read(max(CHUNK_CHARACTERS, len(rest)))
        rest, more = rest + added, bool(added)


def skip_whitespace(text: str, at: int) -> int:
    """The first place from `at` that is not white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def decode_utf8(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text (byte {error.start}); save the file as UTF-8") from error


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error}); correct or remove it") from error
    except RecursionError as error:
        raise InputError(f"{where} is nested too deeply to be a conversation; remove it") from error


def get_column(record: dict[str, Any], name: str, kind: type | None, where: str) -> Any:
    """What a record has under a name, or a sentence on what it has instead."""
    if name not in record:
        raise InputError(
            f"{where} has no column `{name}` (found: {', '.join(record) or 'nothing'}); "
            "check corpus.path=, or choose the corpus= whose shape this is"
        )
    if kind is not None and not isinstance(record[name], kind):
        found = type(record[name]).__name__
        raise InputError(f"{where} has a {found} as `{name}` instead of a {kind.__name__}; correct that line")
    return record[name]


def find_files(path: Paths) -> list[Path]:
    """In sorted order. A folder gives its .jsonl files; only where it has none, its .json files.

    (Beside shards in .jsonl, a .json file is usually a description, such as our own manifest.json.)
    """
    found: list[Path] = []
    for one in [path] if isinstance(path, str) else path:
        if not one:  # it would stand for the folder one is in
            raise InputError("corpus.path= is empty; give a file, a folder or a glob of prompts")
        place = Path(one).expanduser()
        if place.is_dir():
            by_line = [*place.glob("*.jsonl"), *place.glob("*.jsonl.gz")]
            here = by_line or [*place.glob("*.json"), *place.glob("*.json.gz")]
        else:
            here = [place] if place.is_file() else [Path(match) for match in glob.glob(str(place))]
        if not here:
            what = "a folder without .jsonl or .json files" if place.is_dir() else "not there"
            raise InputError(f"{place} is {what}; give a file, a folder or a glob of prompts as corpus.path=")
        found += sorted(here)
    return found


def read_hub_records(hub: str, split: str = "train", **selection: Any) -> Iterator[Record]:
    """Rows of a data set of the Hugging Face hub, from its local cache where it is there already.

    `datasets` maps its cache into memory, so rows cost memory only while they are looked at here too.
    """
    import datasets

    try:
        rows = datasets.load_dataset(hub, split=split, **selection)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"cannot get {hub} from the hub ({reason}); give a local copy as corpus.path=, or go online"
        ) from error
    return ((f"row {number} of {hub}", row) for number, row in enumerate(rows))
