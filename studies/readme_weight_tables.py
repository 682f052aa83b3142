"""The table that READMEs quote from sweeps of the CTC term's weight: every seed's acceptance, and what a weight adds to
none. It knows what a sweep's folder holds, and measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ctcdraft.report.tables import number
from studies.comparison.statistics import READING, cells_of
from studies.readme_comparison_tables import EQUAL, NODES, gain, word
from studies.readme_grid_tables import HERE, TOLD, Grid, effects, level
from studies.readme_quotes import Quoted, Row

WEIGHT = "weight"


def weighed(grid: Grid) -> Iterator[Row]:
    """One row for every weight and way of reading. added: to the weight 0; None where that difference is not known."""
    added = {
        (row["arm"], row["more"], row["within"]): row
        for row in effects(grid)
        if (row["factor"], row["benchmark"], row["less"]) == (WEIGHT, TOLD, 0)
    }
    for arm in grid.rules.arms:
        known = cells_of(grid.rules, grid.found.training, arm)
        for cell in sorted(known, key=lambda cell: (grid.rules.readings_as.index(dict(cell)[READING]), cell)):
            place = dict(cell)
            rows = [grid.found.row("replay", TOLD, 0.0, known[cell][seed], NODES) for seed in sorted(known[cell])]
            taus = [None if row is None else row["tau"] for row in rows]  # a seed keeps its place
            if any(taus):
                last = added.get((arm, place[WEIGHT], place[READING]))
                yield {"base": grid.base, "arm": arm, **place, "taus": taus, "added": last}


WEIGHED = {
    "base": word("base"),
    "weight of CTC": level(WEIGHT),
    "read": word(READING),
    "at equal": word("arm", EQUAL),
    "tau, seed by seed": lambda row: ", ".join(map(number, row["taus"])),
    "gain over no CTC": lambda row: "-" if row["added"] is None else gain("tau")(row["added"]),
}
SWEEPS = ("arena/weights-tiny", "arena/weights-tinystories-656K")
TABLES = (Quoted(HERE, SWEEPS, weighed, WEIGHED, Grid.read),)
