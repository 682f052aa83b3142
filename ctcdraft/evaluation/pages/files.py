"""The page and its figures as files beside report.json, and made again from there. It draws nothing itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.drawing import Figure
from ctcdraft.evaluation.figures import drawn
from ctcdraft.evaluation.pages import recorded
from ctcdraft.evaluation.pages.page import page
from ctcdraft.evaluation.recorded_comparison import Comparison, Note
from ctcdraft.evaluation.seen import Seen, from_json
from ctcdraft.files import write_text

PAGE, FIGURES, EXPLORED = "report.html", "figures", "explorer*.json"


def write(out: Path, rows: Sequence[dict[str, Any]], environment: Mapping[str, Any]) -> None:
    """report.html, and every figure of it as an SVG file. What was seen inside passes lies in `out` already."""
    figures = drawn(rows, environment.get("sizes"))
    put(out, page(rows, environment, figures, seen_in(out)), figures)


def write_recorded(out: Path, made: Comparison, environment: Mapping[str, Any]) -> None:
    """The same of answer files."""
    figures = recorded.drawn(made.rows)
    put(out, recorded.page(made, environment, figures), figures)


def put(out: Path, text: str, figures: Mapping[str, Figure]) -> None:
    write_text(out / PAGE, text)
    for name, figure in figures.items():
        write_text(out / FIGURES / f"{name}.svg", figure.file())


def seen_in(folder: Path) -> Seen | None:
    """Of all shards."""
    return Seen.merged(parsed(file) for file in sorted(folder.glob(EXPLORED)))


def parsed(file: Path) -> Seen:
    try:
        return from_json(file.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no file of the explorer; remove it and evaluate again") from error


def again(folder: Path) -> Path:
    """The page of a finished evaluation, or of recorded runs, once more; returns where it is."""
    file = folder / "report.json"
    try:
        said = json.loads(file.read_text())
        rows, environment = said["rows"], said["environment"]
        notes = None if all("alpha" in row for row in rows) else [Note(**note) for note in said["notes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no report.json of evaluate.py; name the folder of an evaluation") from error
    if notes is None:
        write(folder, rows, environment)
    else:
        write_recorded(folder, Comparison(rows, notes), environment)
    return folder / PAGE
