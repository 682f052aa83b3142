"""The evaluations of a comparison by evaluate.py, their rows, and the counts behind them.

An evaluation is either a replay (tau of every tree size) or a timed loop at a few sizes.
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
    """Return the drafter name of a head with another tree than its own: ctc@collapse"""
    return run if reading is None else f"{run}@{reading}"


def draft_milliseconds(row: Row) -> float | None:
    """Return the time of a draft with its tree building; None where nothing was timed."""
    return None if row["time"]["draft"] is None else 1e3 * (row["time"]["draft"] + row["time"]["tree"])


def evaluation_rows(store: ResultStore, evaluation: str) -> list[Row]:
    file = store.evaluation_folder(evaluation) / "report.json"
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is not a report of evaluate.py; remove its folder to measure it again") from error


def passed_check(row: Row) -> bool:
    lossless = row["lossless"]  # a row that was not compared has not passed
    return bool(lossless["prompts"]) and lossless["equal"] is not None and not lossless["owed"]["wrong"]


def all_rows(store: ResultStore) -> list[Row]:
    """Return the rows of all evaluations, each with the name and kind of its evaluation."""
    return [
        {**row, "evaluation": name, "kind": entry["kind"]}
        for name, entry in store.read(EVALUATIONS).items()
        for row in evaluation_rows(store, name)
    ]


# Tokens, steps and seconds of every row by question: what paired intervals need, in a hundredth of the size of the
# responses and without their text, which may not be published with other people's prompts.
COUNTS_FILE = "counts.json"
ALL_QUESTIONS = 10**9
SumsByRow = dict[str, dict[int, QuestionSums]]  # by row name and nodes


def write_counts(store: ResultStore, name: str, entry: Entry) -> None:
    """Write the counts of a finished evaluation, unless the file already holds them."""
    rows = evaluation_rows(store, name)
    if counts_match(rows, read_counts(store, name)):
        return
    counts: SumsByRow = {}
    for drafter, nodes, sums in sums_of_answers(store, name, entry, rows):
        counts.setdefault(drafter, {})[nodes] = sums
    if not counts_match(rows, counts):
        raise InputError(
            f"the responses in {store.evaluation_folder(name)} are not those of its report.json; remove the folder to "
            "have it measured again"
        )
    plain = {drafter: {nodes: plain_sums(sums) for nodes, sums in sizes.items()} for drafter, sizes in counts.items()}
    write_text(store.evaluation_folder(name) / COUNTS_FILE, json.dumps(plain, separators=(",", ":")) + "\n")


def counts_match(rows: Sequence[Row], counts: SumsByRow) -> bool:
    """Return whether the counts sum to the totals in the rows of the report."""

    def matches(row: Row) -> bool:
        totals = [row[key] for key in ("prompts", "tokens", "passes")]
        sums = [counts[row["drafter"]][size] for size in row_sizes(row, counts)]
        return bool(sums) and all([len(one.passes), sum(one.committed), sum(one.passes)] == totals for one in sums)

    return all(map(matches, rows))


def row_sizes(row: Row, counts: SumsByRow) -> list[int]:
    # The baseline has no tree: its one row counts for every size.
    return [size for size in counts.get(row["drafter"], {}) if row["drafter"] == AUTOREGRESSIVE or size == row["nodes"]]


def sums_of_answers(
    store: ResultStore, name: str, entry: Entry, rows: Sequence[Row]
) -> Iterator[tuple[str, int, QuestionSums]]:
    records = OutputDir(store.evaluation_folder(name), Shard(1, 1)).records(ALL_QUESTIONS)
    for row in rows:
        drafter, nodes = row["drafter"], row["nodes"]
        own = records_at_size(records, drafter, nodes) if entry["kind"] == "replay" else records
        for size in entry["nodes"] if drafter == AUTOREGRESSIVE else [nodes]:
            yield drafter, size, QuestionSums.from_questions(paired_answers(drafter, own)[0])


def plain_sums(sums: QuestionSums) -> dict[str, list[float]]:
    # To the microsecond: all digits of a float would make the file larger and no interval better.
    return {key: [round(cell, 6) for cell in column] for key, column in vars(sums).items() if column}


def checked_counts(store: ResultStore, name: str, rows: Sequence[Row]) -> SumsByRow:
    """Return the stored counts. Raises InputError if they are not those of the report beside them."""
    counts = read_counts(store, name)
    if not counts_match(rows, counts):
        raise InputError(
            f"{store.evaluation_folder(name) / COUNTS_FILE} does not match the report.json beside it; count again with "
            "arena.stages=[measure,page]"
        )
    return counts


def read_counts(store: ResultStore, name: str) -> SumsByRow:
    """Return the stored counts; nothing where the file is missing or damaged."""
    try:
        plain = json.loads((store.evaluation_folder(name) / COUNTS_FILE).read_text())
        return {row: {int(size): QuestionSums(**sums) for size, sums in sizes.items()} for row, sizes in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@dataclass(frozen=True)
class EvaluationSpec:
    """An evaluation to run: the name of its folder, and the overrides of evaluate.py except `out=`."""

    name: str
    kind: str  # replay or loop
    benchmark: str
    temperature: float
    nodes: tuple[int, ...]
    overrides: tuple[str, ...]


def run_evaluations(config: ComparisonConfig, store: ResultStore) -> None:
    """Run every missing evaluation; an interrupted one continues."""
    for one in evaluation_specs(config, store):
        overrides = [*one.overrides, f"out={store.evaluation_folder(one.name)}"]
        if store.find_evaluated(one.name, overrides) is None:
            run_time = run_script("evaluate.py", overrides, store.log_file(one.name))
            spec = {key: getattr(one, key) for key in ("kind", "benchmark", "temperature", "nodes")}
            entry = {"overrides": overrides, **spec, "group": config.group, "wall_seconds": round(run_time.wall, 1)}
            store.add(EVALUATIONS, one.name, entry)
        # Also of an evaluation that was interrupted between its report and its counts.
        write_counts(store, one.name, store.read(EVALUATIONS)[one.name])


def evaluation_specs(config: ComparisonConfig, store: ResultStore) -> Iterator[EvaluationSpec]:
    """Yield greedy replays of the heads of all arms, sampled replays and timed loops of those in the named arms."""
    # Of the timed heads only the first seed: a loop decodes every response again, a replay none but the checked ones.
    timed = [*contestant_names(config, store, config.timing.arms, first_seed=True), *config.timing.others]
    for benchmark, benchmark_overrides in config.benchmarks.items():
        shared = (*config.base, *benchmark_overrides, *config.evaluate)
        for temperature in config.replay.temperatures:
            heads = contestant_names(config, store, config.arms if temperature == 0 else config.replay.sampled)
            # transformers' own generation does not run in our decoding loop, so it cannot be replayed.
            heads += [one for one in config.timing.others if "transformers_" not in one]
            decoding = ["sampling", f"decoding.temperature={temperature:g}"] if temperature else ["greedy"]
            sizes = f"measure.nodes=[{','.join(map(str, config.replay.nodes))}]"
            how = [f"decoding={decoding[0]}", *decoding[1:], "measure=replay", sizes]
            overrides = (*shared, *how, f"measure.checked={config.replay.checked}", f"contestants=[{','.join(heads)}]")
            name = f"{config.group}-{benchmark}-replay-T{temperature:g}"
            yield EvaluationSpec(name, "replay", benchmark, temperature, config.replay.nodes, overrides)
        for nodes in config.timing.nodes:
            how = [f"decoding.nodes={nodes}", *config.timing.overrides, f"contestants=[{','.join(timed)}]"]
            name = f"{config.group}-{benchmark}-loop-{nodes}"
            yield EvaluationSpec(name, "loop", benchmark, 0.0, (nodes,), (*shared, *how))


def contestant_names(
    config: ComparisonConfig, store: ResultStore, arms: Sequence[str], first_seed: bool = False
) -> list[str]:
    """Return the run directories of the arms' heads with every reading of each; shared heads stand once."""
    names: dict[str, None] = {}
    for name, entry in store.read(TRAINING).items():
        method = config.entrants.get(entry["entrant"])
        if method is None or entry["arm"] not in arms or (first_seed and entry["seed"] != config.seed):
            continue
        for reading in method.readings:
            names[row_name(str(store.run_folder(entry["same_as"] or name)), reading)] = None
    return list(names)
