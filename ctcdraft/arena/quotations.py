"""The tables that READMEs quote from whole comparisons. It knows what their folders hold, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.arena.book import EVALUATIONS, MATCHING, RULES, TRAINING, VERDICT, Book, Entry
from ctcdraft.arena.confirming import ONCE_TRAINED
from ctcdraft.arena.reports import certified, row_name, rows_of
from ctcdraft.arena.rules import LATENCY, STEPS, TIME
from ctcdraft.arena.tables import draft_milliseconds
from ctcdraft.errors import InputError
from ctcdraft.evaluation.quoting import Quoted, Row
from ctcdraft.evaluation.report import equal, number, signed, with_interval

NODES = 16
ASKED = {"gsm8k": "GSM8K", "mt_bench": "MT-Bench"}
OUTSIDE = ("oracle", "junk", "transformers_")  # controls and referees: how their rows' names begin
PARTS = {
    ("ctc_gru", "ctc"): "the correction",
    ("ctc", "ctc_paper"): "prefix-CTC",
    ("ctc_paper", "ctc_paper@collapse"): "prefix search",
    ("ctc_paper", "medusa"): "the paper's head over Medusa's",
    ("ctc", "medusa@direct"): "CTC and transformer, by most probable texts",
}
EQUAL = {STEPS: "steps", LATENCY: "draft time", TIME: "training time"}


@dataclass(frozen=True)
class Compared:
    """A folder of a finished comparison. loops: certified rows of what was timed, by benchmark and their names there.
    taken: of the heads of equal draft time, once trained, their draft time over the reference's, by entrant."""

    base: str
    entrants: Mapping[str, Any]
    training: Mapping[str, Entry]
    taken: Mapping[str, Entry]
    loops: Mapping[str, Mapping[str, Row]]
    verdict: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Compared:
        book = Book(folder)
        rules, verdict, there = book.read(RULES), book.read(VERDICT), book.read(EVALUATIONS)
        names = {asked: f"{rules.get('group')}-{asked}-loop-{NODES}" for asked in ASKED}
        if not verdict or not set(names.values()) <= there.keys():
            raise InputError(f"{folder} holds no finished comparison with clocks, but a README quotes it")
        loops = {
            asked: {row["drafter"]: row for row in filter(certified, rows_of(book, name))}
            for asked, name in names.items()
        }
        base = next(iter(loops["gsm8k"].values()))["fingerprint"]["base"]
        taken = book.read(MATCHING).get(ONCE_TRAINED, {})
        return cls(base, rules["entrants"], book.read(TRAINING), taken, loops, verdict)

    def heads(self) -> Iterator[tuple[str, str, bool]]:
        """Of the arm of equal training time: what a row is called there, here, and whether it is read its own way."""
        for name, entry in self.training.items():
            for reading in entry["readings"] if entry["arm"] == TIME else ():
                own = reading == entry["readings"][0]
                yield row_name(entry["same_as"] or name, reading), row_name(entry["entrant"], reading), own


def timed(found: Compared) -> Iterator[dict[str, Any]]:
    """Heads of equal training time, and who has none; the fastest on the first benchmark first."""
    first = found.loops["gsm8k"]
    trained = {entry["same_as"] or name for name, entry in found.training.items()}
    called = {there: here for there, here, _ in found.heads()}
    called |= {name: name for name in first if name.partition("@")[0] not in trained}
    for name in sorted(called, key=lambda name: -((first.get(name) or {}).get("speedup") or 0)):
        rows = {asked: loop.get(name) for asked, loop in found.loops.items()}
        if all(rows.values()):
            yield {"base": found.base, "drafter": called[name], **rows}


def timed_heads(found: Compared) -> Iterator[dict[str, Any]]:
    """Of these everyone's own way to read a head, and who has none; no control and no referee."""
    other_ways = {here for _, here, own in found.heads() if not own}
    return (row for row in timed(found) if row["drafter"] not in other_ways and not row["drafter"].startswith(OUTSIDE))


def against_rivals(found: Compared) -> Iterator[Row]:
    """The default head less every rival where draft time is equal, replayed, or training time, timed. Dials were turned
    for a head's own reading alone, so no other has equal draft time."""
    for row in told(found, {LATENCY: "replay", TIME: "loop"}):
        rival, _, reading = row["less"].partition("@")
        if row["more"] == "ctc_gru" and found.entrants[rival].get("rival") and not (reading and row["arm"] == LATENCY):
            yield {**row, "taken": found.taken.get(rival) if row["arm"] == LATENCY else None}


def contributions(found: Compared) -> Iterator[Row]:
    """What a part adds, by pairs of heads that differ in it."""
    return (row for row in told(found, {STEPS: "replay", TIME: "replay"}) if (row["more"], row["less"]) in PARTS)


def told(found: Compared, kinds: Mapping[str, str]) -> Iterator[Row]:
    """Differences, greedy, at one size of trees. kinds: of the evaluations, by arm."""
    for row in found.verdict["differences"]:
        if (row["nodes"], row["temperature"], row["kind"]) == (NODES, 0, kinds.get(row["arm"])):
            yield {**row, "base": found.base}


def of(asked: str, cell: Callable[[Row], str]) -> Callable[[Any], str]:
    return lambda row: cell(row[asked])


def gain(measure: str) -> Callable[[Row], str]:
    return lambda row: signed(row[measure], row[f"{measure}_ci"])


def tau(row: Row) -> str:
    return with_interval(row["tau"], row["tau_ci"])


def speedup(row: Row) -> str:
    return with_interval(row["speedup"], row["speedup_ci"])


def in_passes(row: Row) -> str:
    return "-" if row["c"] is None else " + ".join(number(row[part]) for part in "cvo")


def word(key: str, among: Mapping[str, str] | None = None) -> Callable[[Row], str]:
    return lambda row: str(row[key]) if among is None else among[row[key]]


TIMED = {
    "base": word("base"),
    "drafter": word("drafter"),
    "tau, GSM8K": of("gsm8k", tau),
    "tau, MT-Bench": of("mt_bench", tau),
    "draft ms": of("gsm8k", draft_milliseconds),
    "speed-up, GSM8K": of("gsm8k", speedup),
    "speed-up, MT-Bench": of("mt_bench", speedup),
    "equal": lambda row: ", ".join(equal(row[asked]) for asked in ASKED),
}
RIVALS = {
    "base": word("base"),
    "ctc_gru less": word("less"),
    "at equal": word("arm", EQUAL),
    "its draft time, of ctc_gru's": lambda row: (
        "-" if row["taken"] is None else with_interval(row["taken"]["ratio"], row["taken"]["interval"])
    ),
    "questions": word("benchmark", ASKED),
    "tau": gain("tau"),
    "speed-up": gain("speedup"),
}
CONTRIBUTED = {
    "base": word("base"),
    "what": lambda row: PARTS[row["more"], row["less"]],
    "more less": lambda row: f"{row['more']} less {row['less']}",
    "at equal": word("arm", EQUAL),
    "questions": word("benchmark", ASKED),
    "gain in tau": gain("tau"),
}
COMPARISONS = ("arena/tinystories-656K",)
HERE = "results/arena/README.md"
TABLES = (
    Quoted("README.md", COMPARISONS, timed_heads, TIMED, Compared.read),
    Quoted(HERE, COMPARISONS, timed, {**TIMED, "c + v + o": of("gsm8k", in_passes)}, Compared.read),
    Quoted(HERE, COMPARISONS, against_rivals, RIVALS, Compared.read),
    Quoted(HERE, COMPARISONS, contributions, CONTRIBUTED, Compared.read),
)
