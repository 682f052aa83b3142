"""What the files of a comparison hold, line by line: certified rows, what a head's training took and what became of it,
points of figures. It measures and prints nothing.

Tables of a comparison's page: which columns, in which words. It knows no files.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ctcdraft.report.tables import (
    Columns,
    equal_cell,
    format_difference,
    format_number,
    format_with_interval,
    markdown_table,
)
from ctcdraft.training.sweep import Job
from studies.comparison.config import ComparisonConfig
from studies.comparison.evaluate import Row, all_rows, draft_seconds, passed_check, row_name
from studies.comparison.statistics import factor_cells, row_names
from studies.comparison.store import MATCHING, TRAINING, VERDICT, Entry, ResultStore


@dataclass(frozen=True)
class ComparisonData:
    """All that is known when a page is written. rows: certified ones."""

    training: Mapping[str, Entry]
    matching: Mapping[str, Any]
    verdict: Mapping[str, Any]
    rows: Sequence[Row]
    refused: Sequence[Row]

    @classmethod
    def of(cls, store: ResultStore) -> ComparisonData:
        rows = all_rows(store)
        good = [row for row in rows if passed_check(row)]
        bad = [row for row in rows if not passed_check(row)]
        return cls(store.read(TRAINING), store.read(MATCHING), store.read(VERDICT), good, bad)

    def row(self, kind: str, benchmark: str, temperature: float, drafter: str, nodes: int) -> Row | None:
        wanted = (kind, benchmark, temperature, drafter, nodes)
        keys = ("kind", "benchmark", "temperature", "drafter", "nodes")
        return next((row for row in self.rows if tuple(row[key] for key in keys) == wanted), None)


def trained_lines(config: ComparisonConfig, found: ComparisonData, arm: str, benchmark: str) -> Iterator[Row]:
    """One line a head and reading: what its training took, and what became of it at every size."""
    reference = found.training.get(config.reference)
    for name, entry in found.training.items():
        if entry["arm"] != arm or entry["seed"] != config.seed:
            continue
        ratio = entry["parameters"] / reference["parameters"] if reference else None
        for reading in entry["readings"]:
            line = measured_rows(config, found, benchmark, row_name(entry["same_as"] or name, reading))
            if line is not None:
                yield {**line, "drafter": row_name(name, reading), "entry": entry, "ratio": ratio}


def untrained_lines(config: ComparisonConfig, found: ComparisonData, benchmark: str) -> Iterator[Row]:
    heads = {entry["same_as"] or name for name, entry in found.training.items()}
    names = dict.fromkeys(row["drafter"] for row in found.rows if row["drafter"].partition("@")[0] not in heads)
    for name in names:
        line = measured_rows(config, found, benchmark, name)
        if line is not None:
            yield {**line, "drafter": name, "entry": None, "ratio": None}


def runs_by_method(found: ComparisonData, arm: str) -> dict[str, list[str]]:
    """Runs of an arm, a seed each, by entrant; in a grid the rules name the last cell alone."""
    runs: dict[str, list[str]] = {}
    for name, entry in found.training.items():
        if entry["arm"] == arm:
            runs.setdefault(entry["entrant"], []).append(name)
    return runs


def measured_rows(
    config: ComparisonConfig, found: ComparisonData, benchmark: str, drafter: str
) -> dict[str, Any] | None:
    """Its replayed rows by nodes and its timed ones; None where there are neither."""
    replays = {nodes: found.row("replay", benchmark, 0.0, drafter, nodes) for nodes in config.replay.nodes}
    loops = {nodes: found.row("loop", benchmark, 0.0, drafter, nodes) for nodes in config.timing.nodes}
    return {"replay": replays, "loop": loops} if any([*replays.values(), *loops.values()]) else None


def grid_jobs(config: ComparisonConfig, found: ComparisonData) -> list[Job]:
    """Of a grid, the cells of the first arm: levels, and the first seed's tau at the first size that is told."""
    benchmark, nodes = next(iter(config.benchmarks)), config.reported_sizes[0]
    jobs = []
    for cell, seeds in factor_cells(config, found.training, config.arms[0]).items():
        name = seeds[min(seeds)]
        row = found.row("replay", benchmark, 0.0, name, nodes)
        if row is not None and row["tau"] is not None:
            jobs.append(Job(name, dict(cell), "", 0, row["tau"], None))
    return jobs


