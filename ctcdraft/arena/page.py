"""One page of a comparison, rebuilt from its files alone: page.md, page.csv and two figures. It measures nothing.

A row whose text was not compared with autoregression's, or differs from it, is not printed but named.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ctcdraft.arena import figure
from ctcdraft.arena.book import MATCHING, TRAINING, VERDICT, Book, Entry
from ctcdraft.arena.judging import cells_of
from ctcdraft.arena.reports import Row, all_rows, certified
from ctcdraft.arena.rules import LATENCY, PARAMETERS, STEPS, TIME, Rules
from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.report import Columns, equal, number, signed, table, with_interval
from ctcdraft.files import write_text
from ctcdraft.training.sweep import Job, plot

ARM = {
    STEPS: "Equal steps: every head as its authors shaped it, the same batches, optimiser and schedule",
    PARAMETERS: "Arm P: equal steps, trainable parameters matched to the reference",
    LATENCY: "Arm L: equal steps, draft time matched to the reference",
    TIME: "Arm T: equal training time",
}
SAID = ("tau", "c, v, o", "speedup", "ci", "equal")


@dataclass(frozen=True)
class Found:
    """All that is known when a page is written. rows: certified ones."""

    training: Mapping[str, Entry]
    matching: Mapping[str, Any]
    verdict: Mapping[str, Any]
    rows: Sequence[Row]
    refused: Sequence[Row]

    @classmethod
    def of(cls, book: Book) -> Found:
        rows = all_rows(book)
        good = [row for row in rows if certified(row)]
        bad = [row for row in rows if not certified(row)]
        return cls(book.read(TRAINING), book.read(MATCHING), book.read(VERDICT), good, bad)

    def row(self, kind: str, benchmark: str, temperature: float, drafter: str, nodes: int) -> Row | None:
        wanted = (kind, benchmark, temperature, drafter, nodes)
        keys = ("kind", "benchmark", "temperature", "drafter", "nodes")
        return next((row for row in self.rows if tuple(row[key] for key in keys) == wanted), None)


def write(rules: Rules, book: Book) -> None:
    found = Found.of(book)
    write_text(book.out / "page.md", markdown(rules, found))
    write_text(book.out / "page.csv", comma_separated(found))
    write_text(book.out / "nodes.svg", figure.by_nodes(replayed(rules, found), "tau by nodes, greedy"))
    if dots := timed(rules, found):
        write_text(book.out / "costs.svg", figure.by_cost(dots, "tau by draft time, greedy"))
    if cells := in_cells(rules, found):
        write_text(book.out / "factors.svg", plot(cells, list(cells[0].values)))


def markdown(rules: Rules, found: Found) -> str:
    parts = [f"# {rules.title}", circumstances(rules, found), "## What was equal", equalities(rules)]
    for benchmark in rules.benchmarks:
        for arm in rules.arms:
            heads = list(trained(rules, found, arm, benchmark))
            if heads:
                parts += [f"## {ARM[arm]} ({benchmark})", table(heads, columns(rules))]
        others = list(untrained(rules, found, benchmark))
        if others:
            parts += [f"## Controls and referees ({benchmark})", table(others, columns(rules))]
    parts += ["![](nodes.svg)", *(["![](costs.svg)"] if timed(rules, found) else [])]
    parts += ["![](factors.svg)"] if in_cells(rules, found) else []
    parts += [*sampled(rules, found), *matched(found), *seeds(rules, found)]
    parts += [
        *pairs(
            found,
            "differences",
            DIFFERENCES,
            "Differences, paired over questions, seeds pooled (intervals are over questions alone)",
        )
    ]
    parts += [*pairs(found, "effects", EFFECTS, "What each factor contributes, all else being equal")]
    parts += ["## What the words mean", "\n".join(f"- **{word}**: {DEFINITIONS[word]}" for word in SAID)]
    parts += ["## The same again", f"    {rules.command}", "The page alone, from these files:"]
    parts += ["    python -m ctcdraft.arena THIS_FOLDER"]
    return "\n\n".join(parts) + "\n"


def circumstances(rules: Rules, found: Found) -> str:
    machines = sorted({f"{row['hardware']}, {row['dtype']}" for row in found.rows})
    said = [f"{'; '.join(machines) or 'nothing is measured yet'}."]
    for row in found.refused:
        said.append(f"Not printed, because it has no certificate: {row['drafter']} in {row['evaluation']}.")
    rates = [entry for entry in found.training.values() if entry["arm"] == STEPS and entry["seed"] == rules.seed]
    tried = [(entry["entrant"], entry["learning_rate"]) for entry in found.training.values() if entry["arm"] == "rate"]
    edges = [
        one for one in rates if at_an_edge(one["learning_rate"], [r for name, r in tried if name == one["entrant"]])
    ]
    if edges:
        named = ", ".join(f"{one['entrant']} {one['learning_rate']:g}" for one in edges)
        said.append(
            f"Best at an edge of the learning rates that were tried, so perhaps better still beyond it: {named}."
        )
    return "\n".join(said)


def at_an_edge(rate: float, tried: Sequence[float]) -> bool:
    return len(set(tried)) > 1 and rate in (min(tried), max(tried))


def equalities(rules: Rules) -> str:
    rates = ", ".join(f"{rate:g}" for rate in rules.rates.values)
    words = " ".join(rules.work).replace(str(rules.said["out"]), "OUT")
    beyond = f" and, past an edge that is the best, up to {rules.rates.beyond} more" if rules.rates.beyond else ""
    usual = rules.trial_steps()
    longer = [f" ({key}: {rules.trial_steps(one):,})" for key, one in rules.entrants.items() if one.share is not None]
    own = {name: [word for word in one.words if word.startswith("trainer.")] for name, one in rules.entrants.items()}
    return "\n".join(
        [
            f"- corpus, tokens, batches, optimiser, schedule: `{words}`",
            f"- learning rate: the best of {rates}{beyond} for each entrant, tried for {usual:,} steps"
            f"{''.join(longer)} and judged by tau on {rules.rates.prompts} prompts that nobody trains on and no result "
            "is from",
            f"- {rules.steps:,} steps; seconds are {rules.clock} seconds of training, its start and end taken off",
            *(f"- not equal: {name} trains with `{' '.join(some)}`" for name, some in own.items() if some),
        ]
    )


def trained(rules: Rules, found: Found, arm: str, benchmark: str) -> Iterator[Row]:
    """One line a head and reading: what its training took, and what became of it at every size."""
    for name, entry in found.training.items():
        if entry["arm"] != arm or entry["seed"] != rules.seed:
            continue
        reference = found.training.get(rules.reference)
        for reading in entry["readings"]:
            row = f"{entry['same_as'] or name}" + (f"@{reading}" if reading is not None else "")
            line = measured(rules, found, benchmark, row)
            if line is not None:
                ratio = entry["parameters"] / reference["parameters"] if reference else None
                yield {**line, "drafter": name if reading is None else f"{name}@{reading}", "entry": entry} | {
                    "ratio": ratio
                }


def untrained(rules: Rules, found: Found, benchmark: str) -> Iterator[Row]:
    heads = {entry["same_as"] or name for name, entry in found.training.items()}
    names = dict.fromkeys(row["drafter"] for row in found.rows if row["drafter"].partition("@")[0] not in heads)
    for name in names:
        line = measured(rules, found, benchmark, name)
        if line is not None:
            yield {**line, "drafter": name, "entry": None, "ratio": None}


def measured(rules: Rules, found: Found, benchmark: str, drafter: str) -> dict[str, Any] | None:
    """Its replayed rows by nodes and its timed ones; None where there are neither."""
    replays = {nodes: found.row("replay", benchmark, 0.0, drafter, nodes) for nodes in rules.replay.nodes}
    loops = {nodes: found.row("loop", benchmark, 0.0, drafter, nodes) for nodes in rules.timing.nodes}
    return {"replay": replays, "loop": loops} if any([*replays.values(), *loops.values()]) else None


def columns(rules: Rules) -> Columns:
    """Of the tables of arms: tau by nodes, then what the clock said at the sizes that were timed."""

    def entry(key: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["entry"] is None or line["entry"][key] is None else form(line["entry"][key])

    def tau(nodes: int) -> Callable[[Row], str]:
        def cell(line: Row) -> str:
            row = line["replay"].get(nodes) or line["loop"].get(nodes)
            return "-" if row is None else with_interval(row["tau"], row["tau_ci"])

        return cell

    def clocked(nodes: int, form: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["loop"][nodes] is None else form(line["loop"][nodes])

    made: Columns = {
        "drafter": lambda line: line["drafter"],
        "parameters": entry("parameters", lambda value: f"{value:,}"),
        "of reference": lambda line: number(line["ratio"]),
        "steps": entry("steps", lambda value: f"{value:,}"),
        "train s": entry(f"{rules.clock}_seconds", lambda value: f"{value:.0f}"),
        "rate": entry("learning_rate", lambda value: f"{value:g}"),
    }
    made |= {f"tau, {nodes}": tau(nodes) for nodes in dict.fromkeys((*rules.replay.nodes, *rules.timing.nodes))}
    for nodes in rules.timing.nodes:
        made[f"speedup, {nodes}"] = clocked(nodes, lambda row: with_interval(row["speedup"], row["speedup_ci"]))
        made[f"draft ms, {nodes}"] = clocked(nodes, draft_milliseconds)
        made[f"c + v + o, {nodes}"] = clocked(nodes, lambda row: " + ".join(number(row[part]) for part in "cvo"))
        made[f"equal, {nodes}"] = clocked(nodes, equal)
    made["replay equal"] = replay_equal
    made["evaluations"] = lambda line: ", ".join(sorted({row["evaluation"] for row in rows_in(line)}))
    return made


def draft_milliseconds(row: Row) -> str:
    time = row["time"]
    return "-" if time["draft"] is None else number(1e3 * (time["draft"] + time["tree"]), 2)


def replay_equal(line: Row) -> str:
    """Texts of the loop that are autoregression's, at all sizes; and answers that took the passes replayed."""
    rows = [row for row in line["replay"].values() if row is not None]
    if not rows:
        return "-"
    texts = [sum(row["lossless"][key] for row in rows) for key in ("equal", "prompts")]
    passes = [sum(row["replay"][key] for row in rows) for key in ("alike", "answers")]
    return f"{texts[0]}/{texts[1]}, passes {passes[0]}/{passes[1]}"


