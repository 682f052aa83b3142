"""The page of one evaluation: results, figures, explorer, losslessness and definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.trace import Trace
from ctcdraft.report.html.explorer import explorer_section
from ctcdraft.report.html.losslessness import losslessness_section
from ctcdraft.report.html.render import render, render_page
from ctcdraft.report.svg import Figure
from ctcdraft.report.tables import DETAIL_COLUMNS, FULL_COLUMNS

Row = dict[str, Any]
# All columns of report.md in one table are wider than a page; those on the text get a table of their own.
TEXT_COLUMN_NAMES = ("alpha", "ended", "repeated 4-grams", "accuracy")
RESULT_COLUMNS = {name: cell for name, cell in FULL_COLUMNS.items() if name not in TEXT_COLUMN_NAMES}
TEXT_COLUMNS = {name: FULL_COLUMNS[name] for name in ("drafter", *TEXT_COLUMN_NAMES)}


def evaluation_page(
    rows: Sequence[Row], environment: Mapping[str, Any], figures: Mapping[str, Figure], trace: Trace | None
) -> str:
    """Return report.html.

    Args:
        rows, environment: as in report.json.
        figures: SVG figures by name.
        trace: the traced responses; None where none were recorded.
    """
    first = rows[0]
    title = f"{first['benchmark']}, {first['decoding']} decoding, base {environment['base']}"
    about = f"{first['hardware']}, {first['dtype']}, seed {first['seed']}, {environment['date']}"
    tables = (RESULT_COLUMNS, TEXT_COLUMNS, DETAIL_COLUMNS)
    sections = {
        "Results": render("results", about=about, command=environment["command"], tables=tables, rows=rows),
        "Figures": render("figures", figures=figures, empty="Nothing to draw: no question is finished."),
        "Explorer": explorer_section(trace),
        "Losslessness": losslessness_section(rows, environment, trace),
        "Definitions": render("definitions", definitions=DEFINITIONS),
    }
    return render_page(title, sections)
