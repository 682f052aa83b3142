"""The tables that READMEs quote from grids: every cell's acceptance, and what each factor adds, all else being equal.
It knows what a grid's folder holds, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from ctcdraft.report.tables import with_interval
from studies.comparison.statistics import READING, Cell, cells_of
from studies.readme_comparison_tables import ASKED, EQUAL, NODES, Compared, gain, word
from studies.readme_quotes import Quoted, Row

LEVELS = {
    "residual": "residual heads",
    "attention": "transformer",
    "none": "none",
    "markov": "Markov",
    "gru": "GRU",
    "cross_entropy": "cross-entropy",
    "cross_entropy_deep": "cross-entropy, six words",
    "ctc": "CTC",
    "prefix_ctc": "prefix-CTC",
}
FACTORS = {"body": "body", "loss": "loss", "correction": "correction", "reading": "tree", "weight": "weight of CTC"}
LOSSES = ("cross_entropy", "cross_entropy_deep", "ctc", "prefix_ctc")
TOLD = "gsm8k"  # cell by cell; the page has the others


class Grid(Compared):
    """A folder of a finished grid."""

    kind = "grid"

    @property
    def finished(self) -> bool:
        return bool(self.found.verdict.get("effects"))

    @property
    def base(self) -> str:
        return str(self.found.rows[0]["fingerprint"]["base"])

    def row(self, arm: str, cell: Cell) -> Row | None:
        """What became of a cell at NODES nodes on the benchmark that is told, its first seed; None without it."""
        seeds = cells_of(self.rules, self.found.training, arm).get(cell)
        return None if seeds is None else self.found.row("replay", TOLD, 0.0, seeds[min(seeds)], NODES)


def cells(grid: Grid) -> Iterator[dict[str, Any]]:
    """One row for body, correction and reading, with every loss side by side."""
    for arm in grid.rules.arms:
        known = cells_of(grid.rules, grid.found.training, arm)
        levels = {key: list(dict.fromkeys(dict(cell).get(key) for cell in known)) for key in FACTORS}
        for body, correction, reading in product(levels["body"], levels["correction"], levels["reading"]):
            place = {"body": body, "correction": correction, "reading": reading}
            rows = {loss: grid.row(arm, tuple(sorted({**place, "loss": loss}.items()))) for loss in LOSSES}
            if any(rows.values()):
                yield {"base": grid.base, "arm": arm, **place, **rows}


def effects(grid: Grid) -> Iterator[Row]:
    """Greedy, at NODES nodes, factor by factor, among cells that are read alike."""
    told = [
        row
        for row in grid.found.verdict["effects"]
        if (row["nodes"], row["temperature"]) == (NODES, 0) and (row["within"] or row["factor"] == READING)
    ]
    for factor, arm, asked in product(FACTORS, EQUAL, ASKED):
        for row in told:
            if (row["factor"], row["arm"], row["benchmark"]) == (factor, arm, asked):
                yield {**row, "base": grid.base}


def level(key: str) -> Callable[[Row], str]:
    return lambda row: named(row[key])


def named(value: Any) -> str:
    return LEVELS.get(value, f"{value:g}" if isinstance(value, float) else str(value))


def tau(loss: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[loss] is None else with_interval(row[loss]["tau"], row[loss]["tau_ci"])


CELLS = {
    "base": word("base"),
    "at equal": word("arm", EQUAL),
    "body": level("body"),
    "correction": level("correction"),
    "tree": level("reading"),
    **{f"tau, {LEVELS[loss]}": tau(loss) for loss in LOSSES},
}
ADDED = {
    "base": word("base"),
    "factor": word("factor", FACTORS),
    "level": lambda row: f"{named(row['more'])} less {named(row['less'])}",
    "tree": lambda row: row["within"] or "-",
    "at equal": word("arm", EQUAL),
    "questions": word("benchmark", ASKED),
    "twins": word("twins"),
    "seeds": word("seeds"),
    "gain in tau": gain("tau"),
}
GRIDS = ("arena/grid-tiny", "arena/grid-tinystories-656K")
HERE = "results/arena/README.md"
TABLES = (Quoted(HERE, GRIDS, cells, CELLS, Grid.read), Quoted(HERE, GRIDS, effects, ADDED, Grid.read))