def rows_in(line: Row) -> list[Row]:
    return [row for kind in ("replay", "loop") for row in line[kind].values() if row is not None]


def sampled(rules: Rules, found: Found) -> list[str]:
    """tau at the other temperatures, at the sizes that are told."""
    hot = [temperature for temperature in rules.replay.temperatures if temperature > 0]
    rows = [row for row in found.rows if row["kind"] == "replay" and row["temperature"] in hot]
    if not rows:
        return []
    made: Columns = {
        "drafter": lambda row: row["drafter"],
        "benchmark": lambda row: row["benchmark"],
        "T": lambda row: f"{row['temperature']:g}",
        "nodes": lambda row: str(row["nodes"]),
        "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
        "equal": equal,
    }
    return ["## Sampled", table([row for row in rows if row["nodes"] in rules.sizes_told], made)]


def matched(found: Found) -> list[str]:
    lines = [{"arm": arm, "entrant": name, **one} for arm, all_ in found.matching.items() for name, one in all_.items()]
    made: Columns = {
        "arm": lambda one: one["arm"],
        "entrant": lambda one: one["entrant"],
        "dial": lambda one: f"{one['key']}={one['value']}" if one["value"] is not None else "-",
        "of reference": lambda one: with_interval(one["ratio"], one["interval"]),
        "matched by": lambda one: one["how"],
    }
    return ["## How budgets were matched", table(lines, made)] if lines else []


