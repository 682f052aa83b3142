"""A paper's table beside what its authors' logs say and what we measured. It measures nothing, and fills no gap.

Every value is named (drafter, benchmark, base, measure); what was not run is an empty cell with the command that
would fill it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.recorded import read_run
from ctcdraft.evaluation.recorded_comparison import Comparison, compare

Row = Mapping[str, Any]
PUBLISHED = Path(__file__).parent / "published"
OWN_NAME = {"speedup_paper": "speedup", "tau_paper": "tau"}  # the measure we stand by, for each of the paper's


@dataclass(frozen=True)
class Found:
    """A measured value and its 95 % interval, where there is one."""

    value: float | None
    interval: Sequence[float] | None = None


@dataclass(frozen=True)
class Cell:
    """One value of a published table, and what else is known of it.

    measure: the paper's word, gamma or beta. paper: as printed. recomputed: by the paper's convention from the
    authors' logs; corrected: by ours, from the same logs. ours: measured here, by our convention.
    """

    drafter: str
    benchmark: str
    base: str
    measure: str
    paper: float
    recomputed: Found | None
    corrected: Found | None
    ours: Found | None

    @property
    def difference(self) -> Found | None:
        """Ours less the corrected value of the logs: one convention on both sides, and an interval only for ours."""
        if self.ours is None or self.corrected is None or None in (self.ours.value, self.corrected.value):
            return None
        less = self.corrected.value or 0.0
        interval = self.ours.interval and [bound - less for bound in self.ours.interval]
        return Found((self.ours.value or 0.0) - less, interval)

    @property
    def to_fill(self) -> str:
        """The commands that would measure this cell."""
        run, benchmark = f"runs/{self.drafter}-{self.base}", self.benchmark.partition("/")[0]
        return (
            f"python train.py base={self.base} drafter={self.drafter} corpus=sharegpt corpus.path=FILES run={run} && "
            f"python evaluate.py checkpoint={run} benchmark={benchmark} benchmark.path=FILE decoding.nodes=64"
        )


@dataclass(frozen=True)
class Table:
    """bases: what to call each of them. notes: what the authors' files do not hold, and what that does to a number."""

    title: str
    bases: Mapping[str, str]
    cells: Sequence[Cell]
    notes: Sequence[str]


def read_table(name: str, recorded: str | None, reports: Sequence[str]) -> Table:
    """name: a file of published values; recorded: a folder of the authors' answer files; reports: our report.json."""
    file = PUBLISHED / f"{name}.yaml"
    if not file.is_file():
        there = ", ".join(sorted(one.stem for one in PUBLISHED.glob("*.yaml")))
        raise InputError(f"no published table {name}; there are {there}")
    from omegaconf import OmegaConf

    said: Any = OmegaConf.to_container(OmegaConf.load(file))
    logs = dict(logged(Path(recorded), said)) if recorded is not None else {}
    made = list(cells(said, logs, list(own_rows(reports))))
    notes = [f"{note.arm or 'both arms'}: {note.text}" for pair in logs.values() for note in pair.notes]
    return Table(said["title"], said["bases"], made, [*swapped(made), *dict.fromkeys(notes)])


def cells(
    said: Mapping[str, Any], logs: Mapping[tuple[str, str], Comparison], measured: Sequence[Row]
) -> Iterator[Cell]:
    for drafter, benchmarks in said["values"].items():
        for place, bases in benchmarks.items():
            benchmark, _, category = place.partition("/")
            for base, values in bases.items():
                log = logs.get((benchmark, base)) if drafter == "ctc" else None  # they published no other arm
                theirs = part(log.rows[0], category) if log is not None else None
                own = [row for row in measured if of(row) == (drafter, benchmark, base)]
                mine = part(own[-1], category) if own else None
                for (word, measure), paper in zip(said["measures"].items(), values, strict=True):
                    three = found(theirs, measure), found(theirs, OWN_NAME[measure]), found(mine, OWN_NAME[measure])
                    yield Cell(drafter, place, base, word, paper, *three)


def of(row: Row) -> tuple[str, str, str]:
    return row["drafter"], row["benchmark"], row["fingerprint"]["base"]


def swapped(made: Sequence[Cell]) -> Iterator[str]:
    """A sentence for every two values that the paper prints in each other's place."""
    for one, other in combinations([cell for cell in made if cell.recomputed and cell.recomputed.value], 2):
        same = (one.drafter, one.base, one.measure) == (other.drafter, other.base, other.measure)
        if same and not printed(one, one) and printed(one, other) and printed(other, one):
            yield (
                f"the paper prints {one.paper:.2f} for {one.benchmark} and {other.paper:.2f} for {other.benchmark}; "
                "its authors' files say the reverse"
            )


def printed(one: Cell, other: Cell) -> bool:
    """Whether the paper's value of the one is what the files say of the other, to the printed digit."""
    return other.recomputed is not None and f"{one.paper:.2f}" == f"{other.recomputed.value:.2f}"


def part(row: Row, category: str) -> Row | None:
    """The row itself, or that of one of its categories."""
    return row if not category else row["categories"].get(category)


def found(row: Row | None, measure: str) -> Found | None:
    return None if row is None else Found(row[measure], row.get(f"{measure}_ci"))


def logged(folder: Path, said: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Comparison]]:
    """Every pair of answer files that is there: BENCHMARK-BASE.jsonl.gz and BENCHMARK-BASE_baseline.jsonl.gz."""
    if not folder.is_dir():
        raise InputError(f"no folder of answer files at {folder}; give one as table.recorded=, or leave it out")
    for benchmark in sorted({place.partition("/")[0] for places in said["values"].values() for place in places}):
        for base in said["bases"]:
            files = [folder / f"{benchmark}-{base.replace('_', '-')}{arm}.jsonl.gz" for arm in ("", "_baseline")]
            if all(file.is_file() for file in files):
                run, baseline = (read_run(str(file)) for file in files)
                yield (benchmark, base), compare(run, baseline, seed=0)


def own_rows(reports: Sequence[str]) -> Iterator[Row]:
    """Greedy rows with a certificate: where words differ that were owed, nothing is printed."""
    for name in reports:
        try:
            rows = [row for row in json.loads(Path(name).read_text())["rows"] if certified(row)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{name} is no report.json of questions that evaluate.py asked; give such files as table.reports="
            ) from error
        yield from rows


def certified(row: Row) -> bool:
    return row["temperature"] == 0 and row["prompts"] > 0 and row["lossless"]["owed"]["wrong"] == 0
