"""Figures of an evaluation, drawn from the rows of report.json; what a report does not hold is not drawn.

Acceptance rate by depth, acceptance length by category and against draft time, the time of a step by phase, and the
cost of verifying a tree by its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.report import svg
from ctcdraft.report.svg import Axes, Figure, assign_colours, axis_ticks, dot, line, numeric_ticks, rectangle, text

Row = Mapping[str, Any]
PART_COLOURS = {  # light and dark alternate, so that neighbours differ in grey print
    "draft": "#1f5a8a",
    "tree": "#9ec9e8",
    "read": "#3c7a3c",
    "verify": "#f2b872",
    "keep": "#8c4a1f",
    "other": "#cccccc",
}
BREAKDOWN_TITLE = "Time per step by phase, milliseconds"
MIN_LEFT_MARGIN, BARS_WIDTH, RIGHT_MARGIN, BAR_HEIGHT, BAR_GAP, HEADER_HEIGHT = 170, 520, 90, 20, 10, 62


def evaluation_figures(rows: Sequence[Row], sizes: Mapping[str, Any] | None) -> dict[str, Figure]:
    """Return every figure that the report has numbers for, by the name of its file."""
    figures = {
        "acceptance_by_depth": acceptance_by_depth(rows),
        "acceptance_by_category": acceptance_by_category(rows),
        "time": breakdown_figure(rows, BREAKDOWN_TITLE) if timed_rows(rows) else None,
        "tau_and_draft_time": tau_by_draft_time(rows),
        "reading_by_nodes": read_cost_by_nodes(rows, sizes or {}),
        "reliability": reliability_figure(rows, sizes or {}),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def drafter_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["drafter"] != AUTOREGRESSIVE]


def drafter_colours(rows: Sequence[Row]) -> dict[str, str]:
    # From all rows of the report, so that a drafter has one colour in every figure.
    return {AUTOREGRESSIVE: svg.GREY, **assign_colours(row["drafter"] for row in drafter_rows(rows))}


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    # A replay, and an evaluation without its profiling run, time no steps.
    return [row for row in rows if row["time"]["read"] is not None]


def acceptance_by_depth(rows: Sequence[Row]) -> Figure | None:
    """Draw alpha[k], one line per drafter, interrupted at depths that no step reached."""
    lines = [row for row in drafter_rows(rows) if any(rate is not None for rate in row["alpha"])]
    if not lines:
        return None
    title, deepest = "Acceptance rate by depth", max(len(row["alpha"]) for row in lines)
    axes = Axes(deepest + 0.5, 1.0)
    ticks = [(float(depth), str(depth)) for depth in range(1, deepest + 1, 1 + deepest // 16)]  # at most 16
    shapes = axes.frame(title, "depth k", "alpha[k]: accepted at depth k / steps with a draft token there", ticks)
    colours = {row["drafter"]: drafter_colours(rows)[row["drafter"]] for row in lines}
    for row, colour in zip(lines, colours.values(), strict=True):
        run: list[tuple[float, float]] = []
        for depth, rate in enumerate([*row["alpha"], None], 1):  # the None at the end draws the last line
            if rate is not None:
                run.append(axes.at(depth, rate))
                shapes.append(dot(*run[-1], colour, f"{row['drafter']}, depth {depth}: {rate:.3f}"))
            elif run:
                shapes.append(line(run, colour))
                run = []
    return axes.figure(title, shapes, colours)


def acceptance_by_category(rows: Sequence[Row]) -> Figure | None:
    """Draw tau, one group of bars per category, one bar per drafter."""
    lines = drafter_rows(rows)
    names = list(dict.fromkeys(name for row in lines for name in row["categories"]))
    taus = [part["tau"] for row in lines for part in row["categories"].values() if part["tau"] is not None]
    if not taus:
        return None
    title = "Mean acceptance length by category"
    axes = Axes(len(names), axis_ticks(max(taus))[-1], width=max(440, 90 * len(names)))
    shapes = axes.frame(title, "", "tau", [(index + 0.5, name) for index, name in enumerate(names)])
    colours = {row["drafter"]: drafter_colours(rows)[row["drafter"]] for row in lines}
    width = axes.width / len(names) * 0.8 / len(lines) - 1  # a fifth of a group, and a pixel between bars, stays free
    for number, (row, colour) in enumerate(zip(lines, colours.values(), strict=True)):
        for index, name in enumerate(names):
            tau = row["categories"].get(name, {"tau": None})["tau"]
            if tau is not None:
                left, top = axes.at(index + 0.1 + 0.8 * number / len(lines), tau)
                hint = f"{row['drafter']}, {name}: {tau:.2f}"
                shapes.append(rectangle(left, top, width, axes.top + axes.height - top, colour, hint))
    return axes.figure(title, shapes, colours)


def tau_by_draft_time(rows: Sequence[Row]) -> Figure | None:
    """Draw tau against the time of a draft; up and to the left is better."""
    measured = [row for row in timed_rows(rows) if row["tau"] is not None]
    if not measured:
        return None
    title = "Mean acceptance length against draft time"
    costs = [1e3 * (row["time"]["draft"] + row["time"]["tree"]) for row in measured]
    axes = Axes(axis_ticks(max(costs))[-1], axis_ticks(max(row["tau"] for row in measured))[-1])
    label = "tau; beside the names the speed-up over autoregression"
    shapes = axes.frame(title, "draft and tree, milliseconds per step", label, numeric_ticks(max(costs)))
    legend: dict[str, str] = {}
    for row, cost in zip(measured, costs, strict=True):
        colour = drafter_colours(rows)[row["drafter"]]
        shapes.append(dot(*axes.at(cost, row["tau"]), colour, f"{row['drafter']}: tau {row['tau']:.2f}, {cost:.3f} ms"))
        legend[row["drafter"] + ("" if row["speedup"] is None else f" {row['speedup']:.2f}x")] = colour
    return axes.figure(title, shapes, legend)


def read_cost_by_nodes(rows: Sequence[Row], sizes: Mapping[str, Any]) -> Figure | None:
    """Draw v of every drafter at its own tree size; if tree sizes were searched, a line of c + v + o by size."""
    # The baseline reads one token per step, whatever decoding.nodes is.
    points = [
        (1 if row["drafter"] == AUTOREGRESSIVE else nodes_read(row), row["v"], row["drafter"])
        for row in timed_rows(rows)
    ]
    searched = {name: [(size["nodes"], size["cost"]) for size in choice["sizes"]] for name, choice in sizes.items()}
    curves = {name: curve for name, curve in searched.items() if curve}
    if not points and not curves:
        return None
    costs = [cost for _, cost, _ in points] + [cost for curve in curves.values() for _, cost in curve]
    nodes = [n for n, _, _ in points] + [n for curve in curves.values() for n, _ in curve]
    title = "Cost of verifying a tree, in autoregressive steps"
    axes = Axes(axis_ticks(max(nodes))[-1], axis_ticks(max(costs))[-1])
    label, ticks = f"dot: v(n){', line: c + v + o' if curves else ''}", numeric_ticks(max(nodes))
    shapes = axes.frame(title, f"nodes of a tree, mean{' (line: limit)' if curves else ''}", label, ticks)
    colours = drafter_colours(rows)
    for n, v, name in points:
        shapes.append(dot(*axes.at(n, v), colours[name], f"{name}: v({n}) = {v:.2f}"))
    for name, curve in curves.items():
        shapes.append(line([axes.at(n, cost) for n, cost in curve], colours[name]))
    # Dots of one tree size may cover each other, so the legend holds their values.
    labels = {name: f"{name} v({n}) = {v:.2f}" for n, v, name in points}
    named = dict.fromkeys([*labels, *curves])
    return axes.figure(title, shapes, {labels.get(name, name): colours[name] for name in named})


def nodes_read(row: Row) -> float:
    return round(row["mean_nodes"], 1) if row.get("mean_nodes") else row["nodes"]


def reliability_figure(rows: Sequence[Row], sizes: Mapping[str, Any]) -> Figure | None:
    """Draw the accepted share of nodes against their calibrated probability; on the diagonal both are equal."""
    curves = {name: choice["reliability"] for name, choice in sizes.items() if choice.get("reliability")}
    if not curves:
        return None
    title, axes = "Reliability of acceptance probabilities", Axes(1.0, 1.0)
    shapes = axes.frame(title, "calibrated probability of a node", "share of nodes accepted", numeric_ticks(1.0))
    shapes.append(line([axes.at(0, 0), axes.at(1, 1)], faint=True))
    colours = {name: drafter_colours(rows)[name] for name in curves}
    for name, bins in curves.items():
        shapes.append(line([axes.at(part["probability"], part["accepted"]) for part in bins], colours[name]))
        for part in bins:
            hint = f"{name}: {part['probability']:.3f}, accepted {part['accepted']:.3f} of {part['nodes']:,} nodes"
            shapes.append(dot(*axes.at(part["probability"], part["accepted"]), colours[name], hint))
    return axes.figure(title, shapes, colours)


def latency_read_cost(measured: Sequence[Row]) -> Figure:
    """Draw v(n) as the latency benchmark measures it, one line per context length."""
    curves = [[(int(nodes), v) for nodes, v in read["v"].items()] for read in measured]
    title = "Verifying a tree of n nodes, in autoregressive steps"
    most = max(n for curve in curves for n, _ in curve)
    axes = Axes(axis_ticks(most)[-1], axis_ticks(max(v for curve in curves for _, v in curve))[-1])
    shapes = axes.frame(title, "nodes n", "v(n)", numeric_ticks(most))
    colours = assign_colours(f"after {read['context']:,} tokens" for read in measured)
    for (name, colour), curve in zip(colours.items(), curves, strict=True):
        shapes.append(line([axes.at(n, v) for n, v in curve], colour))
        shapes += [dot(*axes.at(n, v), colour, f"{name}: v({n}) = {v:.2f}") for n, v in curve]
    return axes.figure(title, shapes, colours)


def breakdown_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw one stacked bar per timed row (row["time"]: seconds per step by phase); the longest fills the width."""
    timed = timed_rows(rows)
    longest = max(map(step_milliseconds, timed), default=0.0) or 1.0  # without timed rows only the legend is drawn
    left = max([MIN_LEFT_MARGIN, *(16 + svg.CHARACTER_WIDTH * len(row["drafter"]) for row in timed)])
    shapes = [text(8, 18, title, bold=True)]
    for x, (part, colour) in zip(range(left, left + BARS_WIDTH, BARS_WIDTH // 6), PART_COLOURS.items(), strict=False):
        shapes += [rectangle(x, 30, 12, 12, colour), text(x + 17, 41, part)]
    for number, row in enumerate(timed):
        shapes += breakdown_bar(row, left, HEADER_HEIGHT + number * (BAR_HEIGHT + BAR_GAP), BARS_WIDTH / longest)
    return Figure(title, left + BARS_WIDTH + RIGHT_MARGIN, HEADER_HEIGHT + len(timed) * (BAR_HEIGHT + BAR_GAP), shapes)


def step_milliseconds(row: Row) -> float:
    return 1e3 * sum(row["time"][part] for part in PART_COLOURS)


def breakdown_bar(row: Row, left: int, y: int, scale: float) -> list[str]:
    shapes, x = [text(left - 8, y + 15, row["drafter"], anchor="end")], float(left)
    for part, colour in PART_COLOURS.items():
        milliseconds = 1e3 * row["time"][part]
        shapes.append(rectangle(x, y, milliseconds * scale, BAR_HEIGHT, colour, f"{part} {milliseconds:.3f} ms"))
        x += milliseconds * scale
    return [*shapes, text(x + 6, y + 15, f"{step_milliseconds(row):.2f}")]
