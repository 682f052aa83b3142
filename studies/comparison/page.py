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
from ctcdraft.report.tables import markdown_table
from ctcdraft.training.sweep import svg_plot
from studies.comparison.config import LATENCY, PARAMETERS, STEPS, TIME, ComparisonConfig
from studies.comparison.rematch import AFTER_TRAINING
from studies.comparison.store import Entry, ResultStore
from studies.comparison.tables import (
    DIFFERENCE_COLUMNS,
    EFFECT_COLUMNS,
    ComparisonData,
    arm_columns,
    grid_jobs,
    matching_section,
    pairs_section,
    runs_by_method,
    sampled_section,
    seeds_section,
    tau_by_draft_time,
    tau_by_nodes,
    trained_lines,
    untrained_lines,
)

ARM_TITLES = {
    STEPS: "Equal steps: every head as its authors shaped it, the same batches, optimiser and schedule",
    PARAMETERS: "Arm P: equal steps, trainable parameters matched to the reference",
    LATENCY: "Arm L: equal steps, draft time matched to the reference",
    TIME: "Arm T: equal training time",
}
DEFINED_TERMS = ("tau", "c, v, o", "speedup", "ci", "equal")


def write_page(config: ComparisonConfig, store: ResultStore) -> None:
    found = ComparisonData.of(store)
    drawn = draw_figures(config, found)
    write_text(store.out / "page.md", page_markdown(config, found, list(drawn)))
    write_text(store.out / "page.csv", page_csv(found))
    for name, svg in drawn.items():
        write_text(store.out / name, svg)


def draw_figures(config: ComparisonConfig, found: ComparisonData) -> dict[str, str]:
    """SVG by the name of its file, of what there is to draw."""
    made = {}
    if lines := tau_by_nodes(config, found):
        made["nodes.svg"] = tau_by_nodes_svg(lines, "tau by nodes, greedy")
    if dots := tau_by_draft_time(config, found):
        made["costs.svg"] = tau_by_cost_svg(dots, "tau by draft time, greedy")
    if cells := grid_jobs(config, found):
        made["factors.svg"] = svg_plot(cells, list(cells[0].values))
    return made


def page_markdown(config: ComparisonConfig, found: ComparisonData, figures: Sequence[str]) -> str:
    parts = [
        f"# {config.title}",
        conditions_section(config, found),
        "## What was equal",
        equal_conditions(config, found),
    ]
    for benchmark in config.benchmarks:
        for arm in config.arms:
            heads = list(trained_lines(config, found, arm, benchmark))
            if heads:
                parts += [f"## {ARM_TITLES[arm]} ({benchmark})", markdown_table(heads, arm_columns(config))]
        others = list(untrained_lines(config, found, benchmark))
        if others:
            parts += [f"## Controls and referees ({benchmark})", markdown_table(others, arm_columns(config))]
    parts += [f"![]({name})" for name in figures]
    parts += [*sampled_section(config, found), *matching_section(found), *seeds_section(config, found)]
    parts += [
        *pairs_section(
            found,
            "differences",
            DIFFERENCE_COLUMNS,
            "Differences, paired over questions, seeds pooled (intervals are over questions alone)",
        )
    ]
    parts += [
        *pairs_section(
            found,
            "effects",
            EFFECT_COLUMNS,
            "What each factor contributes, all else being equal, twins and seeds pooled (intervals are over questions "
            "alone)",
        )
    ]
    parts += ["## What the words mean", "\n".join(f"- **{word}**: {DEFINITIONS[word]}" for word in DEFINED_TERMS)]
    parts += ["## The same again", f"    {config.command}", "The page alone, from these files:"]
    parts += ["    python -m studies.comparison THIS_FOLDER"]
    return "\n\n".join(parts) + "\n"


def conditions_section(config: ComparisonConfig, found: ComparisonData) -> str:
    machines = sorted({f"{row['hardware']}, {row['dtype']}" for row in found.rows})
    sentences = [f"{'; '.join(machines) or 'nothing is measured yet'}."]
    for row in found.refused:
        sentences.append(f"Not printed, because it has no certificate: {row['drafter']} in {row['evaluation']}.")
    rates = [entry for entry in found.training.values() if entry["arm"] == STEPS and entry["seed"] == config.seed]
    tried = [(entry["entrant"], entry["learning_rate"]) for entry in found.training.values() if entry["arm"] == "rate"]
    edges = [
        one for one in rates if is_at_edge(one["learning_rate"], [r for name, r in tried if name == one["entrant"]])
    ]
    if edges:
        named = ", ".join(f"{one['entrant']} {one['learning_rate']:g}" for one in edges)
        sentences.append(
            f"Best at an edge of the learning rates that were tried, so perhaps better still beyond it: {named}."
        )
    for arm, name, ratio in unmatched_methods(config, found):
        sentences.append(
            f"Not matched within {config.matching.tolerance:.0%} in the arm of {arm}: {name}, {ratio:.2f}."
        )
    return "\n".join(sentences)


def unmatched_methods(config: ComparisonConfig, found: ComparisonData) -> Iterator[tuple[str, str, float]]:
    """(arm, entrant, its cost over the reference's) where they are too far apart: by the trained heads' own clocks
    where there are any."""
    told = {PARAMETERS: PARAMETERS, LATENCY: AFTER_TRAINING if AFTER_TRAINING in found.matching else LATENCY}
    for arm, part in told.items():
        for name, one in found.matching.get(part, {}).items() if arm in config.arms else ():
            if abs(one["ratio"] - 1) > config.matching.tolerance:
                yield arm, name, one["ratio"]


def is_at_edge(rate: float, tried: Sequence[float]) -> bool:
    return len(set(tried)) > 1 and rate in (min(tried), max(tried))


