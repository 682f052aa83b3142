"""A published table beside the values recomputed from the authors' answer files and those of our reports.

A cell is a drafter, benchmark, base and measure; what was not run is an empty cell with the command that fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import difference_interval
from studies.external_logs.compare import LogComparison, compare_logs
from studies.external_logs.read import read_log
from studies.paper.reports import CellKey, MeasuredRow, read_reports, select_rows

Row = Mapping[str, Any]
PUBLISHED_FOLDER = Path(__file__).parent / "published"
OUR_MEASURE = {"speedup_paper": "speedup", "tau_paper": "tau"}  # our measure for each of the paper's
# Shares of a step, in percent, and the phases of row["time"] that they consist of.
TIME_SHARES = {
    "share_read": ("read",),
    "share_draft": ("draft",),
    "share_tree": ("tree",),
    "share_other": ("verify", "keep", "other"),
}


@dataclass(frozen=True)
class MeasuredValue:
    value: float
    interval: Sequence[float] | None = None  # of 95 %


@dataclass(frozen=True)
class TableCell:
    """One value of a published table and its counterparts."""

    drafter: str
    benchmark: str
    base: str
    measure: str  # the paper's symbol, gamma or beta
    paper: float | None  # as printed; None where the paper leaves the cell out
    recomputed: MeasuredValue | None  # from the authors' answer files, by the paper's convention
    corrected: MeasuredValue | None  # from the same files, by our convention
    ours: MeasuredValue | None  # measured here, by our convention
    training: str  # overrides of train.py that train this drafter
    measured: str | None = None  # the report, number of questions, hardware and precision of ours

    @property
    def difference(self) -> MeasuredValue | None:
        """Ours minus the corrected value of the answer files, both by the same convention."""
        if self.ours is None or self.corrected is None:
            return None
        # A report does not hold the numbers of its questions, so the widths are added as independent ones.
        sides = self.ours.value, self.ours.interval, self.corrected.value, self.corrected.interval
        return MeasuredValue(self.ours.value - self.corrected.value, difference_interval(*sides))

    @property
    def fill_command(self) -> str:
        run, benchmark = f"runs/{self.drafter}-{self.base}", self.benchmark.partition("/")[0]
        return (
            f"python train.py base={self.base} {self.training} corpus=sharegpt corpus.path=FILES run={run} && "
            f"python evaluate.py checkpoint={run} benchmark={benchmark} benchmark.path=FILE decoding.nodes=64"
        )


@dataclass(frozen=True)
class PaperTable:
    title: str
    bases: Mapping[str, str]  # labels
    cells: Sequence[TableCell]
    notes: Sequence[str]  # on what the paper and its files do not hold
    left_out: Sequence[str] = ()  # rows of our reports that fill no cell

    @property
    def measured(self) -> list[str]:
        """How our values were measured, in the order of the cells: one numbered note each."""
        return list(dict.fromkeys(cell.measured for cell in self.cells if cell.measured is not None))


def read_table(name: str, recorded: str | None, reports: Sequence[str]) -> PaperTable:
    """Return a published table, filled from the authors' answer files in a folder and from our report.json files.

    Raises InputError.
    """
    file = PUBLISHED_FOLDER / f"{name}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(one.stem for one in PUBLISHED_FOLDER.glob("*.yaml")))
        raise InputError(f"no published table {name}; there are {names}")
    published: Any = OmegaConf.to_container(OmegaConf.load(file))
    logs = dict(read_log_pairs(Path(recorded), published)) if recorded is not None else {}
    measured, excluded = read_reports(reports)
    taken, unused = select_rows(measured, list(cell_keys(published)))
    cells = list(build_cells(published, logs, taken))
    notes = [*published.get("notes", []), *describe_swapped_values(cells), *log_notes(logs, published["bases"])]
    return PaperTable(published["title"], published["bases"], cells, notes, [*excluded, *unused])


def cell_keys(published: Mapping[str, Any]) -> Iterator[CellKey]:
    """Yield (drafter, benchmark, base) of every cell; categories belong to their benchmark."""
    for drafter, benchmarks in published["values"].items():
        for place, bases in benchmarks.items():
            yield from ((drafter, place.partition("/")[0], base) for base in bases)


def log_notes(logs: Mapping[tuple[str, str], LogComparison], bases: Mapping[str, str]) -> Iterator[str]:
    """Yield each note on the authors' files once, with the benchmarks and bases that it is about."""
    where: dict[tuple[str, str], list[str]] = {}
    for (benchmark, base), pair in logs.items():
        for note in pair.notes:
            where.setdefault((note.arm, note.text), []).append(f"{benchmark} {bases[base]}")
    for (arm, text), runs in where.items():
        yield f"{', '.join(runs)}, {arm or 'both arms'}: {text}"


