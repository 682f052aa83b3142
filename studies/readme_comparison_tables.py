"""The tables that READMEs quote from whole comparisons. It knows what their folders hold, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ctcdraft.errors import InputError
from ctcdraft.report.tables import equal, number, signed, with_interval
from studies.comparison.config import LATENCY, STEPS, TIME, Rules
from studies.comparison.evaluate import row_name
from studies.comparison.rematch import ONCE_TRAINED
from studies.comparison.run import kept_rules
from studies.comparison.store import Book
from studies.comparison.tables import Found, draft_milliseconds, trained, untrained
from studies.readme_quotes import Quoted, Row

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
    """A folder of a finished comparison."""

    name: str  # the folder's: there may be two comparisons on one base
    rules: Rules
    found: Found
    kind: ClassVar[str] = "comparison with clocks"

    @classmethod
    def read(cls, folder: Path) -> Self:
        book = Book(folder)
        compared = cls(folder.name, kept_rules(book), Found.of(book))
        if not compared.finished:
            raise InputError(f"{folder} holds no finished {cls.kind}, but a README quotes it")
        return compared

    @property
    def finished(self) -> bool:
        return bool(self.found.verdict) and all(map(self.lines, ASKED))

    def lines(self, asked: str) -> dict[str, Row]:
        """Of heads of equal training time and of who has none, by the name of the entrant: what the clock said, and
        whether a head is read its own way."""
        found = {}
        for line in (*trained(self.rules, self.found, TIME, asked), *untrained(self.rules, self.found, asked)):
            row, entry, (_, _, reading) = line["loop"].get(NODES), line["entry"], line["drafter"].partition("@")
            name = line["drafter"] if entry is None else row_name(entry["entrant"], reading or None)
            if row is not None:
                found[name] = {"row": row, "own": entry is None or (reading or None) == entry["readings"][0]}
        return found


def timed(compared: Compared) -> Iterator[dict[str, Any]]:
    """Whom the clock was on, the fastest on the first benchmark first."""
    lines = {asked: compared.lines(asked) for asked in ASKED}
    first = lines["gsm8k"]
    for name in sorted(first, key=lambda name: -(first[name]["row"]["speedup"] or 0)):
        if all(name in there for there in lines.values()):
            rows = {asked: there[name]["row"] for asked, there in lines.items()}
            yield {"comparison": compared.name, "drafter": name, "own": first[name]["own"], **rows}


def timed_heads(compared: Compared) -> Iterator[dict[str, Any]]:
    """Of these everyone's own way to read a head, and who has none; no control and no referee."""
    return (row for row in timed(compared) if row["own"] and not row["drafter"].startswith(OUTSIDE))


def against_rivals(compared: Compared) -> Iterator[Row]:
    """The default head less every rival where draft time is equal, replayed, or training time, timed. Dials were turned
    for a head's own reading alone, so no other has equal draft time. Clocks may have run on fewer questions than were
    replayed: tau is of all that were."""
    taken = compared.found.matching.get(ONCE_TRAINED, {})
    replayed = {between(row): row for row in told(compared, {TIME: "replay"})}
    for row in told(compared, {LATENCY: "replay", TIME: "loop"}):
        rival, _, reading = row["less"].partition("@")
        if (
            row["more"] == "ctc_gru"
            and compared.rules.entrants[rival].rival
            and not (reading and row["arm"] == LATENCY)
        ):
            tau = {key: replayed.get(between(row), row)[key] for key in ("tau", "tau_ci")}
            yield {**row, **tau, "taken": taken.get(rival) if row["arm"] == LATENCY else None}


def between(row: Row) -> tuple[str, str, str, str]:
    return row["more"], row["less"], row["arm"], row["benchmark"]


def contributions(compared: Compared) -> Iterator[Row]:
    """What a part adds, by pairs of heads that differ in it."""
    return (row for row in told(compared, {STEPS: "replay", TIME: "replay"}) if (row["more"], row["less"]) in PARTS)


def told(compared: Compared, layer_types: Mapping[str, str]) -> Iterator[Row]:
    """Differences, greedy, at one size of trees. kinds: of the evaluations, by arm."""
    for row in compared.found.verdict["differences"]:
        if (row["nodes"], row["temperature"], row["kind"]) == (NODES, 0, layer_types.get(row["arm"])):
            yield {**row, "comparison": compared.name}


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
    "comparison": word("comparison"),
    "drafter": word("drafter"),
    "tau, GSM8K": of("gsm8k", tau),
    "tau, MT-Bench": of("mt_bench", tau),
    "draft ms": of("gsm8k", draft_milliseconds),
    "speed-up, GSM8K": of("gsm8k", speedup),
    "speed-up, MT-Bench": of("mt_bench", speedup),
    "equal": lambda row: ", ".join(equal(row[asked]) for asked in ASKED),
}
RIVALS = {
    "comparison": word("comparison"),
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
    "comparison": word("comparison"),
    "what": lambda row: PARTS[row["more"], row["less"]],
    "more less": lambda row: f"{row['more']} less {row['less']}",
    "at equal": word("arm", EQUAL),
    "questions": word("benchmark", ASKED),
    "gain in tau": gain("tau"),
}
COMPARISONS = ("arena/tiny-400", "arena/tinystories-656K")
HERE = "results/arena/README.md"
TABLES = (
    Quoted("README.md", COMPARISONS, timed_heads, TIMED, Compared.read),
    Quoted(HERE, COMPARISONS, timed, {**TIMED, "c + v + o": of("gsm8k", in_passes)}, Compared.read),
    Quoted(HERE, COMPARISONS, against_rivals, RIVALS, Compared.read),
    Quoted(HERE, COMPARISONS, contributions, CONTRIBUTED, Compared.read),
)
