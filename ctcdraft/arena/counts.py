"""evaluations/NAME/counts.json: tokens, passes and seconds of every row, question by question. It judges nobody.

All that a verdict rests on, in a hundredth of the room that the answers take, and without a word of them: it is kept
where prompts and answers, being other people's, are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ctcdraft.arena.book import Book, Entry
from ctcdraft.arena.reports import rows_of
from ctcdraft.errors import InputError
from ctcdraft.evaluation.differences import Sums
from ctcdraft.evaluation.folder import Folder
from ctcdraft.evaluation.metrics import sides
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay_session import view
from ctcdraft.files import write_text
from ctcdraft.shard import Shard

EVERY = 10**9  # questions
Counts = dict[str, dict[int, Sums]]  # by row name and nodes


def count(book: Book, name: str, entry: Entry) -> None:
    """Writes the counts of a finished evaluation, once."""
    file = book.evaluation(name) / "counts.json"
    if file.is_file():
        return
    made: Counts = {}
    for drafter, nodes, sums in of_answers(book, name, entry):
        made.setdefault(drafter, {})[nodes] = sums
    plain = {drafter: {nodes: given(sums) for nodes, sums in sizes.items()} for drafter, sizes in made.items()}
    write_text(file, json.dumps(plain, separators=(",", ":")) + "\n")


def of_answers(book: Book, name: str, entry: Entry) -> Iterator[tuple[str, int, Sums]]:
    records = Folder(book.evaluation(name), Shard(1, 1)).records(EVERY)
    for row in rows_of(book, name):
        drafter, nodes = row["drafter"], row["nodes"]
        seen = view(records, drafter, nodes) if entry["kind"] == "replay" else records
        # In a timed evaluation autoregression runs beside every size, and is the yardstick of each.
        for size in entry["nodes"] if drafter == AUTOREGRESSIVE else [nodes]:
            yield drafter, size, Sums.of(sides(drafter, seen)[0])


def given(sums: Sums) -> dict[str, list[float]]:
    """The columns there are; seconds to the microsecond."""
    return {key: [round(cell, 6) for cell in column] for key, column in vars(sums).items() if column}


def counted(book: Book, name: str) -> Counts:
    file = book.evaluation(name) / "counts.json"
    try:
        plain = json.loads(file.read_text())
        return {row: {int(size): Sums(**sums) for size, sums in sizes.items()} for row, sizes in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} does not hold what was counted ({error}); measure again (arena.stages=[measure,page])"
        ) from error
