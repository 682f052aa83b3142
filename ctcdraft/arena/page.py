"""One page of a comparison, rebuilt from its files alone: page.md, page.csv and figures. It measures nothing.

A row whose text was not compared with autoregression's, or differs from it, is not printed but named.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import takewhile

from ctcdraft.arena import figure
from ctcdraft.arena.book import Book, Entry
from ctcdraft.arena.confirming import ONCE_TRAINED
from ctcdraft.arena.lines import Found, in_cells, replayed, runs_of, timed, trained, untrained
from ctcdraft.arena.rules import LATENCY, PARAMETERS, STEPS, TIME, Rules
from ctcdraft.arena.tables import DIFFERENCES, EFFECTS, columns, matched, pairs, sampled, seeds
from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.report import table
from ctcdraft.files import write_text
from ctcdraft.training.sweep import plot

ARM = {
    STEPS: "Equal steps: every head as its authors shaped it, the same batches, optimiser and schedule",
    PARAMETERS: "Arm P: equal steps, trainable parameters matched to the reference",
    LATENCY: "Arm L: equal steps, draft time matched to the reference",
    TIME: "Arm T: equal training time",
}
SAID = ("tau", "c, v, o", "speedup", "ci", "equal")


def write(rules: Rules, book: Book) -> None:
    found = Found.of(book)
    drawn = drawings(rules, found)
    write_text(book.out / "page.md", markdown(rules, found, list(drawn)))
    write_text(book.out / "page.csv", comma_separated(found))
    for name, text in drawn.items():
        write_text(book.out / name, text)


def drawings(rules: Rules, found: Found) -> dict[str, str]:
    """SVG by the name of its file, of what there is to draw."""
    made = {}
    if lines := replayed(rules, found):
        made["nodes.svg"] = figure.by_nodes(lines, "tau by nodes, greedy")
    if dots := timed(rules, found):
        made["costs.svg"] = figure.by_cost(dots, "tau by draft time, greedy")
    if cells := in_cells(rules, found):
        made["factors.svg"] = plot(cells, list(cells[0].values))
    return made


def markdown(rules: Rules, found: Found, figures: Sequence[str]) -> str:
    parts = [f"# {rules.title}", circumstances(rules, found), "## What was equal", equalities(rules, found)]
    for benchmark in rules.benchmarks:
        for arm in rules.arms:
            heads = list(trained(rules, found, arm, benchmark))
            if heads:
                parts += [f"## {ARM[arm]} ({benchmark})", table(heads, columns(rules))]
        others = list(untrained(rules, found, benchmark))
        if others:
            parts += [f"## Controls and referees ({benchmark})", table(others, columns(rules))]
    parts += [f"![]({name})" for name in figures]
    parts += [*sampled(rules, found), *matched(found), *seeds(rules, found)]
    parts += [
        *pairs(
            found,
            "differences",
            DIFFERENCES,
            "Differences, paired over questions, seeds pooled (intervals are over questions alone)",
        )
    ]
    parts += [
        *pairs(
            found,
            "effects",
            EFFECTS,
            "What each factor contributes, all else being equal, twins and seeds pooled (intervals are over questions "
            "alone)",
        )
    ]
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
    for arm, name, ratio in unequal(rules, found):
        said.append(f"Not matched within {rules.matching.tolerance:.0%} in the arm of {arm}: {name}, {ratio:.2f}.")
    return "\n".join(said)


def unequal(rules: Rules, found: Found) -> Iterator[tuple[str, str, float]]:
    """(arm, entrant, its cost over the reference's) where they are too far apart: by the trained heads' own clocks
    where there are any."""
    told = {PARAMETERS: PARAMETERS, LATENCY: ONCE_TRAINED if ONCE_TRAINED in found.matching else LATENCY}
    for arm, part in told.items():
        for name, one in found.matching.get(part, {}).items() if arm in rules.arms else ():
            if abs(one["ratio"] - 1) > rules.matching.tolerance:
                yield arm, name, one["ratio"]


def at_an_edge(rate: float, tried: Sequence[float]) -> bool:
    return len(set(tried)) > 1 and rate in (min(tried), max(tried))


def equalities(rules: Rules, found: Found) -> str:
    words = " ".join(rules.work).replace(str(rules.said["out"]), "OUT")
    own = {name: own_words(rules, found.training[runs[0]]) for name, runs in runs_of(found, rules.arms[0]).items()}
    shared = [word for word in next(iter(own.values()), []) if all(word in some for some in own.values())]
    own = {name: [word for word in some if word not in shared] for name, some in own.items()}
    return "\n".join(
        [
            f"- corpus, tokens, batches, optimiser, schedule: `{' '.join([words, *shared])}`",
            f"- learning rate: {learning_rate(rules)}",
            f"- {rules.steps:,} steps; seconds are {rules.clock} seconds of these steps, without starts and probes",
            *(f"- not equal: {name} trains with `{' '.join(some)}`" for name, some in own.items() if some),
        ]
    )


def own_words(rules: Rules, entry: Entry) -> list[str]:
    """What a head's trainer was told beyond the work: between that and the rate."""
    own = takewhile(lambda word: not word.startswith("trainer.learning_rate="), entry["words"][len(rules.work) :])
    return [word for word in own if word.startswith("trainer.")]


def learning_rate(rules: Rules) -> str:
    rates = ", ".join(f"{rate:g}" for rate in rules.rates.values)
    if len(rules.rates.values) == 1:
        return f"{rates} for all"
    beyond = f" and, past an edge that is the best, up to {rules.rates.beyond} more" if rules.rates.beyond else ""
    return (
        f"the best of {rates}{beyond} for each entrant, tried for {rules.trial_steps:,} steps and judged by tau on "
        f"{rules.rates.prompts} prompts that nobody trains on and no result is from"
    )


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
