"""The evaluations of a comparison, by evaluate.py: passes replayed at every size, and the loop timed at a few. It knows
words and places; what comes out it leaves to evaluate.py's own reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctcdraft.arena.book import EVALUATIONS, TRAINING, Book
from ctcdraft.arena.commands import run
from ctcdraft.arena.counts import count
from ctcdraft.arena.reports import row_name
from ctcdraft.arena.rules import Rules


@dataclass(frozen=True)
class Evaluation:
    """name: of its folder. words: of evaluate.py, all but where it goes to."""

    name: str
    kind: str  # replay or loop
    benchmark: str
    temperature: float
    nodes: tuple[int, ...]
    words: tuple[str, ...]


def measure_all(rules: Rules, book: Book) -> None:
    """Every evaluation that is not there yet; one that was interrupted goes on."""
    for one in evaluations(rules, book):
        words = [*one.words, f"out={book.evaluation(one.name)}"]
        if not book.evaluated(one.name, words):
            took = run("evaluate.py", words, book.log(one.name))
            entry = {"words": words, "kind": one.kind, "benchmark": one.benchmark, "temperature": one.temperature}
            entry |= {"nodes": list(one.nodes), "group": rules.group, "wall_seconds": round(took.wall, 1)}
            book.add(EVALUATIONS, one.name, entry)
        count(book, one.name, book.read(EVALUATIONS)[one.name])


def evaluations(rules: Rules, book: Book) -> Iterator[Evaluation]:
    """Greedy, the heads of all arms; at other temperatures and with clocks those of the arms that the rules name, and
    with clocks the first seed's alone."""
    timed = [*contestants(rules, book, rules.timing.arms, first_seed=True), *rules.timing.others]
    for benchmark, asked in rules.benchmarks.items():
        for temperature in rules.replay.temperatures:
            heads = contestants(rules, book, rules.arms if temperature == 0 else rules.replay.sampled)
            how = [
                *drawn(temperature), "measure=replay", f"measure.nodes={listed(rules.replay.nodes)}",
                f"measure.checked={rules.replay.checked}",
            ]  # fmt: skip
            words = (*rules.base, *asked, *rules.evaluate, *how, among([*heads, *inside(rules.timing.others)]))
            name = f"{rules.group}-{benchmark}-replay-T{temperature:g}"
            yield Evaluation(name, "replay", benchmark, temperature, rules.replay.nodes, words)
        for nodes in rules.timing.nodes:
            how = [f"decoding.nodes={nodes}", *rules.timing.words]
            words = (*rules.base, *asked, *rules.evaluate, *how, among(timed))
            yield Evaluation(f"{rules.group}-{benchmark}-loop-{nodes}", "loop", benchmark, 0.0, (nodes,), words)


def contestants(rules: Rules, book: Book, arms: Sequence[str], first_seed: bool = False) -> list[str]:
    """Run directories, with every reading of each; a head that two arms share is asked once."""
    found: dict[str, None] = {}
    for name, entry in book.read(TRAINING).items():
        entrant = rules.entrants.get(entry["entrant"])
        if entrant is None or entry["arm"] not in arms or (first_seed and entry["seed"] != rules.seed):
            continue
        for reading in entrant.readings:
            found[row_name(str(book.run(entry["same_as"] or name)), reading)] = None
    return list(found)


def inside(others: Sequence[str]) -> list[str]:
    """Those that our loop drafts for: other people's code cannot be replayed."""
    return [one for one in others if "transformers_" not in one]


def drawn(temperature: float) -> list[str]:
    if temperature == 0:
        return ["decoding=greedy"]
    return ["decoding=sampling", f"decoding.temperature={temperature:g}"]


def listed(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def among(names: Sequence[str]) -> str:
    return f"contestants=[{','.join(names)}]"
