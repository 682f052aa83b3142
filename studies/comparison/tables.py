"""Tables of a comparison's page, from the rows of its evaluations, its trained heads and its statistics.

A line of a table is a method with its replayed rows by tree size and its timed rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

from ctcdraft.report.tables import (
    Columns,
    equal_cell,
    format_difference,
    format_number,
    format_with_interval,
    markdown_table,
)
from studies.comparison.config import ComparisonConfig
from studies.comparison.evaluate import Row, all_rows, draft_milliseconds, passed_check, row_name
from studies.comparison.statistics import row_names
from studies.comparison.store import MATCHING, TRAINING, VERDICT, Entry, ResultStore


@dataclass(frozen=True)
class ComparisonData:
    """Everything a page is made of."""

    training: Mapping[str, Entry]
    matching: Mapping[str, Any]
    verdict: Mapping[str, Any]
    rows: Sequence[Row]
    refused: Sequence[Row]  # failed the losslessness check

    @classmethod
    def of(cls, store: ResultStore) -> ComparisonData:
        rows = all_rows(store)
        passed, refused = ([row for row in rows if passed_check(row) == wanted] for wanted in (True, False))
        return cls(store.read(TRAINING), store.read(MATCHING), store.read(VERDICT), passed, refused)

    def row(self, kind: str, benchmark: str, temperature: float, drafter: str, nodes: int) -> Row | None:
        wanted = (kind, benchmark, temperature, drafter, nodes)
        keys = ("kind", "benchmark", "temperature", "drafter", "nodes")
        return next((row for row in self.rows if tuple(row[key] for key in keys) == wanted), None)


def trained_lines(config: ComparisonConfig, data: ComparisonData, arm: str, benchmark: str) -> Iterator[Row]:
    """Yield a line per head of an arm's first seed and reading."""
    reference = data.training.get(config.reference)
    for name, entry in data.training.items():
        if entry["arm"] != arm or entry["seed"] != config.seed:
            continue
        ratio = entry["parameters"] / reference["parameters"] if reference else None
        for reading in entry["readings"]:
            # A head that the arm did not change was evaluated once, under the name it has at equal steps.
            line = measured_rows(config, data, benchmark, row_name(entry["same_as"] or name, reading))
            if line is not None:
                yield {**line, "drafter": row_name(name, reading), "entry": entry, "ratio": ratio}


def untrained_lines(config: ComparisonConfig, data: ComparisonData, benchmark: str) -> Iterator[Row]:
    """Yield a line per method without training: the baseline, prompt lookup, transformers' own generation."""
    heads = {entry["same_as"] or name for name, entry in data.training.items()}
    names = dict.fromkeys(row["drafter"] for row in data.rows if row["drafter"].partition("@")[0] not in heads)
    for name in names:
        if (line := measured_rows(config, data, benchmark, name)) is not None:
            yield {**line, "drafter": name, "entry": None, "ratio": None}


def runs_by_method(data: ComparisonData, arm: str) -> dict[str, list[str]]:
    """Return the runs of an arm, one per seed, by method."""
    # From the files, because the config of a grid names its last cell alone.
    runs: dict[str, list[str]] = {}
    for name, entry in data.training.items():
        if entry["arm"] == arm:
            runs.setdefault(entry["entrant"], []).append(name)
    return runs


def measured_rows(config: ComparisonConfig, data: ComparisonData, benchmark: str, drafter: str) -> Row | None:
    """Return a drafter's greedy rows, replayed and timed, by tree size; None where there are none."""
    replays = {nodes: data.row("replay", benchmark, 0.0, drafter, nodes) for nodes in config.replay.nodes}
    loops = {nodes: data.row("loop", benchmark, 0.0, drafter, nodes) for nodes in config.timing.nodes}
    return {"replay": replays, "loop": loops} if any([*replays.values(), *loops.values()]) else None


def tau_by_nodes(config: ComparisonConfig, data: ComparisonData) -> dict[str, list[tuple[float, float]]]:
    benchmark = next(iter(config.benchmarks))
    lines = [*trained_lines(config, data, config.arms[0], benchmark), *untrained_lines(config, data, benchmark)]
    points = {
        line["drafter"]: [(nodes, row["tau"]) for nodes, row in line["replay"].items() if row and row["tau"]]
        for line in lines
    }
    return {name: curve for name, curve in points.items() if curve}


def tau_by_draft_time(config: ComparisonConfig, data: ComparisonData) -> list[tuple[str, float, float]]:
    """Return (name, milliseconds of a draft, tau) of every timed line at the first timed size."""
    benchmark = next(iter(config.benchmarks))
    points: dict[tuple[str, float, float], None] = {}  # a head that two arms share is drawn once
    for arm in config.timing.arms if config.timing.nodes else ():
        for line in trained_lines(config, data, arm, benchmark):
            row = line["loop"][config.timing.nodes[0]]
            if row is not None and (milliseconds := draft_milliseconds(row)) is not None:
                points[line["drafter"], milliseconds, row["tau"]] = None
    return list(points)


