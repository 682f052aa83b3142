"""The evaluations of a comparison, by evaluate.py: passes replayed at every size, and the loop timed at a few. It knows
words and places; what comes out it leaves to evaluate.py's own reports.

evaluations/NAME/counts.json: tokens, passes and seconds of every row, question by question. It judges nobody.

All that a verdict rests on, in a hundredth of the room that the answers take, and without a word of them: it is kept
where prompts and answers, being other people's, are not.

The rows of finished evaluations, those that may be printed. It knows report.json, nothing of how it came about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation.differences import Sums
from ctcdraft.evaluation.metrics import sides
from ctcdraft.evaluation.output_dir import Folder
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay_evaluation import view
from ctcdraft.io import write_text
from studies.comparison.config import Rules
from studies.comparison.store import EVALUATIONS, TRAINING, Book, Entry, run

Row = dict[str, Any]


def row_name(run: str, reading: str | None) -> str:
    """What a run is called that is read in another way than its own: ctc@collapse"""
    return run if reading is None else f"{run}@{reading}"


def draft_seconds(row: Row) -> float | None:
    """Of a draft and the building of its tree; None where nothing was timed."""
    return None if row["time"]["draft"] is None else row["time"]["draft"] + row["time"]["tree"]


def rows_of(book: Book, evaluation: str) -> list[Row]:
    file = book.evaluation(evaluation) / "report.json"
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is no report of evaluate.py; remove its folder, and it is measured again") from error


def certified(row: Row) -> bool:
    """Whether its text was compared with autoregression's, and nothing in it is wrong."""
    lossless = row["lossless"]
    return bool(lossless["prompts"]) and lossless["equal"] is not None and not lossless["owed"]["wrong"]


def all_rows(book: Book) -> list[Row]:
    """With the evaluation's own name and kind in each."""
    return [
        {**row, "evaluation": name, "kind": entry["kind"]}
        for name, entry in book.read(EVALUATIONS).items()
        for row in rows_of(book, name)
    ]


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


@dataclass(frozen=True)
class Evaluation:
    """name: of its folder. words: of evaluate.py, all but where it goes to."""

    name: str
    kind: str  # replay or loop
    benchmark: str
    temperature: float
    nodes: tuple[int, ...]
    words: tuple[str, ...]


def measure_all(rules: Rules, book: Book) -> None:
    """Every evaluation that is not there yet; one that was interrupted goes on."""
    for one in evaluations(rules, book):
        words = [*one.words, f"out={book.evaluation(one.name)}"]
        if not book.evaluated(one.name, words):
            took = run("evaluate.py", words, book.log(one.name))
            entry = {"words": words, "kind": one.kind, "benchmark": one.benchmark, "temperature": one.temperature}
            entry |= {"nodes": list(one.nodes), "group": rules.group, "wall_seconds": round(took.wall, 1)}
            book.add(EVALUATIONS, one.name, entry)
        count(book, one.name, book.read(EVALUATIONS)[one.name])


def evaluations(rules: Rules, book: Book) -> Iterator[Evaluation]:
    """Greedy, the heads of all arms; at other temperatures and with clocks those of the arms that the rules name, and
    with clocks the first seed's alone."""
    timed = [*contestants(rules, book, rules.timing.arms, first_seed=True), *rules.timing.others]
    for benchmark, asked in rules.benchmarks.items():
        for temperature in rules.replay.temperatures:
            heads = contestants(rules, book, rules.arms if temperature == 0 else rules.replay.sampled)
            how = [
                *drawn(temperature), "measure=replay", f"measure.nodes={listed(rules.replay.nodes)}",
                f"measure.checked={rules.replay.checked}",
            ]  # fmt: skip
            words = (*rules.base, *asked, *rules.evaluate, *how, among([*heads, *inside(rules.timing.others)]))
            name = f"{rules.group}-{benchmark}-replay-T{temperature:g}"
            yield Evaluation(name, "replay", benchmark, temperature, rules.replay.nodes, words)
        for nodes in rules.timing.nodes:
            how = [f"decoding.nodes={nodes}", *rules.timing.words]
            words = (*rules.base, *asked, *rules.evaluate, *how, among(timed))
            yield Evaluation(f"{rules.group}-{benchmark}-loop-{nodes}", "loop", benchmark, 0.0, (nodes,), words)


def contestants(rules: Rules, book: Book, arms: Sequence[str], first_seed: bool = False) -> list[str]:
    """Run directories, with every reading of each; a head that two arms share is asked once."""
    found: dict[str, None] = {}
    for name, entry in book.read(TRAINING).items():
        entrant = rules.entrants.get(entry["entrant"])
        if entrant is None or entry["arm"] not in arms or (first_seed and entry["seed"] != rules.seed):
            continue
        for reading in entrant.readings:
            found[row_name(str(book.run(entry["same_as"] or name)), reading)] = None
    return list(found)


def inside(others: Sequence[str]) -> list[str]:
    """Those that our loop drafts for: other people's code cannot be replayed."""
    return [one for one in others if "transformers_" not in one]


def drawn(temperature: float) -> list[str]:
    if temperature == 0:
        return ["decoding=greedy"]
    return ["decoding=sampling", f"decoding.temperature={temperature:g}"]


def listed(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def among(names: Sequence[str]) -> str:
    return f"contestants=[{','.join(names)}]"
