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
from ctcdraft.evaluation.bootstrap import QuestionSums
from ctcdraft.evaluation.metrics import paired_answers
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.evaluation import records_at_size
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


def evaluation_rows(store: ResultStore, evaluation: str) -> list[Row]:
    file = store.evaluation_folder(evaluation) / "report.json"
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is no report of evaluate.py; remove its folder, and it is measured again") from error


def passed_check(row: Row) -> bool:
    """Whether its text was compared with autoregression's, and nothing in it is wrong."""
    lossless = row["lossless"]
    return bool(lossless["prompts"]) and lossless["equal"] is not None and not lossless["owed"]["wrong"]


def all_rows(store: ResultStore) -> list[Row]:
    """With the evaluation's own name and kind in each."""
    return [
        {**row, "evaluation": name, "kind": entry["kind"]}
        for name, entry in store.read(EVALUATIONS).items()
        for row in evaluation_rows(store, name)
    ]


COUNTS_FILE = "counts.json"
ALL_QUESTIONS = 10**9  # questions
SumsByRow = dict[str, dict[int, QuestionSums]]  # by row name and nodes


def write_counts(store: ResultStore, name: str, entry: Entry) -> None:
    """Writes the counts of a finished evaluation, where they are not there or are those of an earlier one."""
    rows = evaluation_rows(store, name)
    if counts_match(rows, read_counts(store, name)):
        return
    made: SumsByRow = {}
    for drafter, nodes, sums in sums_of_answers(store, name, entry, rows):
        made.setdefault(drafter, {})[nodes] = sums
    if not counts_match(rows, made):
        raise InputError(
            f"{store.evaluation_folder(name)} holds other answers than its report.json tells of; remove it, and it "
            "is measured "
            "again"
        )
    plain = {drafter: {nodes: plain_sums(sums) for nodes, sums in sizes.items()} for drafter, sizes in made.items()}
    write_text(store.evaluation_folder(name) / COUNTS_FILE, json.dumps(plain, separators=(",", ":")) + "\n")


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


def sums_of_answers(
    store: ResultStore, name: str, entry: Entry, rows: Sequence[Row]
) -> Iterator[tuple[str, int, QuestionSums]]:
    records = OutputDir(store.evaluation_folder(name), Shard(1, 1)).records(ALL_QUESTIONS)
    for row in rows:
        drafter, nodes = row["drafter"], row["nodes"]
        seen = records_at_size(records, drafter, nodes) if entry["kind"] == "replay" else records
        for size in entry["nodes"] if drafter == AUTOREGRESSIVE else [nodes]:
            yield drafter, size, QuestionSums.from_questions(paired_answers(drafter, seen)[0])


def plain_sums(sums: QuestionSums) -> dict[str, list[float]]:
    """The columns there are; seconds to the microsecond."""
    return {key: [round(cell, 6) for cell in column] for key, column in vars(sums).items() if column}


def checked_counts(store: ResultStore, name: str, rows: Sequence[Row]) -> SumsByRow:
    """What `count` wrote; raises InputError where it does not belong to these rows of the report beside it."""
    counts = read_counts(store, name)
    if not counts_match(rows, counts):
        raise InputError(
            f"{store.evaluation_folder(name) / COUNTS_FILE} does not hold what its report.json tells of; count again "
            "with "
            "arena.stages=[measure,page]"
        )
    return counts


def read_counts(store: ResultStore, name: str) -> SumsByRow:
    """Empty where there are none that can be read."""
    try:
        plain = json.loads((store.evaluation_folder(name) / COUNTS_FILE).read_text())
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


def run_evaluations(config: ComparisonConfig, store: ResultStore) -> None:
    """Every evaluation that is not there yet; one that was interrupted goes on."""
    for one in evaluation_specs(config, store):
        overrides = [*one.words, f"out={store.evaluation_folder(one.name)}"]
        if not store.is_evaluated(one.name, overrides):
            took = run_script("evaluate.py", overrides, store.log_file(one.name))
            entry = {"words": overrides, "kind": one.kind, "benchmark": one.benchmark, "temperature": one.temperature}
            entry |= {"nodes": list(one.nodes), "group": config.group, "wall_seconds": round(took.wall, 1)}
            store.add(EVALUATIONS, one.name, entry)
        write_counts(store, one.name, store.read(EVALUATIONS)[one.name])


def evaluation_specs(config: ComparisonConfig, store: ResultStore) -> Iterator[EvaluationSpec]:
    """Greedy, the heads of all arms; at other temperatures and with clocks those of the arms that the rules name, and
    with clocks the first seed's alone."""
    timed = [*contestant_names(config, store, config.timing.arms, first_seed=True), *config.timing.others]
    for benchmark, benchmark_overrides in config.benchmarks.items():
        for temperature in config.replay.temperatures:
            heads = contestant_names(config, store, config.arms if temperature == 0 else config.replay.sampled)
            how = [
                *decoding_overrides(temperature), "measure=replay", f"measure.nodes={hydra_list(config.replay.nodes)}",
                f"measure.checked={config.replay.checked}",
            ]  # fmt: skip
            overrides = (
                *config.base,
                *benchmark_overrides,
                *config.evaluate,
                *how,
                contestants_override([*heads, *replayable(config.timing.others)]),
            )
            name = f"{config.group}-{benchmark}-replay-T{temperature:g}"
            yield EvaluationSpec(name, "replay", benchmark, temperature, config.replay.nodes, overrides)
        for nodes in config.timing.nodes:
            how = [f"decoding.nodes={nodes}", *config.timing.words]
            overrides = (*config.base, *benchmark_overrides, *config.evaluate, *how, contestants_override(timed))
            yield EvaluationSpec(
                f"{config.group}-{benchmark}-loop-{nodes}", "loop", benchmark, 0.0, (nodes,), overrides
            )


def contestant_names(
    config: ComparisonConfig, store: ResultStore, arms: Sequence[str], first_seed: bool = False
) -> list[str]:
    """Run directories, with every reading of each; a head that two arms share is asked once."""
    found: dict[str, None] = {}
    for name, entry in store.read(TRAINING).items():
        entrant = config.entrants.get(entry["entrant"])
        if entrant is None or entry["arm"] not in arms or (first_seed and entry["seed"] != config.seed):
            continue
        for reading in entrant.readings:
            found[row_name(str(store.run_folder(entry["same_as"] or name)), reading)] = None
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
