"""The page of recorded runs: both arms, what their files do not hold, acceptance by category. It knows no passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.report.figures import by_category
from ctcdraft.report.html.markup import Html, bullets, joined, table, tag
from ctcdraft.report.html.page import assembled
from ctcdraft.report.svg import Figure
from studies.external_logs.compare import COLUMNS, Comparison, cells, numbered
from studies.external_logs.metrics import DEFINITIONS

Row = Mapping[str, Any]


def drawn(rows: Sequence[Row]) -> dict[str, Figure]:
    """An answer file holds no passes one by one and no times within a turn: of it there is but one figure, and the
    baseline is in none: one token a pass."""
    figure = by_category(rows[:1])
    return {} if figure is None else {"acceptance_by_category": figure}


def page(made: Comparison, environment: Mapping[str, Any], figures: Mapping[str, Figure]) -> Html:
    run = made.rows[0]
    parts = {
        "Results": joined([tag("p", environment["date"]), tag("pre", environment["command"]), arms(made)]),
        "Figures": joined(tag("figure", Html(figure.inline()), id=name) for name, figure in figures.items())
        or tag("p", "Nothing to draw: the file holds no categories."),
        "Categories": by_columns(made, "category", [(name, row, run) for name, row in run["categories"].items()])
        if run["categories"]
        else tag("p", "The file holds none."),
        "Words": bullets(joined([tag("b", word), f": {meaning}"]) for word, meaning in DEFINITIONS.items()),
    }
    return assembled(f"Recorded: {run['drafter']}", parts)


def arms(made: Comparison) -> Html:
    both = by_columns(made, "arm", [(row["drafter"], row, row) for row in made.rows])
    return joined([both, tag("p", "The numbers in brackets are those of these notes."), bullets(numbered(made.notes))])


def by_columns(made: Comparison, first: str, rows: Sequence[tuple[str, Row, Row]]) -> Html:
    """rows: the first cell, the row, and the arm it is of."""
    said = [[name, *cells(dict(row), arm["drafter"], made.notes)] for name, row, arm in rows]
    return table([first, *COLUMNS], said)
