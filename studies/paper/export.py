"""A table as Markdown, LaTeX (booktabs) and CSV. It knows cells, and nothing of where their values come from."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from ctcdraft.io import write_text
from studies.paper.tables import MeasuredValue, PaperTable, TableCell


class HoursPlanner(Protocol):
    """Who plans the hours that would fill a cell: studies/paper/gpu_hours.py."""

    def hours(self, cell: TableCell) -> Any: ...

    def assumptions(self) -> Sequence[str]: ...


COLUMNS: dict[str, Callable[[TableCell], str]] = {
    "paper": lambda cell: "" if cell.paper is None else f"{cell.paper:.2f}",
    "recomputed": lambda cell: format_value(cell.recomputed),
    "corrected": lambda cell: format_value(cell.corrected),
    "ours": lambda cell: format_value(cell.ours),
    "difference": lambda cell: format_value(cell.difference, signed=True),
}
COLUMN_NOTES = (
    "- **paper**: as printed; **recomputed**: from the authors' answer files by the paper's convention (beta divides "
    "by the last 0-based index; gamma is a ratio of mean per-question speeds)",
    "- **corrected**: from the same files by ours (tau and speed-up, ratios of totals); **ours**: measured with this "
    "framework, under what the number in brackets stands for; **difference**: ours less corrected",
    "- intervals: 95 % bootstrap over questions; that of a difference joins the widths of both sides as if they were "
    "independent (their squares added), which is rather too wide, since both were asked the same questions",
    "- speed-ups of different machines and base versions are not comparable; an empty cell was not run, an empty "
    "one under `paper` not by its authors either; the paper and its files are of float16 on a card they do not name",
)
LATEX_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
LATEX_ESCAPES |= {">": r"\textgreater{}", "|": r"\textbar{}", "`": "'", **{sign: rf"\{sign}" for sign in "_%&#${}"}}


def format_value(found: MeasuredValue | None, signed: bool = False) -> str:
    if found is None or found.value is None:
        return ""
    sign = "+" if signed else ""
    bounds = f" [{found.interval[0]:{sign}.2f}, {found.interval[1]:{sign}.2f}]" if found.interval else ""
    return f"{found.value:{sign}.2f}{bounds}"


def table_rows(table: PaperTable, marked: bool = True) -> list[list[str]]:
    """The cells as text. marked: behind a value of ours stands its footnote's number."""
    made = []
    for cell in table.cells:
        values = {name: column(cell) for name, column in COLUMNS.items()}
        if marked and cell.measured is not None:
            values["ours"] += f" ({table.measured.index(cell.measured) + 1})"
        made.append([cell.benchmark, cell.drafter, table.bases[cell.base], cell.measure, *values.values()])
    return made


def notes_by_heading(table: PaperTable) -> dict[str, list[str]]:
    """What is to be said below the table, by headings; the footnotes first."""
    sections = {
        "What ours was measured with": [f"({number}) {one}" for number, one in enumerate(table.measured, 1)],
        "What is left out of our reports": list(table.left_out),
        "What the paper and its files do not hold": list(table.notes),
    }
    return {heading: notes for heading, notes in sections.items() if notes}


def column_names() -> list[str]:
    return ["benchmark", "drafter", "base", "measure", *COLUMNS]


def markdown(table: PaperTable, filling: HoursPlanner | None = None) -> str:
    """filling: plans the hours of the commands that would fill the empty cells."""
    rows = [column_names(), ["---"] * len(column_names()), *table_rows(table)]
    parts = [f"# {table.title}", "\n".join("| " + " | ".join(row) + " |" for row in rows), "\n".join(COLUMN_NOTES)]
    for heading, notes in notes_by_heading(table).items():
        parts += [f"## {heading}", "\n".join(f"- {note}" for note in notes)]
    missing = {cell.fill_command: cell for cell in table.cells if cell.ours is None}
    if missing:
        parts.append("## What would fill the empty cells")
        parts += ["\n".join(f"- {sentence}" for sentence in filling.assumptions())] if filling is not None else []
        parts += [
            f"{describe_planned_hours(cell, filling)}\n\n    {command}".lstrip() for command, cell in missing.items()
        ]
    return "\n\n".join(parts) + "\n"


def latex(table: PaperTable) -> str:
    columns = "llll" + "r" * len(COLUMNS)
    body = [" & ".join(latex_escape(row)) + r" \\" for row in table_rows(table)]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(column_names()) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *(
                rf"\par{{\footnotesize {note}}}"
                for notes in notes_by_heading(table).values()
                for note in latex_escape(notes)
            ),
            "",
        ]
    )


def latex_escape(texts: Sequence[str]) -> list[str]:
    return ["".join(LATEX_ESCAPES.get(sign, sign) for sign in text) for text in texts]


def table_csv(table: PaperTable, filling: HoursPlanner | None = None) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*column_names(), "ours_measured", "to_fill", "hours_planned"])
    for row, cell in zip(table_rows(table, marked=False), table.cells, strict=True):
        empty = [cell.fill_command, describe_planned_hours(cell, filling)] if cell.ours is None else ["", ""]
        writer.writerow([*row, cell.measured or "", *empty])
    return text.getvalue()


def notes_csv(table: PaperTable) -> str:
    """The notes as a file of their own: in the table's they would be rows of it."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(
        [["about", "note"], *([about, note] for about, notes in notes_by_heading(table).items() for note in notes)]
    )
    return text.getvalue()


def describe_planned_hours(cell: TableCell, filling: HoursPlanner | None) -> str:
    """The hours of the command that would fill a cell; nothing where nobody plans or no rate is known."""
    hours = None if filling is None else filling.hours(cell)
    return "" if hours is None else str(hours)


def write(out: Path, table: PaperTable, filling: HoursPlanner | None = None) -> None:
    write_text(out / "table.md", markdown(table, filling))
    write_text(out / "table.tex", latex(table))
    write_text(out / "table.csv", table_csv(table, filling))
    write_text(out / "notes.csv", notes_csv(table))