def seeds(rules: Rules, found: Found) -> list[str]:
    """Heads that were trained more than once: tau of each seed, at the sizes that are told."""
    lines = []
    for entrant in rules.entrants:
        same = [
            name for name, one in found.training.items() if one["entrant"] == entrant and one["arm"] == rules.arms[0]
        ]
        for benchmark in rules.benchmarks if len(same) > 1 else ():
            for nodes in rules.sizes_told:
                rows = [found.row("replay", benchmark, 0.0, name, nodes) for name in same]
                taus = [row["tau"] for row in rows if row is not None]
                if len(taus) > 1:
                    lines.append({"entrant": entrant, "benchmark": benchmark, "nodes": nodes, "taus": taus})
    made: Columns = {
        "entrant": lambda one: one["entrant"],
        "benchmark": lambda one: one["benchmark"],
        "nodes": lambda one: str(one["nodes"]),
        "tau of each seed": lambda one: " ".join(f"{tau:.3f}" for tau in one["taus"]),
        "mean": lambda one: number(statistics.mean(one["taus"]), 3),
        "standard deviation": lambda one: number(statistics.stdev(one["taus"]), 3),
    }
    return ["## Seeds", table(lines, made)] if lines else []


PLACE: Columns = {
    "benchmark": lambda one: one["benchmark"],
    "T": lambda one: f"{one['temperature']:g}",
    "arm": lambda one: one["arm"],
    "nodes": lambda one: str(one["nodes"]),
    "by": lambda one: one["kind"],
}
GAIN: Columns = {
    "tau": lambda one: signed(one["tau"], one["tau_ci"]),
    "speedup": lambda one: signed(one["speedup"], one["speedup_ci"]),
}
DIFFERENCES: Columns = {
    "more": lambda one: f"{one['more']} less {one['less']}",
    **PLACE,
    "seeds": lambda one: "{} and {}".format(*one["seeds"]),
    **GAIN,
}
EFFECTS: Columns = {
    "factor": lambda one: one["factor"],
    "more": lambda one: f"{one['more']} less {one['less']}",
    **PLACE,
    "twins": lambda one: str(one["twins"]),
    "tau": GAIN["tau"],
}


