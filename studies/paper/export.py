"""A published table beside our results as Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from ctcdraft.io import write_text
from studies.paper.tables import MeasuredValue, PaperTable, TableCell

COLUMNS: dict[str, Callable[[TableCell], str]] = {
    "paper": lambda cell: "" if cell.paper is None else f"{cell.paper:.2f}",
    "recomputed": lambda cell: format_value(cell.recomputed),
    "corrected": lambda cell: format_value(cell.corrected),
    "ours": lambda cell: format_value(cell.ours),
    "difference": lambda cell: format_value(cell.difference, signed=True),
}
HEADER = ["benchmark", "drafter", "base", "measure", *COLUMNS]
COLUMN_NOTES = (
    "- **paper**: as printed; **recomputed**: from the authors' answer files by the paper's convention (beta divides "
    "by the last 0-based index; gamma is a ratio of mean speeds per question)",
    "- **corrected**: from the same files by ours (tau and speed-up, ratios of totals); **ours**: measured with this "
    "framework, as described in the numbered note; **difference**: ours minus corrected",
    "- intervals: 95 % bootstrap over questions; that of a difference adds the squared widths of both sides as if they "
    "were independent, which is rather too wide, since both decoded the same questions",
    "- speed-ups of different machines and base versions are not comparable; an empty cell was not run, an empty "
    "one under `paper` not by its authors either; the paper and its files are of float16 on a card they do not name",
)
LATEX_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
LATEX_ESCAPES |= {">": r"\textgreater{}", "|": r"\textbar{}", "`": "'", **{sign: rf"\{sign}" for sign in "_%&#${}"}}


def format_value(measured: MeasuredValue | None, signed: bool = False) -> str:
    if measured is None:
        return ""
    sign, bounds = "+" if signed else "", measured.interval
    return f"{measured.value:{sign}.2f}" + (f" [{bounds[0]:{sign}.2f}, {bounds[1]:{sign}.2f}]" if bounds else "")


def table_rows(table: PaperTable, marked: bool = True) -> list[list[str]]:
    """Return the cells as text; `marked` adds to a value of ours the number of its note."""
    rows = []
    for cell in table.cells:
        values = {name: column(cell) for name, column in COLUMNS.items()}
        if marked and cell.measured is not None:
            values["ours"] += f" ({table.measured.index(cell.measured) + 1})"
        rows.append([cell.benchmark, cell.drafter, table.bases[cell.base], cell.measure, *values.values()])
    return rows


def notes_by_heading(table: PaperTable) -> dict[str, list[str]]:
    sections = {
        "How ours was measured": [f"({number}) {one}" for number, one in enumerate(table.measured, 1)],
        "Rows of our reports that are left out": list(table.left_out),
        "What the paper and its files do not hold": list(table.notes),
    }
    return {heading: notes for heading, notes in sections.items() if notes}


def markdown(table: PaperTable) -> str:
    """Return the table with its notes and, for every empty cell, the command that fills it."""
    rows = [HEADER, ["---"] * len(HEADER), *table_rows(table)]
    parts = [f"# {table.title}", "\n".join("| " + " | ".join(row) + " |" for row in rows), "\n".join(COLUMN_NOTES)]
    for heading, notes in notes_by_heading(table).items():
        parts += [f"## {heading}", "\n".join(f"- {note}" for note in notes)]
    # One command fills several cells, both measures and all categories of a benchmark, and is printed once.
    missing = dict.fromkeys(cell.fill_command for cell in table.cells if cell.ours is None)
    if missing:
        parts.append("## Commands that fill the empty cells")
        parts += [f"    {command}" for command in missing]
    return "\n\n".join(parts) + "\n"


def latex(table: PaperTable) -> str:
    notes = [note for notes in notes_by_heading(table).values() for note in latex_escape(notes)]
    lines = [rf"\begin{{tabular}}{{{'llll' + 'r' * len(COLUMNS)}}}", r"\toprule", " & ".join(HEADER) + r" \\"]
    lines += [r"\midrule", *(" & ".join(latex_escape(row)) + r" \\" for row in table_rows(table)), r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", *(rf"\par{{\footnotesize {note}}}" for note in notes), ""])


def latex_escape(texts: Sequence[str]) -> list[str]:
    return ["".join(LATEX_ESCAPES.get(sign, sign) for sign in text) for text in texts]


def table_csv(table: PaperTable) -> str:
    rows = []
    for row, cell in zip(table_rows(table, marked=False), table.cells, strict=True):
        rows.append([*row, cell.measured or "", cell.fill_command if cell.ours is None else ""])
    header = [*HEADER, "ours_measured", "to_fill"]
    return pd.DataFrame(rows, columns=header).to_csv(index=False, lineterminator="\n")


def notes_csv(table: PaperTable) -> str:
    # A file of their own, since in the table's file they would be rows of it.
    notes = [[about, note] for about, notes in notes_by_heading(table).items() for note in notes]
    return pd.DataFrame(notes, columns=["about", "note"]).to_csv(index=False, lineterminator="\n")


def write(out: Path, table: PaperTable) -> None:
    write_text(out / "table.md", markdown(table))
    write_text(out / "table.tex", latex(table))
    write_text(out / "table.csv", table_csv(table))
    write_text(out / "notes.csv", notes_csv(table))
