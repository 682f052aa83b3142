"""The tables that READMEs quote from results/: `python -m ctcdraft.evaluation.quoted` writes their cells anew.

A table is known by its header, stands where its README has it, and keeps the columns that are written by hand, each
with its row, which is known by its first measured cell. It knows reports, and measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError, tell_and_exit
from ctcdraft.evaluation.benchmarks import WHOLE
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.report import equal, named, number, with_interval
from ctcdraft.files import write_text

REPOSITORY = Path(__file__).parents[2]
Row = dict[str, Any]
Report = Mapping[str, Row]  # by drafter
BY_HAND = None


@dataclass(frozen=True)
class Quoted:
    """file: the README. reports: folders of results/, in the order of the rows. each: what of them makes a row.
    columns: by header, the cell of such a row, or BY_HAND."""

    file: str
    reports: Sequence[str]
    each: Callable[[Report], Sequence[Any]]
    columns: Mapping[str, Callable[[Any], str] | None]

    def header(self) -> str:
        return line(self.columns)

    def rows(self, results: Path) -> Iterator[Any]:
        for folder in self.reports:
            yield from self.each(read(results / folder / "report.json"))

    def replaced(self, text: str, results: Path) -> str:
        """The README with this table's cells as the reports have them."""
        lines = text.split("\n")
        if self.header() not in lines:
            raise InputError(f"{self.file} has no table with the header {self.header()}; see {Path(__file__).name}")
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


