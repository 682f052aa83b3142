"""JSON objects from files (JSON lines or one JSON array, also gzipped) and from the Hugging Face hub.

Files are streamed: only one line, or one chunk of an array, is in memory at a time, so the memory for a file of a
million conversations is that of the ones that are kept. The array scanner is not ijson: its fast backend replaces
unpaired surrogates by "?", which hides the texts that filters.Empties drops, and rejects long integers and NaN.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ctcdraft.errors import InputError, first_line

Paths = str | Sequence[str]
Record = tuple[str, dict[str, Any]]  # (location for error messages, object)

CHUNK_CHARACTERS = 1 << 20  # characters of an array that are decoded at a time
WHITESPACE = re.compile(r"[ \t\r\n]*")


def read_records(path: Paths) -> Iterator[Record]:
    """Yield every JSON object of a file, several files, a glob or a folder."""
    for file in find_files(path):
        for where, entry in read_entries(file):
            if not isinstance(entry, dict):
                raise InputError(f"{where} is a {type(entry).__name__} instead of an object; check corpus.path=")
            yield where, entry


def read_entries(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as packed:
            is_gzip = packed.read(2) == b"\x1f\x8b"  # decided by content, not by name
        opener: Any = gzip.open if is_gzip else open
        with opener(file, "rb") as stream:
            if stream.peek(4).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InputError(f"{file} is UTF-16 instead of UTF-8 text; save it as UTF-8")
            if stream.peek(4).startswith(codecs.BOM_UTF8):
                stream.read(len(codecs.BOM_UTF8))
            first = stream.peek(4096)[:4096].lstrip()[:1]
            yield from read_array(stream, file) if first == b"[" else read_lines(stream, file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {file}: {error}; fetch it again, or check corpus.path=") from error


def read_lines(stream: IO[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    # Bytes are split at newlines only; text would also be split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            where = f"line {number} of {file}"
            try:
                entry = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise InputError(f"{where} is not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise InputError(f"{where} is not JSON ({error}); correct or remove it") from error
            except RecursionError as error:
                raise InputError(f"{where} is nested too deeply to be a conversation; remove it") from error
            yield where, entry


def read_array(stream: IO[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one JSON array, read in chunks."""
    text = codecs.getreader("utf-8")(stream)
    decoder = json.JSONDecoder()
    buffer, number, more = "", 0, True

    def read(size: int) -> str:
        try:
            return text.read(size)
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8 text (near entry {number + 1}); save it as UTF-8") from error

    while not buffer:
        buffer = read(CHUNK_CHARACTERS).lstrip()
    buffer = buffer.removeprefix("[")
    while True:
        at = skip_whitespace(buffer, 0)
        while not buffer.startswith("]", at):
            where = f"entry {number + 1} of {file}"
            try:
                entry, end = decoder.raw_decode(buffer, at)
                end = skip_whitespace(buffer, end)
                if end == len(buffer) and more:
                    break  # the next chunk may continue a number, and begins with the separator
                if buffer[end : end + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' or ']'", buffer, end)
            except json.JSONDecodeError as error:
                # At the end of the buffer it may only be cut by the chunk: it is tried again with twice as much text.
                if more and ("Unterminated" in error.msg or error.pos > len(buffer) - 16):
                    break
                # Without line and column, which count from the beginning of the chunk.
                raise InputError(f"{where} is not JSON ({error.msg}); correct or remove it") from error
            except RecursionError as error:
                raise InputError(f"{where} is nested too deeply to be a conversation; remove it") from error
            number += 1
            yield where, entry
            at = skip_whitespace(buffer, end + 1) if buffer[end] == "," else end
        if buffer.startswith("]", at):
            if (buffer[at + 1 :] + read(CHUNK_CHARACTERS)).strip():
                raise InputError(f"{file} continues after the end of its array; correct it, or write one object a line")
            return
        buffer = buffer[at:]
        added = read(max(CHUNK_CHARACTERS, len(buffer)))
        buffer, more = buffer + added, bool(added)


def skip_whitespace(text: str, start: int) -> int:
    match = WHITESPACE.match(text, start)
    return match.end() if match else start


def get_column(record: dict[str, Any], name: str, kind: type | None, where: str) -> Any:
    """Return a field of a record; raise InputError if it is missing or of another type than `kind`."""
    if name not in record:
        raise InputError(
            f"{where} has no column `{name}` (found: {', '.join(record) or 'nothing'}); "
            "check corpus.path=, or choose the corpus= of this format"
        )
    if kind is not None and not isinstance(record[name], kind):
        actual = type(record[name]).__name__
        raise InputError(f"{where} has a {actual} as `{name}` instead of a {kind.__name__}; correct that line")
    return record[name]


def find_files(path: Paths) -> list[Path]:
    """Return the files of each path, sorted. A folder stands for its .jsonl files, or else for its .json files."""
    files: list[Path] = []
    for one in [path] if isinstance(path, str) else path:
        if not one:  # Path("") is the current folder
            raise InputError("corpus.path= is empty; give a file, a folder or a glob of prompts")
        place = Path(one).expanduser()
        if place.is_dir():
            # Beside shards in .jsonl a .json file is usually a description, such as our own manifest.json.
            json_lines = [*place.glob("*.jsonl"), *place.glob("*.jsonl.gz")]
            matches = json_lines or [*place.glob("*.json"), *place.glob("*.json.gz")]
        else:
            matches = [place] if place.is_file() else [Path(match) for match in glob.glob(str(place))]
        if not matches:
            what = "a folder without .jsonl or .json files" if place.is_dir() else "not there"
            raise InputError(f"{place} is {what}; give a file, a folder or a glob of prompts as corpus.path=")
        files += sorted(matches)
    return files


def read_hub_records(hub: str, split: str = "train", **selection: Any) -> Iterator[Record]:
    """Yield the rows of a data set of the Hugging Face hub, from the local cache if it is there."""
    import datasets  # takes seconds; it memory-maps its cache, so the rows are streamed here too

    try:
        rows = datasets.load_dataset(hub, split=split, **selection)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"cannot get {hub} from the hub ({first_line(error)}); give a local copy as corpus.path=, or go online"
        ) from error
    return ((f"row {number} of {hub}", row) for number, row in enumerate(rows))