def pairs(found: Found, part: str, made: Columns, title: str) -> list[str]:
    lines = found.verdict.get(part, [])
    return [f"## {title}", table(lines, made)] if lines else []


def in_cells(rules: Rules, found: Found) -> list[Job]:
    """Of a grid, every cell of the first arm with its levels and its tau at the first size that is told."""
    benchmark, nodes = next(iter(rules.benchmarks)), rules.sizes_told[0]
    jobs = []
    for cell, name in cells_of(rules, found.training, rules.arms[0]).items():
        row = found.row("replay", benchmark, 0.0, name, nodes)
        if row is not None and row["tau"] is not None:
            jobs.append(Job(name, dict(cell), "", 0, row["tau"], None))
    return jobs


def replayed(rules: Rules, found: Found) -> dict[str, list[tuple[float, float]]]:
    """(nodes, tau) of every line of the first benchmark's first arm."""
    benchmark = next(iter(rules.benchmarks))
    lines = [*trained(rules, found, rules.arms[0], benchmark), *untrained(rules, found, benchmark)]
    points = {
        line["drafter"]: [
            (nodes, row["tau"]) for nodes, row in line["replay"].items() if row is not None and row["tau"]
        ]
        for line in lines
    }
    return {name: some for name, some in points.items() if some}


def timed(rules: Rules, found: Found) -> list[tuple[str, float, float]]:
    """(name, milliseconds of a draft, tau) of every timed line, at the first size."""
    points = []
    for benchmark in list(rules.benchmarks)[:1]:
        for arm in rules.timing.arms if rules.timing.nodes else ():
            for line in trained(rules, found, arm, benchmark):
                row = line["loop"][rules.timing.nodes[0]]
                if row is not None and row["time"]["draft"] is not None:
                    points.append((line["drafter"], 1e3 * (row["time"]["draft"] + row["time"]["tree"]), row["tau"]))
    return list(dict.fromkeys(points))


def comma_separated(found: Found) -> str:
    keys = ["evaluation", "kind", "benchmark", "temperature", "drafter", "nodes", "prompts", "tokens", "passes", "tau"]
    keys += ["speedup", "speedup_decode", "c", "v", "o", "predicted_speedup", "draft_parameters", "peak_memory_bytes"]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, "tau_low", "tau_high", "equal", "compared"])
    for row in found.rows:
        low_high = row["tau_ci"] or [None, None]
        lossless = [row["lossless"][key] for key in ("equal", "prompts")]
        writer.writerow([*(row[key] for key in keys), *low_high, *lossless])
    return text.getvalue()