def tau_by_nodes(config: ComparisonConfig, found: ComparisonData) -> dict[str, list[tuple[float, float]]]:
    """(nodes, tau) of every line of the first benchmark's first arm."""
    benchmark = next(iter(config.benchmarks))
    lines = [*trained_lines(config, found, config.arms[0], benchmark), *untrained_lines(config, found, benchmark)]
    points = {
        line["drafter"]: [
            (nodes, row["tau"]) for nodes, row in line["replay"].items() if row is not None and row["tau"]
        ]
        for line in lines
    }
    return {name: some for name, some in points.items() if some}


def tau_by_draft_time(config: ComparisonConfig, found: ComparisonData) -> list[tuple[str, float, float]]:
    """(name, milliseconds of a draft, tau) of every timed line, at the first size."""
    points = []
    for benchmark in list(config.benchmarks)[:1]:
        for arm in config.timing.arms if config.timing.nodes else ():
            for line in trained_lines(config, found, arm, benchmark):
                row = line["loop"][config.timing.nodes[0]]
                seconds = None if row is None else draft_seconds(row)
                if row is not None and seconds is not None:
                    points.append((line["drafter"], 1e3 * seconds, row["tau"]))
    return list(dict.fromkeys(points))


def arm_columns(config: ComparisonConfig) -> Columns:
    """Of the tables of arms: tau by nodes, then what the clock said at the sizes that were timed."""

    def entry(key: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["entry"] is None or line["entry"][key] is None else form(line["entry"][key])

    def tau(nodes: int) -> Callable[[Row], str]:
        def cell(line: Row) -> str:
            row = line["replay"].get(nodes) or line["loop"].get(nodes)
            return "-" if row is None else format_with_interval(row["tau"], row["tau_ci"])

        return cell

    def clocked(nodes: int, form: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["loop"][nodes] is None else form(line["loop"][nodes])

    made: Columns = {
        "drafter": lambda line: line["drafter"],
        "parameters": entry("parameters", lambda value: f"{value:,}"),
        "of reference": lambda line: format_number(line["ratio"]),
        "steps": entry("steps", lambda value: f"{value:,}"),
        "train s": entry("seconds", lambda value: f"{value[config.clock]:.0f}" if config.clock in value else "-"),
        "rate": entry("learning_rate", lambda value: f"{value:g}"),
    }
    made |= {f"tau, {nodes}": tau(nodes) for nodes in dict.fromkeys((*config.replay.nodes, *config.timing.nodes))}
    for nodes in config.timing.nodes:
        made[f"speedup, {nodes}"] = clocked(nodes, lambda row: format_with_interval(row["speedup"], row["speedup_ci"]))
        made[f"draft ms, {nodes}"] = clocked(nodes, draft_milliseconds)
        made[f"c + v + o, {nodes}"] = clocked(nodes, lambda row: " + ".join(format_number(row[part]) for part in "cvo"))
        made[f"equal, {nodes}"] = clocked(nodes, equal_cell)
    made["replay equal"] = replay_equal
    made["evaluations"] = lambda line: ", ".join(sorted({row["evaluation"] for row in line_rows(line)}))
    return made


def draft_milliseconds(row: Row) -> str:
    seconds = draft_seconds(row)
    return "-" if seconds is None else format_number(1e3 * seconds, 2)


def replay_equal(line: Row) -> str:
    """Texts of the loop that are autoregression's, at all sizes; and answers that took the passes replayed."""
    rows = [row for row in line["replay"].values() if row is not None]
    if not rows:
        return "-"
    texts = [sum(row["lossless"][key] for row in rows) for key in ("equal", "prompts")]
    passes = [sum(row["replay"][key] for row in rows) for key in ("alike", "answers")]
    return f"{texts[0]}/{texts[1]}, passes {passes[0]}/{passes[1]}"


def line_rows(line: Row) -> list[Row]:
    return [row for kind in ("replay", "loop") for row in line[kind].values() if row is not None]


def sampled_section(config: ComparisonConfig, found: ComparisonData) -> list[str]:
    """tau at the other temperatures, at the sizes that are told."""
    hot = [temperature for temperature in config.replay.temperatures if temperature > 0]
    rows = [row for row in found.rows if row["kind"] == "replay" and row["temperature"] in hot]
    if not rows:
        return []
    made: Columns = {
        "drafter": lambda row: row["drafter"],
        "benchmark": lambda row: row["benchmark"],
        "T": lambda row: f"{row['temperature']:g}",
        "nodes": lambda row: str(row["nodes"]),
        "tau": lambda row: format_with_interval(row["tau"], row["tau_ci"]),
        "equal": equal_cell,
    }
    return ["## Sampled", markdown_table([row for row in rows if row["nodes"] in config.reported_sizes], made)]


def matching_section(found: ComparisonData) -> list[str]:
    lines = [{"arm": arm, "entrant": name, **one} for arm, all_ in found.matching.items() for name, one in all_.items()]
    made: Columns = {
        "arm": lambda one: one["arm"],
        "entrant": lambda one: one["entrant"],
        "dial": lambda one: f"{one['key']}={one['value']}" if one["value"] is not None else "-",
        "of reference": lambda one: format_with_interval(one["ratio"], one["interval"]),
        "matched by": lambda one: one["how"],
    }
    return ["## How budgets were matched", markdown_table(lines, made)] if lines else []


def seeds_section(config: ComparisonConfig, found: ComparisonData) -> list[str]:
    """Heads that were trained more than once: tau of each seed, at the sizes that are told."""
    lines = []
    for arm in config.arms:
        for entrant, same in runs_by_method(found, arm).items():
            sides = [row_name(entrant, reading) for reading in found.training[same[0]]["readings"]]
            heads = {side: row_names(found.training, side, arm) for side in sides}
            for side, benchmark, nodes in product(sides, config.benchmarks, config.reported_sizes):
                rows = [found.row("replay", benchmark, 0.0, head, nodes) for head in heads[side]]
                taus = [row["tau"] for row in rows if row is not None]
                if len(taus) > 1:
                    lines.append({"arm": arm, "entrant": side, "benchmark": benchmark, "nodes": nodes, "taus": taus})
    made: Columns = {
        "arm": lambda one: one["arm"],
        "entrant": lambda one: one["entrant"],
        "benchmark": lambda one: one["benchmark"],
        "nodes": lambda one: str(one["nodes"]),
        "tau of each seed": lambda one: " ".join(f"{tau:.3f}" for tau in one["taus"]),
        "mean": lambda one: format_number(statistics.mean(one["taus"]), 3),
        "standard deviation": lambda one: format_number(statistics.stdev(one["taus"]), 3),
    }
    return ["## Seeds", markdown_table(lines, made)] if lines else []


PLACE_COLUMNS: Columns = {
    "benchmark": lambda one: one["benchmark"],
    "T": lambda one: f"{one['temperature']:g}",
    "arm": lambda one: one["arm"],
    "nodes": lambda one: str(one["nodes"]),
    "by": lambda one: one["kind"],
}
GAIN_COLUMNS: Columns = {
    "tau": lambda one: format_difference(one["tau"], one["tau_ci"]),
    "speedup": lambda one: format_difference(one["speedup"], one["speedup_ci"]),
}
DIFFERENCE_COLUMNS: Columns = {
    "more": lambda one: f"{one['more']} less {one['less']}",
    **PLACE_COLUMNS,
    "seeds": lambda one: "{} and {}".format(*one["seeds"]),
    **GAIN_COLUMNS,
}
EFFECT_COLUMNS: Columns = {
    "factor": lambda one: one["factor"],
    "more": lambda one: f"{one['more']} less {one['less']}",
    "read as": lambda one: one["within"] or "all",
    **PLACE_COLUMNS,
    "twins": lambda one: str(one["twins"]),
    "seeds": lambda one: str(one["seeds"]),
    "tau": GAIN_COLUMNS["tau"],
}


def pairs_section(found: ComparisonData, part: str, made: Columns, title: str) -> list[str]:
    lines = found.verdict.get(part, [])
    return [f"## {title}", markdown_table(lines, made)] if lines else []
