"""page.md, page.csv and figures of a comparison, written from its files alone.

Rows that failed the losslessness check are named and not printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from math import log2
from pathlib import Path

import pandas as pd

from ctcdraft.errors import InputError
from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.io import write_text
from ctcdraft.report.svg import Axes, Figure, Point, assign_colours, axis_ticks, dot, line, numeric_ticks
from ctcdraft.report.tables import markdown_definitions, markdown_table
from ctcdraft.training.sweep import Job, svg_plot
from studies.comparison.config import LATENCY, PARAMETERS, STEPS, TIME, ComparisonConfig, comparison_config
from studies.comparison.matching import AFTER_TRAINING
from studies.comparison.statistics import factor_cells, write_statistics
from studies.comparison.store import RULES, Entry, ResultStore
from studies.comparison.tables import (
    DIFFERENCE_COLUMNS,
    EFFECT_COLUMNS,
    ComparisonData,
    arm_columns,
    matching_section,
    runs_by_method,
    sampled_section,
    seeds_section,
    tau_by_draft_time,
    tau_by_nodes,
    titled_table,
    trained_lines,
    untrained_lines,
)

ARM_TITLES = {
    STEPS: "Equal steps: every head in its published size, the same batches, optimizer and schedule",
    PARAMETERS: "Equal parameters: equal steps, trainable parameters matched to the reference",
    LATENCY: "Equal draft time: equal steps, draft time matched to the reference",
    TIME: "Equal training time",
}
DEFINED_TERMS = ("tau", "c, v, o", "speedup", "ci", "equal")
CSV_KEYS = (
    *("evaluation", "kind", "benchmark", "temperature", "drafter", "nodes", "prompts", "tokens", "passes", "tau"),
    *("speedup", "speedup_decode", "c", "v", "o", "predicted_speedup", "draft_parameters", "peak_memory_bytes"),
)
LOSSLESS_KEYS = ("equal", "prompts")


def rebuild_pages(folders: Sequence[str]) -> None:
    """Write statistics, page and figures of finished comparisons again, from their JSON files alone."""
    for folder in folders:
        store = ResultStore(Path(folder))
        write_results(stored_config(store), store)


def stored_config(store: ResultStore) -> ComparisonConfig:
    stored = store.read(RULES)
    if not stored:
        raise InputError(f"{store.out} holds no finished comparison: there is no {RULES}.json")
    try:
        # The stored `out` is where it was made, which may be another machine.
        return replace(comparison_config(**stored), out=store.out)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(
            f"{store.out / RULES}.json is of another version ({' '.join(str(error).split())}); use that version"
        ) from error


def write_results(config: ComparisonConfig, store: ResultStore) -> None:
    write_statistics(config, store)
    write_page(config, store)
    print(f"the page is {config.out / 'page.md'}")


def write_page(config: ComparisonConfig, store: ResultStore) -> None:
    data = ComparisonData.of(store)
    figures = draw_figures(config, data)
    write_text(store.out / "page.md", page_markdown(config, data, list(figures)))
    write_text(store.out / "page.csv", page_csv(data))
    for name, svg in figures.items():
        write_text(store.out / name, svg)


def draw_figures(config: ComparisonConfig, data: ComparisonData) -> dict[str, str]:
    """Return SVG by file name."""
    figures = {}
    if curves := tau_by_nodes(config, data):
        figures["nodes.svg"] = nodes_figure(curves).file()
    if dots := tau_by_draft_time(config, data):
        figures["costs.svg"] = draft_time_figure(dots).file()
    if cells := grid_jobs(config, data):
        figures["factors.svg"] = svg_plot(cells, list(cells[0].values))
    return figures


def grid_jobs(config: ComparisonConfig, data: ComparisonData) -> list[Job]:
    """Return a grid's cells in the first arm, with tau of the first seed at the first reported size."""
    benchmark, nodes = next(iter(config.benchmarks)), config.reported_sizes[0]
    jobs = []
    for cell, seeds in factor_cells(config, data.training, config.arms[0]).items():
        name = seeds[min(seeds)]
        row = data.row("replay", benchmark, 0.0, name, nodes)
        if row is not None and row["tau"] is not None:
            jobs.append(Job(name, dict(cell), "", 0, row["tau"], None))
    return jobs


