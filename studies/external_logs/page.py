"""report.html of a run measured from answer files: both arms, the notes on their files, and tau by category."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.report.figures import acceptance_by_category
from ctcdraft.report.html.files import PAGE_FILE, write_page_files
from ctcdraft.report.html.render import render
from ctcdraft.report.svg import Figure
from ctcdraft.report.tables import Row
from studies.external_logs.compare import COLUMNS, LogComparison, Note, arm_cells, category_cells, numbered_notes
from studies.external_logs.metrics import DEFINITIONS


def write_page(out: Path, comparison: LogComparison, environment: Mapping[str, Any]) -> None:
    figures = log_figures(comparison.rows)
    write_page_files(out, log_page(comparison, environment, figures), figures)


def rebuild_page(folder: Path) -> Path:
    """Render the page of a finished comparison again from its report.json; return its path."""
    file = folder / "report.json"
    try:
        report = json.loads(file.read_text())
        comparison = LogComparison(report["rows"], [Note(**note) for note in report["notes"]])
        write_page(folder, comparison, report["environment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a report.json of answer files; name the folder of recorded.path=") from error
    return folder / PAGE_FILE


def log_figures(rows: Sequence[Row]) -> dict[str, Figure]:
    # Of the run alone: the baseline has one token per forward pass, and an answer file holds nothing else to draw.
    figure = acceptance_by_category(rows[:1])
    return {} if figure is None else {"acceptance_by_category": figure}


def log_page(comparison: LogComparison, environment: Mapping[str, Any], figures: Mapping[str, Figure]) -> str:
    about, notes = {key: environment[key] for key in ("date", "command")}, numbered_notes(comparison.notes)
    categories = category_cells(comparison)
    sections = {
        "Results": render("external_logs", **about, header=["arm", *COLUMNS], rows=arm_cells(comparison), notes=notes),
        "Figures": render("figures", figures=figures, empty="Nothing to draw: the file holds no categories."),
        "Categories": render("table", header=["category", *COLUMNS], rows=categories, empty="The file holds none."),
        "Definitions": render("definitions", definitions=DEFINITIONS),
    }
    return render("page", title=f"Recorded: {comparison.rows[0]['drafter']}", sections=sections)
