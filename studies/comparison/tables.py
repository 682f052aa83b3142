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

from ctcdraft.report.tables import Columns, equal, number, signed, table, with_interval
from ctcdraft.training.sweep import Job
from studies.comparison.config import Rules
from studies.comparison.evaluate import Row, all_rows, certified, draft_seconds, row_name
from studies.comparison.statistics import cells_of, rows_named
from studies.comparison.store import MATCHING, TRAINING, VERDICT, Book, Entry


@dataclass(frozen=True)
class Found:
    """All that is known when a page is written. rows: certified ones."""

    training: Mapping[str, Entry]
    matching: Mapping[str, Any]
    verdict: Mapping[str, Any]
    rows: Sequence[Row]
    refused: Sequence[Row]

    @classmethod
    def of(cls, book: Book) -> Found:
        rows = all_rows(book)
        good = [row for row in rows if certified(row)]
        bad = [row for row in rows if not certified(row)]
        return cls(book.read(TRAINING), book.read(MATCHING), book.read(VERDICT), good, bad)

    def row(self, kind: str, benchmark: str, temperature: float, drafter: str, nodes: int) -> Row | None:
        wanted = (kind, benchmark, temperature, drafter, nodes)
        keys = ("kind", "benchmark", "temperature", "drafter", "nodes")
        return next((row for row in self.rows if tuple(row[key] for key in keys) == wanted), None)


def trained(rules: Rules, found: Found, arm: str, benchmark: str) -> Iterator[Row]:
    """One line a head and reading: what its training took, and what became of it at every size."""
    reference = found.training.get(rules.reference)
    for name, entry in found.training.items():
        if entry["arm"] != arm or entry["seed"] != rules.seed:
            continue
        ratio = entry["parameters"] / reference["parameters"] if reference else None
        for reading in entry["readings"]:
            line = measured(rules, found, benchmark, row_name(entry["same_as"] or name, reading))
            if line is not None:
                yield {**line, "drafter": row_name(name, reading), "entry": entry, "ratio": ratio}


def untrained(rules: Rules, found: Found, benchmark: str) -> Iterator[Row]:
    heads = {entry["same_as"] or name for name, entry in found.training.items()}
    names = dict.fromkeys(row["drafter"] for row in found.rows if row["drafter"].partition("@")[0] not in heads)
    for name in names:
        line = measured(rules, found, benchmark, name)
        if line is not None:
            yield {**line, "drafter": name, "entry": None, "ratio": None}


def runs_of(found: Found, arm: str) -> dict[str, list[str]]:
    """Runs of an arm, a seed each, by entrant; in a grid the rules name the last cell alone."""
    runs: dict[str, list[str]] = {}
    for name, entry in found.training.items():
        if entry["arm"] == arm:
            runs.setdefault(entry["entrant"], []).append(name)
    return runs


def measured(rules: Rules, found: Found, benchmark: str, drafter: str) -> dict[str, Any] | None:
    """Its replayed rows by nodes and its timed ones; None where there are neither."""
    replays = {nodes: found.row("replay", benchmark, 0.0, drafter, nodes) for nodes in rules.replay.nodes}
    loops = {nodes: found.row("loop", benchmark, 0.0, drafter, nodes) for nodes in rules.timing.nodes}
    return {"replay": replays, "loop": loops} if any([*replays.values(), *loops.values()]) else None


def in_cells(rules: Rules, found: Found) -> list[Job]:
    """Of a grid, the cells of the first arm: levels, and the first seed's tau at the first size that is told."""
    benchmark, nodes = next(iter(rules.benchmarks)), rules.sizes_told[0]
    jobs = []
    for cell, seeds in cells_of(rules, found.training, rules.arms[0]).items():
        name = seeds[min(seeds)]
        row = found.row("replay", benchmark, 0.0, name, nodes)
        if row is not None and row["tau"] is not None:
            jobs.append(Job(name, dict(cell), "", 0, row["tau"], None))
    return jobs


def replayed(rules: Rules, found: Found) -> dict[str, list[tuple[float, float]]]:
    """(nodes, tau) of every line of the first benchmark's first arm."""
    benchmark = next(iter(rules.benchmarks))
    lines = [*trained(rules, found, rules.arms[0], benchmark), *untrained(rules, found, benchmark)]
    points = {
        line["drafter"]: [
            (nodes, row["tau"]) for nodes, row in line["replay"].items() if row is not None and row["tau"]
        ]
        for line in lines
    }
    return {name: some for name, some in points.items() if some}


def timed(rules: Rules, found: Found) -> list[tuple[str, float, float]]:
    """(name, milliseconds of a draft, tau) of every timed line, at the first size."""
    points = []
    for benchmark in list(rules.benchmarks)[:1]:
        for arm in rules.timing.arms if rules.timing.nodes else ():
            for line in trained(rules, found, arm, benchmark):
                row = line["loop"][rules.timing.nodes[0]]
                seconds = None if row is None else draft_seconds(row)
                if row is not None and seconds is not None:
                    points.append((line["drafter"], 1e3 * seconds, row["tau"]))
    return list(dict.fromkeys(points))


