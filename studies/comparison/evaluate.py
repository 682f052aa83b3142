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
from ctcdraft.evaluation.differences import QuestionSums
from ctcdraft.evaluation.metrics import paired_answers
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay_evaluation import records_at_size
from ctcdraft.io import write_text
from studies.comparison.config import ComparisonConfig
from studies.comparison.store import EVALUATIONS, TRAINING, Entry, ResultStore, run_script

Row = dict[str, Any]


def row_name(run: str, reading: str | None) -> str:
    """What a run is called that is read in another way than its own: ctc@collapse"""
    return run if reading is None else f"{run}@{reading}"


def draft_seconds(row: Row) -> float | None:
    """Of a draft and the building of its tree; None where nothing was timed."""
    return None if row["time"]["draft"] is None else row["time"]["draft"] + row["time"]["tree"]


def evaluation_rows(book: ResultStore, evaluation: str) -> list[Row]:
    file = book.evaluation(evaluation) / "report.json"
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is no report of evaluate.py; remove its folder, and it is measured again") from error


def passed_check(row: Row) -> bool:
    """Whether its text was compared with autoregression's, and nothing in it is wrong."""
    lossless = row["lossless"]
    return bool(lossless["prompts"]) and lossless["equal"] is not None and not lossless["owed"]["wrong"]


def all_rows(book: ResultStore) -> list[Row]:
    """With the evaluation's own name and kind in each."""
    return [
        {**row, "evaluation": name, "kind": entry["kind"]}
        for name, entry in book.read(EVALUATIONS).items()
        for row in evaluation_rows(book, name)
    ]


COUNTS_FILE = "counts.json"
ALL_QUESTIONS = 10**9  # questions
SumsByRow = dict[str, dict[int, QuestionSums]]  # by row name and nodes


def write_counts(book: ResultStore, name: str, entry: Entry) -> None:
    """Writes the counts of a finished evaluation, where they are not there or are those of an earlier one."""
    rows = evaluation_rows(book, name)
    if counts_match(rows, read_counts(book, name)):
        return
    made: SumsByRow = {}
    for drafter, nodes, sums in sums_of_answers(book, name, entry, rows):
        made.setdefault(drafter, {})[nodes] = sums
    if not counts_match(rows, made):
        raise InputError(
            f"{book.evaluation(name)} holds other answers than its report.json tells of; remove it, and it is measured "
            "again"
        )
    plain = {drafter: {nodes: plain_sums(sums) for nodes, sums in sizes.items()} for drafter, sizes in made.items()}
    write_text(book.evaluation(name) / COUNTS_FILE, json.dumps(plain, separators=(",", ":")) + "\n")


def counts_match(rows: Sequence[Row], counts: SumsByRow) -> bool:
    """Whether these are what the rows of the report say in sum."""

    def right(row: Row) -> bool:
        several = [counts[row["drafter"]][size] for size in row_sizes(row, counts)]
        told = [row[key] for key in ("prompts", "tokens", "passes")]
        return all([len(one.passes), sum(one.committed), sum(one.passes)] == told for one in several)

    return all(row_sizes(row, counts) and right(row) for row in rows)


def row_sizes(row: Row, counts: SumsByRow) -> list[int]:
    """Those that this row counts for: autoregression runs beside every size, and is the yardstick of each."""
    there = counts.get(row["drafter"], {})
    return [size for size in there if row["drafter"] == AUTOREGRESSIVE or size == row["nodes"]]


def sums_of_answers(book: ResultStore, name: str, entry: Entry, rows: Sequence[Row]) -> Iterator[tuple[str, int, QuestionSums]]:
    records = OutputDir(book.evaluation(name), Shard(1, 1)).records(ALL_QUESTIONS)
    for row in rows:
        drafter, nodes = row["drafter"], row["nodes"]
        seen = records_at_size(records, drafter, nodes) if entry["kind"] == "replay" else records
        for size in entry["nodes"] if drafter == AUTOREGRESSIVE else [nodes]:
            yield drafter, size, QuestionSums.of(paired_answers(drafter, seen)[0])


def plain_sums(sums: QuestionSums) -> dict[str, list[float]]:
    """The columns there are; seconds to the microsecond."""
    return {key: [round(cell, 6) for cell in column] for key, column in vars(sums).items() if column}


