"""Arrow shards of a finished corpus: the lines of all parts as columns, memory-mapped by every process that reads them.

    rows-00000.arrow    a stream of record batches, as the library datasets keeps it: Dataset.from_file opens it

Nothing is parsed at a start, and processes of one machine share the pages. Every line is kept, dropped ones with the
number of its part: the parts can be written again from the shards, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from ctcdraft.corpus.lines import Line
from ctcdraft.corpus.part_files import shard_path
from ctcdraft.io import atomic_write

BATCH_ROWS = 1000  # lines of a record batch, as in datasets
SHARD_BYTES = 500_000_000  # as in datasets
SCHEMA = pa.schema(
    {
        "part": pa.int32(),
        "id": pa.string(),
        "turn": pa.int32(),  # of the first response
        "sample": pa.int32(),
        "category": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "spans": pa.list_(pa.list_(pa.int32(), 3)),  # start, end and whether it ended, of every response
        "cut": pa.int32(),
        "ids": pa.string(),
        "dropped": pa.string(),  # the reason; such a line has no tokens
    }
)


def record_batch(lines: Sequence[tuple[int, Line]]) -> pa.RecordBatch:
    """Return (number of the part, line) pairs as a record batch."""
    columns = {name: [line.get(name) for _, line in lines] for name in SCHEMA.names}
    columns["part"] = [number for number, _ in lines]
    for name in ("id", "category"):  # a category of a file of prompts may be a number, or no valid Unicode
        columns[name] = [str(value).encode(errors="backslashreplace").decode() for value in columns[name]]
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def record_batches(parts: Iterable[Sequence[Line]]) -> Iterator[pa.RecordBatch]:
    held: list[tuple[int, Line]] = []
    for number, lines in enumerate(parts):
        for line in lines:
            held.append((number, line))
            if len(held) == BATCH_ROWS:
                yield record_batch(held)
                held = []
    yield record_batch(held)


def in_memory(parts: Iterable[Sequence[Line]]) -> pa.Table:
    """Return the lines of all parts as a table that is not memory-mapped."""
    return pa.Table.from_batches(record_batches(parts), SCHEMA)


def write_shards(out: Path, parts: Iterable[Sequence[Line]]) -> list[Path]:
    """Write the lines of all parts, of which one is in memory at a time, and return the shards."""
    batches, shards = record_batches(parts), list[Path]()
    waiting: pa.RecordBatch | None = next(batches)

    def write(draft: Path) -> None:
        nonlocal waiting
        size = 0
        with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
            while waiting is not None and size < SHARD_BYTES:
                stream.write_batch(waiting)
                size += waiting.nbytes
                waiting = next(batches, None)

    while waiting is not None:
        shards.append(shard_path(out, len(shards)))
        atomic_write(shards[-1], write)
    return shards


def open_shards(shards: Iterable[Path]) -> pa.Table:
    """Return the shards as one memory-mapped table."""
    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(shard))).read_all() for shard in shards])


def parts_of(table: pa.Table) -> Iterator[tuple[int, list[Line]]]:
    """Yield the number of every part with its lines."""
    lines = (line for batch in table.to_batches() for line in batch.to_pylist())
    for number, part in groupby(lines, lambda line: line["part"]):
        yield number, [part_line(line) for line in part]


def part_line(line: dict[str, Any]) -> Line:
    """Return a row of the table as the line of a part file."""
    keys = ("id", "turn", "sample", "category")
    if line["dropped"] is not None:
        return {key: line[key] for key in (*keys, "dropped")}
    return {key: line[key] for key in (*keys, "tokens", "spans", "cut", "ids")}
