"""The report of recorded runs: every number with the sentences that belong beside it. It prints what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctcdraft.evaluation.recorded_comparison import Comparison, Note
from ctcdraft.evaluation.recorded_metrics import DEFINITIONS, SPEEDUPS
from ctcdraft.evaluation.report import Row, number, table, with_interval
from ctcdraft.files import write_text

COLUMNS: dict[str, Callable[[Row], str]] = {
    "prompts": lambda row: f"{row['prompts']:,}",
    "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
    "tau_mean": lambda row: with_interval(row["tau_mean"], row["tau_mean_ci"]),
    "tau_paper": lambda row: with_interval(row["tau_paper"], row["tau_paper_ci"]),
    "speedup": lambda row: with_interval(row["speedup"], row["speedup_ci"]),
    "speedup_paper": lambda row: with_interval(row["speedup_paper"], row["speedup_paper_ci"]),
    "speedup_turns": lambda row: with_interval(row["speedup_turns"], row["speedup_turns_ci"]),
    "tokens_per_second": lambda row: number(row["tokens_per_second"], 1),
    "equal": lambda row: "-" if row["equal"] is None else f"{row['equal']:,}",
    "doubled": lambda row: number(row["doubled_per_1000"]),
}


def write(out: Path, made: Comparison, environment: dict[str, Any]) -> None:
    held = {"rows": made.rows, "notes": [vars(note) for note in made.notes], "environment": environment}
    write_text(out / "report.json", json.dumps(held, indent=1, allow_nan=False) + "\n")
    write_text(out / "report.md", markdown(made, environment))


def marked(name: str, arm: str, notes: Sequence[Note]) -> str:
    """` (1, 3)`: the numbers of the notes that belong beside a field of an arm. A speed-up has two arms' notes."""
    found = [
        str(place)
        for place, note in enumerate(notes, 1)
        if name in note.about and (note.arm in ("", arm) or name in SPEEDUPS)
    ]
    return f" ({', '.join(found)})" if found else ""


def cells(row: Row, arm: str, notes: Sequence[Note]) -> list[str]:
    return [cell(row) + marked(name, arm, notes) for name, cell in COLUMNS.items()]


def lines(made: Comparison, first: str, rows: Sequence[tuple[str, Row, str]]) -> str:
    """A table whose first column is given: (its cell, the row, its arm)."""
    columns: dict[str, Callable[[Row], str]] = {first: lambda row: row["cells"][0]}
    for place, name in enumerate(COLUMNS, 1):
        columns[name] = lambda row, place=place: row["cells"][place]  # type: ignore[misc]
    return table([{"cells": [label, *cells(row, arm, made.notes)]} for label, row, arm in rows], columns)


def numbered(notes: Sequence[Note]) -> list[str]:
    return [f"({place}) {f'{note.arm}: ' if note.arm else ''}{note.text}" for place, note in enumerate(notes, 1)]


def markdown(made: Comparison, environment: dict[str, Any]) -> str:
    run = made.rows[0]
    arms = [(row["drafter"], row, row["drafter"]) for row in made.rows]
    parts = [
        f"# Recorded: {run['drafter']}",
        f"Read on {environment['date']}\n\n    {environment['command']}",
        lines(made, "arm", arms),
        "\n".join(f"- {note}" for note in numbered(made.notes)),
    ]
    if run["categories"]:
        parts += ["## Categories", lines(made, "category", [(name, row, run["drafter"]) for name, row in
                                                            run["categories"].items()])]  # fmt: skip
    parts += ["## What the words mean", "\n".join(f"- **{word}**: {text}" for word, text in DEFINITIONS.items())]
    return "\n\n".join(parts) + "\n"


def terminal(made: Comparison) -> str:
    """One measure a line, the arms beside each other, then the notes."""
    shown = [["", *(row["drafter"] for row in made.rows)]]
    all_cells = [cells(row, row["drafter"], made.notes) for row in made.rows]
    shown += [[name, *(column[place] for column in all_cells)] for place, name in enumerate(COLUMNS)]
    widths = [max(len(line[column]) for line in shown) for column in range(len(shown[0]))]
    said = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in shown]
    return "\n".join([*said, "", *numbered(made.notes)])