def columns(rules: Rules) -> Columns:
    """Of the tables of arms: tau by nodes, then what the clock said at the sizes that were timed."""

    def entry(key: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["entry"] is None or line["entry"][key] is None else form(line["entry"][key])

    def tau(nodes: int) -> Callable[[Row], str]:
        def cell(line: Row) -> str:
            row = line["replay"].get(nodes) or line["loop"].get(nodes)
            return "-" if row is None else with_interval(row["tau"], row["tau_ci"])

        return cell

    def clocked(nodes: int, form: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["loop"][nodes] is None else form(line["loop"][nodes])

    made: Columns = {
        "drafter": lambda line: line["drafter"],
        "parameters": entry("parameters", lambda value: f"{value:,}"),
        "of reference": lambda line: number(line["ratio"]),
        "steps": entry("steps", lambda value: f"{value:,}"),
        "train s": entry("seconds", lambda value: f"{value[rules.clock]:.0f}" if rules.clock in value else "-"),
        "rate": entry("learning_rate", lambda value: f"{value:g}"),
    }
    made |= {f"tau, {nodes}": tau(nodes) for nodes in dict.fromkeys((*rules.replay.nodes, *rules.timing.nodes))}
    for nodes in rules.timing.nodes:
        made[f"speedup, {nodes}"] = clocked(nodes, lambda row: with_interval(row["speedup"], row["speedup_ci"]))
        made[f"draft ms, {nodes}"] = clocked(nodes, draft_milliseconds)
        made[f"c + v + o, {nodes}"] = clocked(nodes, lambda row: " + ".join(number(row[part]) for part in "cvo"))
        made[f"equal, {nodes}"] = clocked(nodes, equal)
    made["replay equal"] = replay_equal
    made["evaluations"] = lambda line: ", ".join(sorted({row["evaluation"] for row in rows_in(line)}))
    return made


def draft_milliseconds(row: Row) -> str:
    seconds = draft_seconds(row)
    return "-" if seconds is None else number(1e3 * seconds, 2)


def replay_equal(line: Row) -> str:
    """Texts of the loop that are autoregression's, at all sizes; and answers that took the passes replayed."""
    rows = [row for row in line["replay"].values() if row is not None]
    if not rows:
        return "-"
    texts = [sum(row["lossless"][key] for row in rows) for key in ("equal", "prompts")]
    passes = [sum(row["replay"][key] for row in rows) for key in ("alike", "answers")]
    return f"{texts[0]}/{texts[1]}, passes {passes[0]}/{passes[1]}"


def rows_in(line: Row) -> list[Row]:
    return [row for kind in ("replay", "loop") for row in line[kind].values() if row is not None]


def sampled(rules: Rules, found: Found) -> list[str]:
    """tau at the other temperatures, at the sizes that are told."""
    hot = [temperature for temperature in rules.replay.temperatures if temperature > 0]
    rows = [row for row in found.rows if row["kind"] == "replay" and row["temperature"] in hot]
    if not rows:
        return []
    made: Columns = {
        "drafter": lambda row: row["drafter"],
        "benchmark": lambda row: row["benchmark"],
        "T": lambda row: f"{row['temperature']:g}",
        "nodes": lambda row: str(row["nodes"]),
        "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
        "equal": equal,
    }
    return ["## Sampled", table([row for row in rows if row["nodes"] in rules.sizes_told], made)]


def matched(found: Found) -> list[str]:
    lines = [{"arm": arm, "entrant": name, **one} for arm, all_ in found.matching.items() for name, one in all_.items()]
    made: Columns = {
        "arm": lambda one: one["arm"],
        "entrant": lambda one: one["entrant"],
        "dial": lambda one: f"{one['key']}={one['value']}" if one["value"] is not None else "-",
        "of reference": lambda one: with_interval(one["ratio"], one["interval"]),
        "matched by": lambda one: one["how"],
    }
    return ["## How budgets were matched", table(lines, made)] if lines else []


def seeds(rules: Rules, found: Found) -> list[str]:
    """Heads that were trained more than once: tau of each seed, at the sizes that are told."""
    lines = []
    for arm in rules.arms:
        for entrant, same in runs_of(found, arm).items():
            sides = [row_name(entrant, reading) for reading in found.training[same[0]]["readings"]]
            heads = {side: rows_named(found.training, side, arm) for side in sides}
            for side, benchmark, nodes in product(sides, rules.benchmarks, rules.sizes_told):
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
        "mean": lambda one: number(statistics.mean(one["taus"]), 3),
        "standard deviation": lambda one: number(statistics.stdev(one["taus"]), 3),
    }
    return ["## Seeds", table(lines, made)] if lines else []


PLACE: Columns = {
    "benchmark": lambda one: one["benchmark"],
    "T": lambda one: f"{one['temperature']:g}",
    "arm": lambda one: one["arm"],
    "nodes": lambda one: str(one["nodes"]),
    "by": lambda one: one["kind"],
}
GAIN: Columns = {
    "tau": lambda one: signed(one["tau"], one["tau_ci"]),
    "speedup": lambda one: signed(one["speedup"], one["speedup_ci"]),
}
DIFFERENCES: Columns = {
    "more": lambda one: f"{one['more']} less {one['less']}",
    **PLACE,
    "seeds": lambda one: "{} and {}".format(*one["seeds"]),
    **GAIN,
}
EFFECTS: Columns = {
    "factor": lambda one: one["factor"],
    "more": lambda one: f"{one['more']} less {one['less']}",
    "read as": lambda one: one["within"] or "all",
    **PLACE,
    "twins": lambda one: str(one["twins"]),
    "seeds": lambda one: str(one["seeds"]),
    "tau": GAIN["tau"],
}


def pairs(found: Found, part: str, made: Columns, title: str) -> list[str]:
    lines = found.verdict.get(part, [])
    return [f"## {title}", table(lines, made)] if lines else []