def equal_conditions(config: ComparisonConfig, found: ComparisonData) -> str:
    overrides = " ".join(config.shared_overrides).replace(str(config.raw_config["out"]), "OUT")
    own = {
        name: own_overrides(config, found.training[runs[0]])
        for name, runs in runs_by_method(found, config.arms[0]).items()
    }
    shared = [word for word in next(iter(own.values()), []) if all(word in some for some in own.values())]
    own = {name: [word for word in some if word not in shared] for name, some in own.items()}
    return "\n".join(
        [
            f"- corpus, tokens, batches, optimiser, schedule: `{' '.join([overrides, *shared])}`",
            f"- learning rate: {describe_learning_rate(config)}",
            f"- {config.steps:,} steps; seconds are {config.clock} seconds of these steps, without starts and probes",
            *(f"- not equal: {name} trains with `{' '.join(some)}`" for name, some in own.items() if some),
        ]
    )


def own_overrides(config: ComparisonConfig, entry: Entry) -> list[str]:
    """What a head's trainer was told beyond the work: between that and the rate."""
    own = takewhile(
        lambda word: not word.startswith("trainer.learning_rate="), entry["words"][len(config.shared_overrides) :]
    )
    return [word for word in own if word.startswith("trainer.")]


def describe_learning_rate(config: ComparisonConfig) -> str:
    rates = ", ".join(f"{rate:g}" for rate in config.rates.values)
    if len(config.rates.values) == 1:
        return f"{rates} for all"
    beyond = f" and, past an edge that is the best, up to {config.rates.beyond} more" if config.rates.beyond else ""
    return (
        f"the best of {rates}{beyond} for each entrant, tried for {config.trial_steps:,} steps and judged by tau on "
        f"{config.rates.prompts} prompts that nobody trains on and no result is from"
    )


def page_csv(found: ComparisonData) -> str:
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
SERIES_COLOURS = ("#1f5a8a", "#f2b872", "#3c7a3c", "#9ec9e8", "#8c4a1f", "#cc99cc", "#444444", "#99bb55")
FIGURE_WIDTH, FIGURE_HEIGHT, MARGIN, LEGEND_WIDTH, LINE_HEIGHT = 420, 300, 50, 240, 15

Point = tuple[float, float]
Projection = Callable[[Point], Point]


def tau_by_nodes_svg(lines: Mapping[str, Sequence[Point]], title: str) -> str:
    """(nodes, tau) of each drafter, joined; nodes on a logarithmic axis."""
    logarithmic = {name: [(log2(nodes), tau) for nodes, tau in points] for name, points in lines.items()}
    place = fit_projection([point for points in logarithmic.values() for point in points])
    parts, ordered = [], sorted(logarithmic.items(), key=lambda item: -item[1][-1][1])
    for number, (name, points) in enumerate(ordered):
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        parts.append(line([place(point) for point in points], colour))
        parts += legend_entry(number, name, colour, points[-1][1])
    ticks = {round(2**x): x for points in logarithmic.values() for x, _ in points}
    parts += [
        text(place((x, 0.0))[0], FIGURE_HEIGHT - MARGIN + 16, str(nodes), anchor="middle") for nodes, x in ticks.items()
    ]
    return figure_svg(
        parts, title, [tau for points in lines.values() for _, tau in points], "nodes", place, len(ordered)
    )


def tau_by_cost_svg(dots: Sequence[tuple[str, float, float]], title: str) -> str:
    """(name, milliseconds, tau): what a draft is worth against what it takes."""
    place = fit_projection([(0.0, 1.0), *((cost, tau) for _, cost, tau in dots)])
    parts, ordered = [], sorted(dots, key=lambda dot: -dot[2])
    for number, (name, cost, tau) in enumerate(ordered):
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        parts.append(dot(*place((cost, tau)), colour))
        parts += legend_entry(number, f"{name}, {cost:.2f} ms", colour, tau)
    return figure_svg(parts, title, [1.0, *(tau for _, _, tau in dots)], "milliseconds of a draft", place, len(ordered))


def fit_projection(points: Sequence[Point]) -> Projection:
    """From values to places on the drawing; what is drawn fills it."""
    xs, ys = ([point[axis] for point in points] or [0.0] for axis in (0, 1))
    left, bottom = min(xs), min(ys)
    width, height = max(xs) - left or 1.0, max(ys) - bottom or 1.0

    def place(point: Point) -> Point:
        x = MARGIN + (FIGURE_WIDTH - 2 * MARGIN) * (point[0] - left) / width
        return x, FIGURE_HEIGHT - MARGIN - (FIGURE_HEIGHT - 2 * MARGIN) * (point[1] - bottom) / height

    return place


def legend_entry(number: int, name: str, colour: str, tau: float) -> list[str]:
    y = MARGIN + LINE_HEIGHT * number
    return [rectangle(FIGURE_WIDTH, y - 9, 10, 10, colour), text(FIGURE_WIDTH + 16, y, f"{name}  {tau:.2f}")]


def figure_svg(
    parts: Sequence[str], title: str, taus: Sequence[float], below: str, place: Projection, lines: int
) -> str:
    ends = sorted({min(taus), max(taus)}) if taus else []
    axis = [text(MARGIN - 8, place((0.0, tau))[1] + 4, f"{tau:.2f}", anchor="end") for tau in ends]
    axis += [text(MARGIN, 22, title, bold=True), text(FIGURE_WIDTH / 2, FIGURE_HEIGHT - 12, below, anchor="middle")]
    high = max(FIGURE_HEIGHT, MARGIN + LINE_HEIGHT * (lines + 1))
    return Figure(title, FIGURE_WIDTH + LEGEND_WIDTH, high, [*axis, *parts]).file()