def nodes_figure(curves: Mapping[str, Sequence[Point]]) -> Figure:
    """Draw (nodes, tau) of each drafter, best first in the legend."""
    ordered = sorted(curves.items(), key=lambda item: -item[1][-1][1])
    sizes = sorted({nodes for curve in curves.values() for nodes, _ in curve})
    most = max(tau for curve in curves.values() for _, tau in curve)
    # Trees double in size from one to the next, so the axis is logarithmic.
    axes = Axes(log2(sizes[-1]), axis_ticks(most)[-1], min_x=log2(sizes[0]))
    shapes = axes.frame("tau by nodes, greedy", "nodes", "tau", [(log2(nodes), f"{nodes:g}") for nodes in sizes])
    colours = assign_colours(f"{name}  {curve[-1][1]:.2f}" for name, curve in ordered)
    for (name, curve), colour in zip(ordered, colours.values(), strict=True):
        points = [axes.at(log2(nodes), tau) for nodes, tau in curve]
        shapes.append(line(points, colour))
        shapes += [dot(*point, colour, f"{name}: {tau:.2f}") for point, (_, tau) in zip(points, curve, strict=True)]
    return axes.figure("tau by nodes, greedy", shapes, colours)


def draft_time_figure(dots: Sequence[tuple[str, float, float]]) -> Figure:
    ordered = sorted(dots, key=lambda one: -one[2])
    longest, most = max(cost for _, cost, _ in dots), ordered[0][2]
    axes = Axes(axis_ticks(longest)[-1], axis_ticks(most)[-1])
    title = "tau by draft time, greedy"
    shapes = axes.frame(title, "milliseconds per draft", "tau", numeric_ticks(longest))
    colours = assign_colours(f"{name}, {cost:.2f} ms  {tau:.2f}" for name, cost, tau in ordered)
    for (label, colour), (_, cost, tau) in zip(colours.items(), ordered, strict=True):
        shapes.append(dot(*axes.at(cost, tau), colour, label))
    return axes.figure(title, shapes, colours)


def page_markdown(config: ComparisonConfig, data: ComparisonData, figures: Sequence[str]) -> str:
    parts = [f"# {config.title}", conditions_section(config, data), "## What was equal", equal_conditions(config, data)]
    for benchmark in config.benchmarks:
        for arm in config.arms:
            if lines := list(trained_lines(config, data, arm, benchmark)):
                parts += [f"## {ARM_TITLES[arm]} ({benchmark})", markdown_table(lines, arm_columns(config))]
        if lines := list(untrained_lines(config, data, benchmark)):
            parts += [f"## Methods without training ({benchmark})", markdown_table(lines, arm_columns(config))]
    difference_title = "Differences, paired over questions, seeds pooled (intervals are over questions alone)"
    effect_title = "Effect of each factor, all else equal, pairs and seeds pooled (intervals are over questions alone)"
    parts += [
        *(f"![]({name})" for name in figures),
        *sampled_section(config, data),
        *matching_section(data),
        *seeds_section(config, data),
        *titled_table(difference_title, data.verdict.get("differences", []), DIFFERENCE_COLUMNS),
        *titled_table(effect_title, data.verdict.get("effects", []), EFFECT_COLUMNS),
        markdown_definitions({term: DEFINITIONS[term] for term in DEFINED_TERMS}),
        f"## Reproduce\n\n    {config.command}\n\nThe page alone, from these files:",
        "    python -m studies.comparison THIS_FOLDER",
    ]
    return "\n\n".join(parts) + "\n"


