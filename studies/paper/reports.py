"""Our own reports as a published table may have them: which row fills a cell, and in words why others do not.

It knows rows of report.json, and no cell's value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ctcdraft.errors import InputError
from ctcdraft.evaluation.benchmarks import PUBLISHED_SIZES
from ctcdraft.evaluation.records import AUTOREGRESSIVE

Row = Mapping[str, Any]
CellKey = tuple[str, str, str]  # drafter, benchmark, base


@dataclass(frozen=True)
class MeasuredRow:
    """A row that may be printed: it is greedy and has its certificate. made: when its report was, "" where unsaid."""

    report: str
    date: str
    row: Row
    key: CellKey

    @classmethod
    def of(cls, report: str, made: str, row: Row) -> Self:
        return cls(report, made, row, (row["drafter"], row["benchmark"], row["fingerprint"]["base"]))

    @property
    def source(self) -> str:
        details = [self.date or "undated", *([f"{self.row['nodes']} nodes"] if "nodes" in self.row else [])]
        return f"{self.report} ({', '.join(details)})"

    @property
    def circumstances(self) -> str:
        """What a number does not say of itself: how many questions, which machine, which precision."""
        row = self.row
        asked, whole = row["prompts"], PUBLISHED_SIZES.get(row["benchmark"])
        part = f"only {asked:,} of {whole:,} questions" if whole and asked < whole else f"{asked:,} questions"
        close = row["lossless"]["owed"]["undecided"]
        undecided = [f"on {close} of them words differ at a close call, which is undecided"] if close else []
        details = [part, *undecided, row.get("hardware", "hardware unsaid"), row.get("dtype", "dtype unsaid")]
        return f"{self.source}: {'; '.join(details)}"


def read_reports(names: Sequence[str]) -> tuple[list[MeasuredRow], list[str]]:
    """All rows that may be printed, and a sentence for those that may not."""
    kept, left_out = [], []
    for name in names:
        try:
            report = json.loads(Path(name).read_text())
            made = str(report.get("environment", {}).get("date", ""))
            rows = [row for row in report["rows"] if row["drafter"] != AUTOREGRESSIVE]
            faults = [(row, exclusion_reason(row)) for row in rows]
            kept += [MeasuredRow.of(name, made, row) for row, why in faults if why is None]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{name} is no report.json of questions that evaluate.py asked; give such files as table.reports="
            ) from error
        left_out += group_sentences((name, row["drafter"], why) for row, why in faults if why is not None)
        if not rows:
            left_out.append(f"{name}: left out, it holds nobody but autoregression")
    return kept, left_out


def exclusion_reason(row: Row) -> str | None:
    """Why a row is not printed: where words differ that were owed, nothing is; None where it may be."""
    if row["temperature"] != 0:
        return f"sampled at temperature {row['temperature']:g}, where the table is greedy"
    if not row["prompts"]:
        return "no question is finished"
    if wrong := row["lossless"]["owed"]["wrong"]:
        return f"not certified (on {wrong} of {row['prompts']:,} questions its words are not autoregression's)"
    return None


def select_rows(
    measured: Sequence[MeasuredRow], places: Collection[CellKey]
) -> tuple[dict[CellKey, MeasuredRow], list[str]]:
    """The newest row of every place, and a sentence for each that stands in none."""
    fits = {place: [one for one in measured if one.key == place] for place in places}
    taken = {place: newest_row(rows) for place, rows in fits.items() if rows}
    strangers = [(one.report, one.key[0], mismatch_reason(one.key, places)) for one in measured if one.key not in taken]
    return taken, [*group_sentences(strangers), *describe_duplicates(fits, taken)]


def newest_row(rows: Sequence[MeasuredRow]) -> MeasuredRow:
    """Of those made at once the last one."""
    return max(reversed(rows), key=lambda one: one.date)


def describe_duplicates(
    fits: Mapping[CellKey, Sequence[MeasuredRow]], taken: Mapping[CellKey, MeasuredRow]
) -> Iterator[str]:
    for (drafter, benchmark, base), rows in fits.items():
        others = [one.source for one in rows if one is not taken.get((drafter, benchmark, base))]
        if others:
            yield (
                f"{drafter} on {benchmark} with {base} was measured {len(rows)} times: the newest is taken, "
                f"{taken[drafter, benchmark, base].source}, and not {', '.join(others)}"
            )


def mismatch_reason(place: CellKey, places: Collection[CellKey]) -> str:
    """Why a row fits no cell."""
    known = [set(values) for values in zip(*places, strict=True)]
    for kind, value, known_values in reversed(list(zip(("drafter", "benchmark", "base"), place, known, strict=True))):
        if value not in known_values:
            return f"{kind} {value} is in no row" if kind != "drafter" else "no row is of that drafter"
    return f"no row is of it on {place[1]} with {place[2]}"


def group_sentences(found: Any) -> list[str]:
    """(report, drafter, why) of rows   ->   one sentence for all drafters of a report of whom the same is to be said"""
    drafters: dict[tuple[str, str], list[str]] = {}
    for report, drafter, why in found:
        drafters.setdefault((report, why), []).append(drafter)
    return [f"{report}: {', '.join(dict.fromkeys(names))} left out, {why}" for (report, why), names in drafters.items()]
