"""The rows of finished evaluations, those that may be printed. It knows report.json, nothing of how it came about."""

from __future__ import annotations

import json
from typing import Any

from ctcdraft.arena.book import EVALUATIONS, Book
from ctcdraft.errors import InputError

Row = dict[str, Any]


def row_name(run: str, reading: str | None) -> str:
    """What a run is called that is read in another way than its own: ctc@collapse"""
    return run if reading is None else f"{run}@{reading}"


def draft_seconds(row: Row) -> float | None:
    """Of a draft and the building of its tree; None where nothing was timed."""
    return None if row["time"]["draft"] is None else row["time"]["draft"] + row["time"]["tree"]


def rows_of(book: Book, evaluation: str) -> list[Row]:
    file = book.evaluation(evaluation) / "report.json"
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is no report of evaluate.py; remove its folder, and it is measured again") from error


def certified(row: Row) -> bool:
    """Whether its text was compared with autoregression's, and nothing in it is wrong."""
    lossless = row["lossless"]
    return bool(lossless["prompts"]) and lossless["equal"] is not None and not lossless["owed"]["wrong"]


def all_rows(book: Book) -> list[Row]:
    """With the evaluation's own name and kind in each."""
    return [
        {**row, "evaluation": name, "kind": entry["kind"]}
        for name, entry in book.read(EVALUATIONS).items()
        for row in rows_of(book, name)
    ]
