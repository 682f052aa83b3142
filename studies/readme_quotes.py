"""A table that a README quotes from results/: where it stands, and its rows written anew. It knows no table by name.

A table is known by its header, stands where its README has it, and keeps the columns that are written by hand, each
with its row, which is known by its first measured cell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError

Row = dict[str, Any]
Report = Mapping[str, Row]  # by drafter
BY_HAND = None


def read_report(folder: Path) -> Report:
    file = folder / "report.json"
    try:
        return {row["drafter"]: row for row in json.loads(file.read_text())["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} is no report.json of evaluate.py, but a README quotes it; see its quotations.py"
        ) from error


@dataclass(frozen=True)
class Quoted:
    """file: the README. reports: folders of results/, in the order of the rows. read: what such a folder holds.
    each: what of that makes a row. columns: by header, the cell of such a row, or BY_HAND."""

    file: str
    reports: Sequence[str]
    each: Callable[[Any], Iterable[Any]]
    columns: Mapping[str, Callable[[Any], str] | None]
    read: Callable[[Path], Any] = read_report

    def header(self) -> str:
        return line(self.columns)

    def rows(self, results: Path) -> Iterator[Any]:
        for folder in self.reports:
            yield from self.each(self.read(results / folder))

    def replaced(self, text: str, results: Path) -> str:
        """The README with this table's cells as the reports have them."""
        lines = text.split("\n")
        if self.header() not in lines:
            raise InputError(f"{self.file} has no table with the header {self.header()}; see quotations.py")
        first = lines.index(self.header()) + 2  # behind the header and its rule
        # The file may end with the table.
        last = next((place for place in range(first, len(lines)) if not lines[place].startswith("|")), len(lines))
        by_hand = self.by_hand(lines[first:last])
        made = []
        for row in self.rows(results):
            measured = [BY_HAND if cell is BY_HAND else cell(row) for cell in self.columns.values()]
            kept = iter(by_hand.pop(measured[self.key], [""] * measured.count(BY_HAND)))
            made.append(line([next(kept) if cell is BY_HAND else cell for cell in measured]))
        if lost := [f"{key}: {', '.join(words)}" for key, words in by_hand.items() if any(words)]:
            raise InputError(
                f"{self.file} has words written by hand in a row that is of no report here ({lost[0]}); give the row "
                f"one of the names under {list(self.columns)[self.key]}, or remove it"
            )
        return "\n".join([*lines[:first], *made, *lines[last:]])

    @property
    def key(self) -> int:
        """The column that tells rows apart: the first that is not written by hand."""
        return next(place for place, cell in enumerate(self.columns.values()) if cell is not BY_HAND)

    def by_hand(self, rows: Sequence[str]) -> dict[str | None, list[str]]:
        """What was written by hand, by what the row's key says: rows may come, go and change places."""
        if BY_HAND not in self.columns.values():
            return {}
        kept: dict[str | None, list[str]] = {}
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            if len(cells) != len(self.columns) or cells[self.key] in kept:
                raise InputError(
                    f"{self.file}: the row {row} has not the {len(self.columns)} columns of its table, or is there "
                    "twice; mend it by hand"
                )
            pairs = zip(self.columns.values(), cells, strict=True)
            kept[cells[self.key]] = [said for cell, said in pairs if cell is BY_HAND]
        return kept


def line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
