"""The page and its figures as files beside report.json, and made again from there. It draws nothing itself.

Figures as PNG, for places that take no SVG: a browser that is on this machine draws them. It knows files alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.tracing.records import Trace, trace_from_json
from ctcdraft.io import atomic_write, write_text
from ctcdraft.report.figures import evaluation_figures
from ctcdraft.report.html.page import evaluation_page
from ctcdraft.report.svg import Figure
from studies.external_logs import page as external_logs_page
from studies.external_logs.compare import LogComparison, Note

PAGE_FILE, FIGURES_FOLDER, TRACE_FILES = "report.html", "figures", "explorer*.json"


def write_page(out: Path, rows: Sequence[dict[str, Any]], environment: Mapping[str, Any]) -> None:
    """report.html, and every figure of it as an SVG file. What was seen inside passes lies in `out` already."""
    figures = evaluation_figures(rows, environment.get("sizes"))
    write_files(out, evaluation_page(rows, environment, figures, read_traces(out)), figures)


def write_log_page(out: Path, made: LogComparison, environment: Mapping[str, Any]) -> None:
    """The same of answer files."""
    figures = external_logs_page.log_figures(made.rows)
    write_files(out, external_logs_page.log_page(made, environment, figures), figures)


def write_files(out: Path, text: str, figures: Mapping[str, Figure]) -> None:
    write_text(out / PAGE_FILE, text)
    for name, figure in figures.items():
        write_text(out / FIGURES_FOLDER / f"{name}.svg", figure.file())


def read_traces(folder: Path) -> Trace | None:
    """Of all shards."""
    return Trace.merge_shards(parse_trace(file) for file in sorted(folder.glob(TRACE_FILES)))


def parse_trace(file: Path) -> Trace:
    try:
        return trace_from_json(file.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no file of the explorer; remove it and evaluate again") from error


def rebuild_page(folder: Path) -> Path:
    """The page of a finished evaluation, or of recorded runs, once more; returns where it is."""
    file = folder / "report.json"
    try:
        report = json.loads(file.read_text())
        rows, environment = report["rows"], report["environment"]
        notes = None if all("alpha" in row for row in rows) else [Note(**note) for note in report["notes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no report.json of evaluate.py; name the folder of an evaluation") from error
    if notes is None:
        write_page(folder, rows, environment)
    else:
        write_log_page(folder, LogComparison(rows, notes), environment)
    return folder / PAGE_FILE


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PIXEL_RATIO = 2  # pixels for one of the figure's own, so that print is not coarse
BROWSER_TIMEOUT = 120  # seconds


def export_png(folder: Path) -> list[Path]:
    """A PNG beside every SVG of the folder; returns where they are."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError(
            f"no browser is here to draw PNG files with (one of {', '.join(BROWSERS)}); install one, or take the SVG "
            f"files in {folder}, which show the same"
        )
    made = []
    for svg in sorted(folder.glob("*.svg")):
        content = render_png(browser, svg)
        made.append(svg.with_suffix(".png"))
        atomic_write(made[-1], lambda draft, content=content: draft.write_bytes(content))  # type: ignore[misc]
    return made


def render_png(browser: str, svg: Path) -> bytes:
    size = re.search(r'width="(\d+)" height="(\d+)"', svg.read_text())
    if size is None:
        raise InputError(f"{svg} is no figure of ours: it does not begin with its size; draw it with `pages` again")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which root has none of
    looks = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={PIXEL_RATIO}"]
    with TemporaryDirectory() as place:
        png = Path(place) / "picture.png"  # by its name the browser knows what it is to make
        words = [f"--window-size={size[1]},{size[2]}", f"--screenshot={png}", svg.resolve().as_uri()]
        try:
            subprocess.run(
                [browser, *sandbox, *looks, *words], capture_output=True, timeout=BROWSER_TIMEOUT, check=False
            )
            return png.read_bytes()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"{browser} drew nothing of {svg}; take the SVG file") from error
