"""What the files of a comparison hold, line by line: certified rows, what a head's training took and what became of it,
points of figures. It measures and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctcdraft.arena.book import MATCHING, TRAINING, VERDICT, Book, Entry
from ctcdraft.arena.judging import cells_of
from ctcdraft.arena.reports import Row, all_rows, certified, draft_seconds, row_name
from ctcdraft.arena.rules import Rules
from ctcdraft.training.sweep import Job


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
