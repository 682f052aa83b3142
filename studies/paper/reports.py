"""The rows of our reports that fill the cells of a published table, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ctcdraft.errors import InputError
from ctcdraft.evaluation.benchmarks import PUBLISHED_SIZES
from ctcdraft.evaluation.records import AUTOREGRESSIVE, SAME_TOKENS

Row = Mapping[str, Any]
CellKey = tuple[str, str, str]  # drafter, benchmark, base


@dataclass(frozen=True)
class MeasuredRow:
    """A greedy row that passed the losslessness check."""

    report: str
    date: str  # of its report; "" where that has none
    row: Row
    key: CellKey

    @classmethod
    def of(cls, report: str, date: str, row: Row) -> Self:
        return cls(report, date, row, (row["drafter"], row["benchmark"], row["fingerprint"]["base"]))

    @property
    def source(self) -> str:
        details = [self.date or "undated", *([f"{self.row['nodes']} nodes"] if "nodes" in self.row else [])]
        return f"{self.report} ({', '.join(details)})"

    @property
    def circumstances(self) -> str:
        row = self.row
        count, whole = row["prompts"], PUBLISHED_SIZES.get(row["benchmark"])
        part = f"only {count:,} of {whole:,} questions" if whole and count < whole else f"{count:,} questions"
        ties = row["lossless"]["owed"]["undecided"]
        undecided = [f"on {ties} of them tokens differ at a near tie, which is undecided"] if ties else []
        details = [part, *undecided, row.get("hardware", "hardware unknown"), row.get("dtype", "dtype unknown")]
        return f"{self.source}: {'; '.join(details)}"


def read_reports(names: Sequence[str]) -> tuple[list[MeasuredRow], list[str]]:
    """Return all rows that may be printed, and a sentence for those that may not. Raises InputError."""
    kept, left_out = [], []
    for name in names:
        try:
            report = json.loads(Path(name).read_text())
            date = str(report.get("environment", {}).get("date", ""))
            rows = [row for row in report["rows"] if row["drafter"] != AUTOREGRESSIVE]
            reasons = [(row, exclusion_reason(row)) for row in rows]
            kept += [MeasuredRow.of(name, date, row) for row, why in reasons if why is None]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            given = "give those of evaluate.py as table.reports="
            raise InputError(f"{name} is not a report.json of a benchmark; {given}") from error
        left_out += group_sentences((name, row["drafter"], why) for row, why in reasons if why is not None)
        if not rows:
            left_out.append(f"{name}: left out, it holds autoregression alone")
    return kept, left_out


def exclusion_reason(row: Row) -> str | None:
    if row["temperature"] != 0:
        return f"sampled at temperature {row['temperature']:g}, where the table is greedy"
    if not row["prompts"]:
        return "no question is finished"
    if row["lossless"].get("owes", SAME_TOKENS) != SAME_TOKENS:
        return "decoded with a verifier that does not promise the baseline's tokens"
    if wrong := row["lossless"]["owed"]["wrong"]:
        return f"not lossless (on {wrong} of {row['prompts']:,} questions its tokens are not the baseline's)"
    return None


def select_rows(
    measured: Sequence[MeasuredRow], places: Collection[CellKey]
) -> tuple[dict[CellKey, MeasuredRow], list[str]]:
    """Return the newest row of every cell, and a sentence for each row that fits none or is older."""
    fits = {place: [one for one in measured if one.key == place] for place in places}
    taken = {place: newest_row(rows) for place, rows in fits.items() if rows}
    unused = [(one.report, one.key[0], mismatch_reason(one.key, places)) for one in measured if one.key not in taken]
    return taken, [*group_sentences(unused), *describe_duplicates(fits, taken)]


def newest_row(rows: Sequence[MeasuredRow]) -> MeasuredRow:
    # max keeps the first of equals: of equal dates the last row is taken.
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
    known = [set(values) for values in zip(*places, strict=True)]
    for kind, value, known_values in reversed(list(zip(("drafter", "benchmark", "base"), place, known, strict=True))):
        if value not in known_values:
            return f"{kind} {value} is in no row" if kind != "drafter" else "no row is of that drafter"
    return f"no row is of it on {place[1]} with {place[2]}"


def group_sentences(rows: Any) -> list[str]:
    """Return one sentence for all drafters of a report with the same reason, from (report, drafter, reason)."""
    drafters: dict[tuple[str, str], list[str]] = {}
    for report, drafter, why in rows:
        drafters.setdefault((report, why), []).append(drafter)
    return [f"{report}: {', '.join(dict.fromkeys(names))} left out, {why}" for (report, why), names in drafters.items()]