def build_cells(
    published: Mapping[str, Any], logs: Mapping[tuple[str, str], LogComparison], taken: Mapping[CellKey, MeasuredRow]
) -> Iterator[TableCell]:
    published_runs = published.get("logged", "ctc")  # the drafter of the answer files
    for drafter, benchmarks in published["values"].items():
        training = published.get("training", "drafter={drafter}").format(drafter=drafter)
        for place, bases in benchmarks.items():
            benchmark, _, category = place.partition("/")
            for base, values in bases.items():
                log = logs.get((benchmark, base)) if drafter == published_runs else None
                theirs = category_row(log.rows[0], category) if log is not None else None
                own = taken.get((drafter, benchmark, base))
                mine = category_row(own.row, category) if own else None
                for (printed_name, measure), paper in zip(published["measures"].items(), values, strict=True):
                    own_name = OUR_MEASURE.get(measure, measure)
                    ours = measured_value(mine, own_name)
                    measured = own.circumstances if own is not None and ours is not None else None
                    known = measured_value(theirs, measure), measured_value(theirs, own_name), ours
                    yield TableCell(drafter, place, base, printed_name, paper, *known, training, measured)


def describe_swapped_values(cells: Sequence[TableCell]) -> Iterator[str]:
    """Yield a sentence for every two values that the paper prints in each other's place."""
    several = len({cell.base for cell in cells}) > 1
    for one, other in combinations([cell for cell in cells if cell.recomputed], 2):
        same = (one.drafter, one.base, one.measure) == (other.drafter, other.base, other.measure)
        if same and not matches_printed(one, one) and matches_printed(one, other) and matches_printed(other, one):
            yield (
                f"{f'of {one.base} ' * several}the paper prints {one.paper:.2f} for {one.benchmark} and "
                f"{other.paper:.2f} for {other.benchmark}; its authors' files say the reverse"
            )


def matches_printed(one: TableCell, other: TableCell) -> bool:
    """Return whether the paper's value of one cell is the recomputed value of the other, to the printed digit."""
    if one.paper is None or other.recomputed is None:
        return False
    return f"{one.paper:.2f}" == f"{other.recomputed.value:.2f}"


def category_row(row: Row, category: str) -> Row | None:
    return row if not category else row["categories"].get(category)


def measured_value(row: Row | None, measure: str) -> MeasuredValue | None:
    """Return a measure of a row; None where it was not measured."""
    if row is None:
        return None
    if measure not in TIME_SHARES:
        return None if row[measure] is None else MeasuredValue(row[measure], row.get(f"{measure}_ci"))
    time = row.get("time", {"read": None})  # answer files hold no times of phases
    if time["read"] is None:
        return None
    parts = {name: sum(time[part] for part in parts) for name, parts in TIME_SHARES.items()}
    return MeasuredValue(100 * parts[measure] / sum(parts.values()))


def read_log_pairs(folder: Path, published: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], LogComparison]]:
    """Yield every pair of answer files BENCHMARK-BASE.jsonl.gz and BENCHMARK-BASE_baseline.jsonl.gz in the folder."""
    if not folder.is_dir():
        raise InputError(f"no folder of answer files at {folder}; give one as table.recorded=, or leave it out")
    for benchmark in sorted({place.partition("/")[0] for places in published["values"].values() for place in places}):
        for base in published["bases"]:
            files = [folder / f"{benchmark}-{base.replace('_', '-')}{arm}.jsonl.gz" for arm in ("", "_baseline")]
            if all(file.is_file() for file in files):
                run, baseline = (read_log(str(file)) for file in files)
                yield (benchmark, base), compare_logs(run, baseline, seed=0)
