"""report.html and the SVG figures of an evaluation, written beside its report.json and rendered again from there.

The page is rendered from report.json and the traces (explorer.json) alone: results, figures, traced responses
(explorer.py), losslessness and definitions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ctcdraft.errors import InputError
from ctcdraft.evaluation.half_precision import NOISE_RATIO
from ctcdraft.evaluation.losslessness import HALF_PRECISION_ROUNDING, MAX_ROUNDINGS, TIE_MARGIN
from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.trace import Trace, trace_from_json
from ctcdraft.io import write_text
from ctcdraft.report import tables
from ctcdraft.report.figures import evaluation_figures
from ctcdraft.report.html.explorer import explorer_section
from ctcdraft.report.html.render import render
from ctcdraft.report.markdown import statements
from ctcdraft.report.svg import Figure
from ctcdraft.report.tables import Columns, Row

PAGE_FILE, FIGURES_FOLDER, TRACE_FILES = "report.html", "figures", "explorer*.json"
# All columns of report.md in one table are wider than a page; those on the text get a table of their own.
TEXT_COLUMN_NAMES = ("alpha", "ended", "repeated 4-grams", "accuracy")
RESULT_COLUMNS = {name: cell for name, cell in tables.FULL_COLUMNS.items() if name not in TEXT_COLUMN_NAMES}
TEXT_COLUMNS = {name: tables.FULL_COLUMNS[name] for name in ("drafter", *TEXT_COLUMN_NAMES)}
EQUALITY_COLUMNS: Columns = {
    "drafter": tables.drafter_label,
    "decoding": lambda row: row["decoding"],
    "T": lambda row: f"{row['temperature']:g}",
    "seed": lambda row: str(row["seed"]),
    "guarantee": lambda row: (
        "baseline" if row["drafter"] == AUTOREGRESSIVE else tables.GUARANTEES[row["lossless"]["owes"]]
    ),
    "questions": lambda row: str(row["lossless"]["prompts"]),
    "equal": lambda row: str(row["lossless"]["equal"]),
    "explained by rounding": lambda row: str(row["lossless"]["owed"]["explained"]),
    "undecided": lambda row: str(row["lossless"]["owed"]["undecided"]),
    "wrong": lambda row: str(row["lossless"]["owed"]["wrong"]),
    "margins at first divergences": lambda row: (
        ", ".join(f"{m:.1e}" for m in sorted(m for m in row["lossless"]["first_divergence_margins"] if m is not None))
        or "none"
    ),
}
DISTRIBUTION_COLUMNS: Columns = {
    "drafter": tables.drafter_label,
    "tokens": lambda row: f"{row['lossless']['tokens']:,}",
    "chi-square": lambda row: tables.format_number(row["lossless"]["chi_square"], 1),
    "p": lambda row: tables.format_number(row["lossless"]["p_value"], 3),
    "total variation": lambda row: tables.format_number(row["lossless"]["tv"], 4),
    "baseline's own": lambda row: tables.format_number(row["lossless"]["null_tv"], 4),
    "in the order of q/p": lambda row: (
        tables.format_fit(fit) if (fit := row["lossless"]["by_draft"]) is not None else "-"
    ),
}


def write_page(out: Path, rows: Sequence[Row], environment: Mapping[str, Any]) -> None:
    """Write report.html and its figures from the rows and environment of a report, and the traces already in `out`."""
    figures = evaluation_figures(rows, environment.get("sizes"))
    write_page_files(out, evaluation_page(rows, environment, figures, read_traces(out)), figures)


def write_page_files(out: Path, page: str, figures: Mapping[str, Figure]) -> None:
    write_text(out / PAGE_FILE, page)
    for name, figure in figures.items():
        write_text(out / FIGURES_FOLDER / f"{name}.svg", figure.file())


def read_traces(folder: Path) -> Trace | None:
    """Return the traced responses of all shards; None where there are none."""

    def parse(file: Path) -> Trace:
        try:
            return trace_from_json(file.read_text())
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} is not a trace of the explorer; remove it and evaluate again") from error

    return Trace.merge_shards([parse(file) for file in sorted(folder.glob(TRACE_FILES))])


def rebuild_page(folder: Path) -> Path:
    """Render the page and figures of a finished evaluation again; return the path of the page."""
    file = folder / "report.json"
    try:
        report = json.loads(file.read_text())
        rows, environment = report["rows"], report["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a report.json of evaluate.py; name the folder of an evaluation") from error
    if not all("alpha" in row for row in rows):  # answer files of others hold no single steps
        raise InputError(f"{file} is not of an evaluation; `python -m studies.external_logs` renders answer files")
    write_page(folder, rows, environment)
    return folder / PAGE_FILE


def evaluation_page(
    rows: Sequence[Row], environment: Mapping[str, Any], figures: Mapping[str, Figure], trace: Trace | None
) -> str:
    """Return report.html of the rows and environment of a report. trace: None where no response was traced."""
    first = rows[0]
    title = f"{first['benchmark']}, {first['decoding']} decoding, base {environment['base']}"
    about = f"{first['hardware']}, {first['dtype']}, seed {first['seed']}, {environment['date']}"
    columns = (RESULT_COLUMNS, TEXT_COLUMNS, tables.DETAIL_COLUMNS)
    sections = {
        "Results": render("results", about=about, command=environment["command"], tables=columns, rows=rows),
        "Figures": render("figures", figures=figures, empty="Nothing to draw: no question is finished."),
        "Explorer": explorer_section(trace),
        "Losslessness": losslessness_section(rows, environment, trace),
        "Definitions": render("definitions", definitions=DEFINITIONS),
    }
    return render("page", title=title, sections=sections)


def losslessness_section(rows: Sequence[Row], environment: Mapping[str, Any], trace: Trace | None) -> Markup:
    """Return whether the output stayed the same, how certain that is, and in which environment."""
    noise: dict[str, float] = {}  # the largest that was observed of a top-2 margin, by method
    for answer in trace.answers if trace is not None else ():  # only traced responses have it
        if answer.noise is not None:
            noise[answer.contestant] = max(answer.noise, noise.get(answer.contestant, 0.0))
    observed: Columns = {"noise of a margin": lambda row: format_noise(noise.get(row["drafter"]))}
    return render(
        "losslessness",
        statements=statements(rows, dict(environment)),
        rows=rows,
        equality=EQUALITY_COLUMNS | observed,
        rounding_note=rounding_note(rows[0]["dtype"], max(noise.values(), default=None)),
        tested=[row for row in rows if row["lossless"]["tokens"] is not None],
        distribution=DISTRIBUTION_COLUMNS,
        facts=environment_facts(rows, environment),
    )


def format_noise(noise: float | None) -> str:
    return "not measured" if noise is None else f"{noise:.1e}"


def rounding_note(dtype: str, noise: float | None) -> str:
    if any(str(half) == f"torch.{dtype}" for half in HALF_PRECISION_ROUNDING):
        bound = (
            f"In {dtype} both responses are decoded once more, and the base in float32 reads the same trees. "
            "A divergence is rounding if these logits are those of the text alone, and those that chose the tokens "
            f"differ from them at most {NOISE_RATIO:g} times as much as a plain forward pass in {dtype} does. Where "
            f"float32 is impossible, one at a margin below {MAX_ROUNDINGS} roundings of the top logit is undecided, a "
            "larger one wrong."
        )
    else:
        bound = (
            f"Where tokens diverge at a margin below {TIE_MARGIN:g}, both methods decode again in float64 and must "
            "agree; at a larger margin the divergence is wrong."
        )
    if noise is None:
        return f"{bound} The noise of margins was not measured here (trace.questions=0)."
    return (
        f"{bound} The noise of a margin is the largest difference between the base model's top-2 margin in a step and "
        f"in one forward pass over the finished text; here it is at most {noise:.1e}."
    )


def environment_facts(rows: Sequence[Row], environment: Mapping[str, Any]) -> dict[str, str]:
    git = environment["git"]
    commit = "not under git" if git is None else git["commit"] + (" (with changes)" if git["dirty"] else "")
    return {
        "base": environment["base"],
        "base's fingerprint": ", ".join(f"{key} {value}" for key, value in rows[0]["fingerprint"].items()),
        "hardware": environment["hardware"],
        "precision": rows[0]["dtype"],
        "forward passes": environment.get("reads") or "not recorded",  # by reports of older versions
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "commit": commit,
        "seeds": ", ".join(map(str, environment["seeds"])),
        "questions": f"{environment['questions']['finished']} of {environment['questions']['asked']} finished",
        "date": environment["date"],
        "command": environment["command"],
    }