def conditions_section(config: ComparisonConfig, data: ComparisonData) -> str:
    machines = sorted({f"{row['hardware']}, {row['dtype']}" for row in data.rows})
    sentences = [f"{'; '.join(machines) or 'nothing is measured yet'}."]
    for row in data.refused:
        sentences.append(f"Not printed, as it failed the losslessness check: {row['drafter']}, {row['evaluation']}.")
    entries = list(data.training.values())
    tried: dict[str, list[float]] = {}
    for entry in entries:
        if entry["arm"] == "rate":
            tried.setdefault(entry["entrant"], []).append(entry["learning_rate"])
    edges = [
        f"{entry['entrant']} {entry['learning_rate']:g}"
        for entry in entries
        if (entry["arm"], entry["seed"]) == (STEPS, config.seed)
        and is_at_edge(entry["learning_rate"], tried.get(entry["entrant"], []))
    ]
    if edges:
        sentences.append(f"Best learning rate at an edge of those tried, perhaps better beyond it: {', '.join(edges)}.")
    tolerance = f"{config.matching.tolerance:.0%}"
    for arm, name, ratio in unmatched_methods(config, data):
        sentences.append(f"Not matched within {tolerance} in the arm of {arm}: {name}, {ratio:.2f}.")
    return "\n".join(sentences)


def unmatched_methods(config: ComparisonConfig, data: ComparisonData) -> Iterator[tuple[str, str, float]]:
    """Yield (arm, method, its cost over the reference's) outside the tolerance."""
    # An estimate from an untrained head gives way to what the trained one costs.
    parts = {PARAMETERS: PARAMETERS, LATENCY: AFTER_TRAINING if AFTER_TRAINING in data.matching else LATENCY}
    for arm, part in parts.items():
        for name, match in data.matching.get(part, {}).items() if arm in config.arms else ():
            if abs(match["ratio"] - 1) > config.matching.tolerance:
                yield arm, name, match["ratio"]


def is_at_edge(rate: float, tried: Sequence[float]) -> bool:
    return len(set(tried)) > 1 and rate in (min(tried), max(tried))


def equal_conditions(config: ComparisonConfig, data: ComparisonData) -> str:
    overrides = " ".join(config.shared_overrides).replace(str(config.raw_config["out"]), "OUT")
    methods = runs_by_method(data, config.arms[0])
    own = {name: own_overrides(config, data.training[runs[0]]) for name, runs in methods.items()}
    shared = [one for one in next(iter(own.values()), []) if all(one in others for others in own.values())]
    own = {name: [one for one in overrides if one not in shared] for name, overrides in own.items()}
    return "\n".join(
        [
            f"- corpus, tokens, batches, optimizer, schedule: `{' '.join([overrides, *shared])}`",
            f"- learning rate: {describe_learning_rate(config)}",
            f"- {config.steps:,} steps; seconds are {config.clock} seconds of these steps, without start-up and "
            "validation",
            *(f"- not equal: {name} trains with `{' '.join(rest)}`" for name, rest in own.items() if rest),
        ]
    )


def own_overrides(config: ComparisonConfig, entry: Entry) -> list[str]:
    """Return the overrides of the trainer that the method itself sets."""
    # train_overrides writes shared ones, then the method's, then those of the run, which begin with the learning rate.
    own = entry["overrides"][len(config.shared_overrides) :]
    own = takewhile(lambda one: not one.startswith("trainer.learning_rate="), own)
    return [one for one in own if one.startswith("trainer.")]


def describe_learning_rate(config: ComparisonConfig) -> str:
    rates = ", ".join(f"{rate:g}" for rate in config.learning_rates.values)
    if len(config.learning_rates.values) == 1:
        return f"{rates} for all"
    beyond = f" and up to {config.learning_rates.beyond} more beyond an edge" if config.learning_rates.beyond else ""
    return (
        f"the best of {rates}{beyond} for each method, tried for {config.trial_steps:,} steps and ranked by tau on "
        f"{config.learning_rates.prompts} held-out prompts, which no method trains on and no result is from"
    )


def page_csv(data: ComparisonData) -> str:
    lines = [
        [*(row[key] for key in CSV_KEYS), *(row["tau_ci"] or [None, None]), *map(row["lossless"].get, LOSSLESS_KEYS)]
        for row in data.rows
    ]
    header = [*CSV_KEYS, "tau_low", "tau_high", "equal", "compared"]
    # As objects, or whole numbers of a column with gaps become floats.
    return pd.DataFrame(lines, columns=header, dtype=object).to_csv(index=False, lineterminator="\n")