def read(file: Path) -> Report:
    try:
        return {row["drafter"]: row for row in json.loads(file.read_text())["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no report.json of evaluate.py, but a README quotes it; see quoted.py") from error


def every_drafter(report: Report) -> Sequence[Row]:
    return list(report.values())


def once(report: Report) -> Sequence[Report]:
    return [report]


def only_ctc(report: Report) -> Sequence[Row]:
    return [report["ctc"]]


def drawn(report: Report) -> Sequence[Row]:
    """Whose guesses were drawn, so that the base's law is all they owe."""
    return [row for row in report.values() if row["lossless"]["by_draft"]]


def base_of(report: Report) -> str:
    return str(report["ctc"]["fingerprint"]["base"])


def with_width(row: Row, measure: str) -> str:
    """A value and its interval; autoregression's own has no width and is left out."""
    return (
        number(row[measure]) if row["drafter"] == AUTOREGRESSIVE else with_interval(row[measure], row[f"{measure}_ci"])
    )


def asked(report: Report) -> str:
    """What was asked, in words."""
    row = report[AUTOREGRESSIVE]
    names = {
        "tiny": "tiny, {} prompts",
        "mt_bench": "MT-Bench, {} questions",
        "gsm8k": "GSM8K test, all {}" if row["prompts"] == WHOLE["gsm8k"] else "GSM8K test, first {}",
    }
    return names[row["benchmark"]].format(row["prompts"])


def temperature(report: Report) -> str:
    return f"{report[AUTOREGRESSIVE]['temperature']:g}"


def of_all(cell: Callable[[Row], str], between: str = ", ") -> Callable[[Report], str]:
    """What a cell says of every contestant: once where all say the same."""
    return lambda report: between.join(dict.fromkeys(cell(row) for row in report.values()))


def percent(measure: str) -> Callable[[Report], str]:
    return lambda report: f"{report[AUTOREGRESSIVE][measure]:.1%}".replace("%", " %")


def tau_of(drafter: str) -> Callable[[Report], str]:
    return lambda report: with_width(report[drafter], "tau")


def speedup_of(drafter: str) -> Callable[[Report], str]:
    return lambda report: number(report[drafter]["speedup"])


ELSEWHERE = ["demo_mt_bench", "demo_gsm8k", "demo_mt_bench_sampling", "demo_gsm8k_sampling"]
BASES = ("tiny", "stories260K", "tinystories-656K", "tinytalk-3M")
LOSSLESS = [f"lossless/{base}_{questions}_{decoding}" for base in BASES
            for decoding in ("greedy", "sampling") for questions in ("mt_bench", "gsm8k")]  # fmt: skip
LAW = ["gsm8k_rejection", "rejection_stories260K", "rejection_tinystories-656K",
       "gsm8k_k_sequential", "k_sequential_stories260K", "k_sequential_tinystories-656K"]  # fmt: skip
TABLES = (
    Quoted(
        "README.md",
        ["demo"],
        every_drafter,
        {
            "drafter": named,
            "tau": lambda row: with_width(row, "tau"),
            "speed-up": lambda row: with_width(row, "speedup"),
            "tokens/s": lambda row: number(row["tokens_per_second"], 0),
            **{part: lambda row, part=part: number(row[part]) for part in "cvo"},  # type: ignore[misc]
            "equal": equal,
        },
    ),
    Quoted(
        "README.md",
        ELSEWHERE,
        once,
        {
            "benchmark": asked,
            "T": temperature,
            "tau of ctc": tau_of("ctc"),
            "tau of prompt_lookup": tau_of("prompt_lookup"),
            "speed-up of ctc": speedup_of("ctc"),
            "of prompt_lookup": speedup_of("prompt_lookup"),
            "equal": of_all(equal),
        },
    ),
    Quoted(
        "results/README.md",
        ["demo", *ELSEWHERE],
        once,
        {
            "benchmark": asked,
            "T": temperature,
            "tau ctc": tau_of("ctc"),
            "tau prompt_lookup": tau_of("prompt_lookup"),
            "speed-up ctc": speedup_of("ctc"),
            "speed-up prompt_lookup": speedup_of("prompt_lookup"),
            "equal": of_all(equal),
            "ended": percent("ended_share"),
            "repeated 4-grams": percent("repeated_4gram_share"),
        },
    ),
    Quoted(
        "results/foreign/README.md",
        [f"foreign/{base}" for base in ("stories260K", "tinytalk-3M", "tinystories-656K")],
        only_ctc,
        {
            "base": lambda row: str(row["fingerprint"]["base"]),
            "what it is": BY_HAND,
            "training": BY_HAND,
            "tau": lambda row: with_width(row, "tau"),
            "speed-up": lambda row: with_width(row, "speedup"),
            "c": lambda row: number(row["c"]),
            "v": lambda row: number(row["v"]),
            "equal": equal,
        },
    ),
    Quoted(
        "results/lossless/README.md",
        LOSSLESS,
        once,
        {
            "base": base_of,
            "questions": asked,
            "T": temperature,
            "contestants": lambda report: str(len(report) - 1),
            "equal, each of them": of_all(equal),
            "of these by rounding": of_all(lambda row: str(row["lossless"]["rounding"])),
            "tokens of autoregression": lambda report: f"{report[AUTOREGRESSIVE]['tokens']:,}",
        },
    ),
    Quoted(
        "results/law/README.md",
        [f"law/{name}" for name in LAW],
        drawn,
        {
            "base": lambda row: str(row["fingerprint"]["base"]),
            "verifier": lambda row: str(row["decoding"]),
            "drafter": named,
            "tau": lambda row: with_width(row, "tau"),
            "chi-square": lambda row: number(row["lossless"]["chi_square"], 1),
            "p": lambda row: number(row["lossless"]["p_value"]),
            "p, by the draft": lambda row: number(row["lossless"]["by_draft"]["p_value"]),
            "tv": lambda row: number(row["lossless"]["tv"], 3),
            "null tv": lambda row: number(row["lossless"]["null_tv"], 3),
            "tokens": lambda row: f"{row['lossless']['tokens']:,}",
        },
    ),
)


def written_anew(root: Path, tables: Sequence[Quoted] = TABLES) -> dict[Path, str]:
    """The READMEs below `root` that do not say what results/ beside them does, and what they would say."""
    texts = {root / table.file: (root / table.file).read_text() for table in tables}
    made = dict(texts)
    for table in tables:
        made[root / table.file] = table.replaced(made[root / table.file], root / "results")
    return {file: text for file, text in made.items() if text != texts[file]}


def main(words: Sequence[str] = ()) -> None:
    for file, text in written_anew(REPOSITORY).items():
        write_text(file, text)
        print(f"{file.relative_to(REPOSITORY)} says again what results/ does")


if __name__ == "__main__":
    tell_and_exit("quoted", main)
