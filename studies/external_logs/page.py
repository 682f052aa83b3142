"""The page of recorded runs: both arms, what their files do not hold, acceptance by category. It knows no passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.report.figures import acceptance_by_category
from ctcdraft.report.html.markup import Html, bullets, html_table, join_html, tag
from ctcdraft.report.html.page import assemble_page
from ctcdraft.report.svg import Figure
from studies.external_logs.compare import COLUMNS, LogComparison, numbered_notes, row_cells
from studies.external_logs.metrics import DEFINITIONS

LogRow = Mapping[str, Any]


def log_figures(rows: Sequence[LogRow]) -> dict[str, Figure]:
    """An answer file holds no passes one by one and no times within a turn: of it there is but one figure, and the
    baseline is in none: one token a pass."""
    figure = acceptance_by_category(rows[:1])
    return {} if figure is None else {"acceptance_by_category": figure}


def log_page(made: LogComparison, environment: Mapping[str, Any], figures: Mapping[str, Figure]) -> Html:
    run = made.rows[0]
    parts = {
        "Results": join_html([tag("p", environment["date"]), tag("pre", environment["command"]), arms_section(made)]),
        "Figures": join_html(tag("figure", Html(figure.inline()), id=name) for name, figure in figures.items())
        or tag("p", "Nothing to draw: the file holds no categories."),
        "Categories": arms_html_table(made, "category", [(name, row, run) for name, row in run["categories"].items()])
        if run["categories"]
        else tag("p", "The file holds none."),
        "Words": bullets(join_html([tag("b", word), f": {meaning}"]) for word, meaning in DEFINITIONS.items()),
    }
    return assemble_page(f"Recorded: {run['drafter']}", parts)


def arms_section(made: LogComparison) -> Html:
    both = arms_html_table(made, "arm", [(row["drafter"], row, row) for row in made.rows])
    return join_html(
        [both, tag("p", "The numbers in brackets are those of these notes."), bullets(numbered_notes(made.notes))]
    )


def arms_html_table(made: LogComparison, first: str, rows: Sequence[tuple[str, LogRow, LogRow]]) -> Html:
    """rows: the first cell, the row, and the arm it is of."""
    cells_of_rows = [[name, *row_cells(dict(row), arm["drafter"], made.notes)] for name, row, arm in rows]
    return html_table([first, *COLUMNS], cells_of_rows)
