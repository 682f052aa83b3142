"""evaluations/NAME/counts.json: tokens, passes and seconds of every row, question by question. It judges nobody.

All that a verdict rests on, in a hundredth of the room that the answers take, and without a word of them: it is kept
where prompts and answers, being other people's, are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ctcdraft.arena.book import Book, Entry
from ctcdraft.arena.reports import Row, rows_of
from ctcdraft.errors import InputError
from ctcdraft.evaluation.differences import Sums
from ctcdraft.evaluation.folder import Folder
from ctcdraft.evaluation.metrics import sides
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay_session import view
from ctcdraft.files import write_text
from ctcdraft.shard import Shard

COUNTS = "counts.json"
EVERY = 10**9  # questions
Counts = dict[str, dict[int, Sums]]  # by row name and nodes


def count(book: Book, name: str, entry: Entry) -> None:
    """Writes the counts of a finished evaluation, where they are not there or are those of an earlier one."""
    rows = rows_of(book, name)
    if agree(rows, read(book, name)):
        return
    made: Counts = {}
    for drafter, nodes, sums in of_answers(book, name, entry, rows):
        made.setdefault(drafter, {})[nodes] = sums
    if not agree(rows, made):
        raise InputError(
            f"{book.evaluation(name)} holds other answers than its report.json tells of; remove it, and it is measured "
            "again"
        )
    plain = {drafter: {nodes: given(sums) for nodes, sums in sizes.items()} for drafter, sizes in made.items()}
    write_text(book.evaluation(name) / COUNTS, json.dumps(plain, separators=(",", ":")) + "\n")


def agree(rows: Sequence[Row], counts: Counts) -> bool:
    """Whether these are what the rows of the report say in sum."""

    def right(row: Row) -> bool:
        several = [counts[row["drafter"]][size] for size in sizes_of(row, counts)]
        told = [row[key] for key in ("prompts", "tokens", "passes")]
        return all([len(one.passes), sum(one.committed), sum(one.passes)] == told for one in several)

    return all(sizes_of(row, counts) and right(row) for row in rows)


def sizes_of(row: Row, counts: Counts) -> list[int]:
    """Those that this row counts for: autoregression runs beside every size, and is the yardstick of each."""
    there = counts.get(row["drafter"], {})
    return [size for size in there if row["drafter"] == AUTOREGRESSIVE or size == row["nodes"]]


def of_answers(book: Book, name: str, entry: Entry, rows: Sequence[Row]) -> Iterator[tuple[str, int, Sums]]:
    records = Folder(book.evaluation(name), Shard(1, 1)).records(EVERY)
    for row in rows:
        drafter, nodes = row["drafter"], row["nodes"]
        seen = view(records, drafter, nodes) if entry["kind"] == "replay" else records
        for size in entry["nodes"] if drafter == AUTOREGRESSIVE else [nodes]:
            yield drafter, size, Sums.of(sides(drafter, seen)[0])


def given(sums: Sums) -> dict[str, list[float]]:
    """The columns there are; seconds to the microsecond."""
    return {key: [round(cell, 6) for cell in column] for key, column in vars(sums).items() if column}


def counted(book: Book, name: str, rows: Sequence[Row]) -> Counts:
    """What `count` wrote; raises InputError where it does not belong to these rows of the report beside it."""
    counts = read(book, name)
    if not agree(rows, counts):
        raise InputError(
            f"{book.evaluation(name) / COUNTS} does not hold what its report.json tells of; count again with "
            "arena.stages=[measure,page]"
        )
    return counts


def read(book: Book, name: str) -> Counts:
    """Empty where there are none that can be read."""
    try:
        plain = json.loads((book.evaluation(name) / COUNTS).read_text())
        return {row: {int(size): Sums(**sums) for size, sums in sizes.items()} for row, sizes in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
