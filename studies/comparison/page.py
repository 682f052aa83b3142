"""One page of a comparison, rebuilt from its files alone: page.md, page.csv and figures. It measures nothing.

A row whose text was not compared with autoregression's, or differs from it, is not printed but named.

Two drawings in SVG: lines of tau by nodes, dots of tau by draft time. It knows numbers, colours and no clock.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import takewhile
from math import log2

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.io import write_text
from ctcdraft.report.svg import Figure, dot, line, rectangle, text
from ctcdraft.report.tables import table
from ctcdraft.training.sweep import svg_plot
from studies.comparison.config import LATENCY, PARAMETERS, STEPS, TIME, Rules
from studies.comparison.rematch import ONCE_TRAINED
from studies.comparison.store import Book, Entry
from studies.comparison.tables import (
    DIFFERENCES,
    EFFECTS,
    Found,
    columns,
    in_cells,
    matched,
    pairs,
    replayed,
    runs_of,
    sampled,
    seeds,
    timed,
    trained,
    untrained,
)

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
    for name, svg in drawn.items():
        write_text(book.out / name, svg)


def drawings(rules: Rules, found: Found) -> dict[str, str]:
    """SVG by the name of its file, of what there is to draw."""
    made = {}
    if lines := replayed(rules, found):
        made["nodes.svg"] = by_nodes(lines, "tau by nodes, greedy")
    if dots := timed(rules, found):
        made["costs.svg"] = by_cost(dots, "tau by draft time, greedy")
    if cells := in_cells(rules, found):
        made["factors.svg"] = svg_plot(cells, list(cells[0].values))
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
    parts += ["    python -m studies.comparison THIS_FOLDER"]
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


# Told apart in grey print, too: light and dark take turns.
COLOURS = ("#1f5a8a", "#f2b872", "#3c7a3c", "#9ec9e8", "#8c4a1f", "#cc99cc", "#444444", "#99bb55")
WIDE, HIGH, EDGE, BESIDE, LINE = 420, 300, 50, 240, 15

Point = tuple[float, float]
Place = Callable[[Point], Point]


def by_nodes(lines: Mapping[str, Sequence[Point]], title: str) -> str:
    """(nodes, tau) of each drafter, joined; nodes on a logarithmic axis."""
    logarithmic = {name: [(log2(nodes), tau) for nodes, tau in points] for name, points in lines.items()}
    place = placing([point for points in logarithmic.values() for point in points])
    parts, ordered = [], sorted(logarithmic.items(), key=lambda item: -item[1][-1][1])
    for number, (name, points) in enumerate(ordered):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(line([place(point) for point in points], colour))
        parts += named(number, name, colour, points[-1][1])
    ticks = {round(2**x): x for points in logarithmic.values() for x, _ in points}
    parts += [text(place((x, 0.0))[0], HIGH - EDGE + 16, str(nodes), anchor="middle") for nodes, x in ticks.items()]
    return page(parts, title, [tau for points in lines.values() for _, tau in points], "nodes", place, len(ordered))


def by_cost(dots: Sequence[tuple[str, float, float]], title: str) -> str:
    """(name, milliseconds, tau): what a draft is worth against what it takes."""
    place = placing([(0.0, 1.0), *((cost, tau) for _, cost, tau in dots)])
    parts, ordered = [], sorted(dots, key=lambda dot: -dot[2])
    for number, (name, cost, tau) in enumerate(ordered):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(dot(*place((cost, tau)), colour))
        parts += named(number, f"{name}, {cost:.2f} ms", colour, tau)
    return page(parts, title, [1.0, *(tau for _, _, tau in dots)], "milliseconds of a draft", place, len(ordered))


def placing(points: Sequence[Point]) -> Place:
    """From values to places on the drawing; what is drawn fills it."""
    xs, ys = ([point[axis] for point in points] or [0.0] for axis in (0, 1))
    left, bottom = min(xs), min(ys)
    width, height = max(xs) - left or 1.0, max(ys) - bottom or 1.0

    def place(point: Point) -> Point:
        x = EDGE + (WIDE - 2 * EDGE) * (point[0] - left) / width
        return x, HIGH - EDGE - (HIGH - 2 * EDGE) * (point[1] - bottom) / height

    return place


def named(number: int, name: str, colour: str, tau: float) -> list[str]:
    y = EDGE + LINE * number
    return [rectangle(WIDE, y - 9, 10, 10, colour), text(WIDE + 16, y, f"{name}  {tau:.2f}")]


def page(parts: Sequence[str], title: str, taus: Sequence[float], below: str, place: Place, lines: int) -> str:
    ends = sorted({min(taus), max(taus)}) if taus else []
    axis = [text(EDGE - 8, place((0.0, tau))[1] + 4, f"{tau:.2f}", anchor="end") for tau in ends]
    axis += [text(EDGE, 22, title, bold=True), text(WIDE / 2, HIGH - 12, below, anchor="middle")]
    high = max(HIGH, EDGE + LINE * (lines + 1))
    return Figure(title, WIDE + BESIDE, high, [*axis, *parts]).file()