def arm_columns(config: ComparisonConfig) -> Columns:
    """Return the columns of an arm's table: training, tau by tree size, then what was timed."""

    def entry(key: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["entry"] is None or line["entry"][key] is None else form(line["entry"][key])

    def tau(nodes: int) -> Callable[[Row], str]:
        def cell(line: Row) -> str:
            row = line["replay"].get(nodes) or line["loop"].get(nodes)
            return "-" if row is None else format_with_interval(row["tau"], row["tau_ci"])

        return cell

    def timed(nodes: int, form: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["loop"][nodes] is None else form(line["loop"][nodes])

    columns: Columns = {
        "drafter": itemgetter("drafter"),
        "parameters": entry("parameters", lambda value: f"{value:,}"),
        "of reference": lambda line: format_number(line["ratio"]),
        "steps": entry("steps", lambda value: f"{value:,}"),
        "train s": entry("seconds", lambda value: f"{value[config.clock]:.0f}" if config.clock in value else "-"),
        "learning rate": entry("learning_rate", lambda value: f"{value:g}"),
    }
    columns |= {f"tau, {nodes}": tau(nodes) for nodes in dict.fromkeys((*config.replay.nodes, *config.timing.nodes))}
    for nodes in config.timing.nodes:
        columns |= {
            f"speedup, {nodes}": timed(nodes, lambda row: format_with_interval(row["speedup"], row["speedup_ci"])),
            f"draft ms, {nodes}": timed(nodes, lambda row: format_number(draft_milliseconds(row))),
            f"c + v + o, {nodes}": timed(nodes, lambda row: " + ".join(format_number(row[part]) for part in "cvo")),
            f"equal, {nodes}": timed(nodes, equal_cell),
        }
    columns["replay equal"] = replay_equal
    columns["evaluations"] = lambda line: ", ".join(
        sorted({row["evaluation"] for kind in ("replay", "loop") for row in line[kind].values() if row is not None})
    )
    return columns


def replay_equal(line: Row) -> str:
    """Return equal questions and responses with exactly the replayed steps, over all tree sizes."""
    rows = [row for row in line["replay"].values() if row is not None]
    if not rows:
        return "-"
    texts = [sum(row["lossless"][key] for row in rows) for key in ("equal", "prompts")]
    steps = [sum(row["replay"][key] for row in rows) for key in ("alike", "answers")]
    return f"{texts[0]}/{texts[1]}, steps {steps[0]}/{steps[1]}"


def plain(*keys: str) -> Columns:
    return {key: lambda row, key=key: str(row[key]) for key in keys}  # type: ignore[misc]


def titled_table(title: str, lines: Sequence[Row], columns: Columns) -> list[str]:
    """Return a heading and a table; nothing without lines."""
    return [f"## {title}", markdown_table(lines, columns)] if lines else []


def sampled_section(config: ComparisonConfig, data: ComparisonData) -> list[str]:
    hot = [temperature for temperature in config.replay.temperatures if temperature > 0]
    rows = [row for row in data.rows if row["kind"] == "replay" and row["temperature"] in hot]
    columns: Columns = {
        **plain("drafter", "benchmark"),
        "T": lambda row: f"{row['temperature']:g}",
        "nodes": lambda row: str(row["nodes"]),
        "tau": lambda row: format_with_interval(row["tau"], row["tau_ci"]),
        "equal": equal_cell,
    }
    return titled_table("Sampled", [row for row in rows if row["nodes"] in config.reported_sizes], columns)


def matching_section(data: ComparisonData) -> list[str]:
    lines = [{"arm": arm, "method": name, **one} for arm, part in data.matching.items() for name, one in part.items()]
    columns: Columns = {
        **plain("arm", "method"),
        "size": lambda one: f"{one['key']}={one['value']}" if one["value"] is not None else "-",
        "of reference": lambda one: format_with_interval(one["ratio"], one["interval"]),
        "matched by": itemgetter("how"),
    }
    return titled_table("How budgets were matched", lines, columns)


def seeds_section(config: ComparisonConfig, data: ComparisonData) -> list[str]:
    """Return tau of each seed of heads that were trained more than once."""
    lines = []
    for arm in config.arms:
        for method, runs in runs_by_method(data, arm).items():
            sides = [row_name(method, reading) for reading in data.training[runs[0]]["readings"]]
            heads = {side: row_names(data.training, side, arm) for side in sides}
            for side, benchmark, nodes in product(sides, config.benchmarks, config.reported_sizes):
                rows = [data.row("replay", benchmark, 0.0, head, nodes) for head in heads[side]]
                taus = [row["tau"] for row in rows if row is not None]
                if len(taus) > 1:
                    lines.append({"arm": arm, "method": side, "benchmark": benchmark, "nodes": nodes, "taus": taus})
    columns: Columns = {
        **plain("arm", "method", "benchmark", "nodes"),
        "tau of each seed": lambda one: " ".join(f"{tau:.3f}" for tau in one["taus"]),
        "mean": lambda one: format_number(statistics.mean(one["taus"]), 3),
        "standard deviation": lambda one: format_number(statistics.stdev(one["taus"]), 3),
    }
    return titled_table("Seeds", lines, columns)


TASK_COLUMNS: Columns = {
    **plain("benchmark"),
    "T": lambda one: f"{one['temperature']:g}",
    **plain("arm", "nodes"),
    "by": itemgetter("kind"),
}
TAU_COLUMN: Columns = {"tau": lambda one: format_difference(one["tau"], one["tau_ci"])}
DIFFERENCE_COLUMNS: Columns = {
    "difference": lambda one: f"{one['more']} minus {one['less']}",
    **TASK_COLUMNS,
    "seeds": lambda one: "{} and {}".format(*one["seeds"]),
    **TAU_COLUMN,
    "speedup": lambda one: format_difference(one["speedup"], one["speedup_ci"]),
}
EFFECT_COLUMNS: Columns = {
    "factor": itemgetter("factor"),
    "difference": lambda one: f"{one['more']} minus {one['less']}",
    "tree": lambda one: one["within"] or "all",
    **TASK_COLUMNS,
    "pairs": lambda one: str(one["twins"]),
    "seeds": lambda one: str(one["seeds"]),
    **TAU_COLUMN,
}