def checked_counts(book: ResultStore, name: str, rows: Sequence[Row]) -> SumsByRow:
    """What `count` wrote; raises InputError where it does not belong to these rows of the report beside it."""
    counts = read_counts(book, name)
    if not counts_match(rows, counts):
        raise InputError(
            f"{book.evaluation(name) / COUNTS_FILE} does not hold what its report.json tells of; count again with "
            "arena.stages=[measure,page]"
        )
    return counts


def read_counts(book: ResultStore, name: str) -> SumsByRow:
    """Empty where there are none that can be read."""
    try:
        plain = json.loads((book.evaluation(name) / COUNTS_FILE).read_text())
        return {row: {int(size): QuestionSums(**sums) for size, sums in sizes.items()} for row, sizes in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@dataclass(frozen=True)
class EvaluationSpec:
    """name: of its folder. words: of evaluate.py, all but where it goes to."""

    name: str
    kind: str  # replay or loop
    benchmark: str
    temperature: float
    nodes: tuple[int, ...]
    words: tuple[str, ...]


def run_evaluations(rules: ComparisonConfig, book: ResultStore) -> None:
    """Every evaluation that is not there yet; one that was interrupted goes on."""
    for one in evaluation_specs(rules, book):
        words = [*one.words, f"out={book.evaluation(one.name)}"]
        if not book.evaluated(one.name, words):
            took = run_script("evaluate.py", words, book.log(one.name))
            entry = {"words": words, "kind": one.kind, "benchmark": one.benchmark, "temperature": one.temperature}
            entry |= {"nodes": list(one.nodes), "group": rules.group, "wall_seconds": round(took.wall, 1)}
            book.add(EVALUATIONS, one.name, entry)
        write_counts(book, one.name, book.read(EVALUATIONS)[one.name])


def evaluation_specs(rules: ComparisonConfig, book: ResultStore) -> Iterator[EvaluationSpec]:
    """Greedy, the heads of all arms; at other temperatures and with clocks those of the arms that the rules name, and
    with clocks the first seed's alone."""
    timed = [*contestant_names(rules, book, rules.timing.arms, first_seed=True), *rules.timing.others]
    for benchmark, asked in rules.benchmarks.items():
        for temperature in rules.replay.temperatures:
            heads = contestant_names(rules, book, rules.arms if temperature == 0 else rules.replay.sampled)
            how = [
                *decoding_overrides(temperature), "measure=replay", f"measure.nodes={hydra_list(rules.replay.nodes)}",
                f"measure.checked={rules.replay.checked}",
            ]  # fmt: skip
            words = (*rules.base, *asked, *rules.evaluate, *how, contestants_override([*heads, *replayable(rules.timing.others)]))
            name = f"{rules.group}-{benchmark}-replay-T{temperature:g}"
            yield EvaluationSpec(name, "replay", benchmark, temperature, rules.replay.nodes, words)
        for nodes in rules.timing.nodes:
            how = [f"decoding.nodes={nodes}", *rules.timing.words]
            words = (*rules.base, *asked, *rules.evaluate, *how, contestants_override(timed))
            yield EvaluationSpec(f"{rules.group}-{benchmark}-loop-{nodes}", "loop", benchmark, 0.0, (nodes,), words)


def contestant_names(rules: ComparisonConfig, book: ResultStore, arms: Sequence[str], first_seed: bool = False) -> list[str]:
    """Run directories, with every reading of each; a head that two arms share is asked once."""
    found: dict[str, None] = {}
    for name, entry in book.read(TRAINING).items():
        entrant = rules.entrants.get(entry["entrant"])
        if entrant is None or entry["arm"] not in arms or (first_seed and entry["seed"] != rules.seed):
            continue
        for reading in entrant.readings:
            found[row_name(str(book.run(entry["same_as"] or name)), reading)] = None
    return list(found)


def replayable(others: Sequence[str]) -> list[str]:
    """Those that our loop drafts for: other people's code cannot be replayed."""
    return [one for one in others if "transformers_" not in one]


def decoding_overrides(temperature: float) -> list[str]:
    if temperature == 0:
        return ["decoding=greedy"]
    return ["decoding=sampling", f"decoding.temperature={temperature:g}"]


def hydra_list(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def contestants_override(names: Sequence[str]) -> str:
    return f"contestants=[{','.join(names)}]"
