"""report.html and the SVG figures of an evaluation, written beside its report.json and rendered again from there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.trace import Trace, trace_from_json
from ctcdraft.io import write_text
from ctcdraft.report.figures import evaluation_figures
from ctcdraft.report.html.page import evaluation_page
from ctcdraft.report.svg import Figure

PAGE_FILE, FIGURES_FOLDER, TRACE_FILES = "report.html", "figures", "explorer*.json"


def write_page(out: Path, rows: Sequence[dict[str, Any]], environment: Mapping[str, Any]) -> None:
    """Write report.html and its figures from the rows and environment of a report, and the traces already in `out`."""
    figures = evaluation_figures(rows, environment.get("sizes"))
    write_page_files(out, evaluation_page(rows, environment, figures, read_traces(out)), figures)


def write_page_files(out: Path, page: str, figures: Mapping[str, Figure]) -> None:
    write_text(out / PAGE_FILE, page)
    for name, figure in figures.items():
        write_text(out / FIGURES_FOLDER / f"{name}.svg", figure.file())


def read_traces(folder: Path) -> Trace | None:
    """Return the traced responses of all shards; None where there are none."""
    return Trace.merge_shards(parse_trace(file) for file in sorted(folder.glob(TRACE_FILES)))


def parse_trace(file: Path) -> Trace:
    try:
        return trace_from_json(file.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a trace of the explorer; remove it and evaluate again") from error


def rebuild_page(folder: Path) -> Path:
    """Render the page and figures of a finished evaluation again; return the path of the page."""
    file = folder / "report.json"
    try:
        report = json.loads(file.read_text())
        rows, environment = report["rows"], report["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a report.json of evaluate.py; name the folder of an evaluation") from error
    if not all("alpha" in row for row in rows):
        raise InputError(f"{file} is not of an evaluation; `python -m studies.external_logs` renders answer files")
    write_page(folder, rows, environment)
    return folder / PAGE_FILE
