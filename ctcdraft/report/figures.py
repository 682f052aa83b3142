"""The figures of an evaluation, drawn from the rows of its report. It measures nothing: what is absent is not drawn.

Where the time of a pass goes, as a stacked bar a drafter, in SVG. It knows numbers and colours, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.report.svg import (
    CHARACTER_WIDTH,
    GREY,
    Axes,
    Figure,
    assign_colours,
    axis_ticks,
    dot,
    line,
    rectangle,
    text,
)

Row = Mapping[str, Any]
MIN_LEGEND_WIDTH = 190  # room for names to the right, at least


def evaluation_figures(rows: Sequence[Row], sizes: Mapping[str, Any] | None) -> dict[str, Figure]:
    """By the name of its file, every figure that there are numbers for."""
    made = {
        "acceptance_by_depth": acceptance_by_depth(rows),
        "acceptance_by_category": acceptance_by_category(rows),
        "time": breakdown_figure(rows, "Time of a pass, milliseconds") if timed_rows(rows) else None,
        "tau_and_draft_time": tau_by_draft_time(rows),
        "reading_by_nodes": read_cost_by_nodes(rows, sizes or {}),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def drafter_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["drafter"] != AUTOREGRESSIVE]


def drafter_colours(rows: Sequence[Row]) -> dict[str, str]:
    """By drafter, the same in every figure; autoregression is grey."""
    return {AUTOREGRESSIVE: GREY, **assign_colours(row["drafter"] for row in drafter_rows(rows))}


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["time"]["read"] is not None]


def acceptance_by_depth(rows: Sequence[Row]) -> Figure | None:
    """alpha[k]: a line a drafter, interrupted where no pass came so deep."""
    lines = [row for row in drafter_rows(rows) if any(rate is not None for rate in row["alpha"])]
    if not lines:
        return None
    title, deepest = "Acceptance by depth", max(len(row["alpha"]) for row in lines)
    axes = Axes(deepest + 0.5, 1.0)
    marks = [(float(depth), str(depth)) for depth in range(1, deepest + 1, 1 + deepest // 16)]
    shapes = axes.frame(title, "depth k", "alpha[k]: accepted at k / passes that had a guess there", marks)
    colours = {row["drafter"]: drafter_colours(rows)[row["drafter"]] for row in lines}
    for row, colour in zip(lines, colours.values(), strict=True):
        run: list[tuple[float, float]] = []
        for depth, rate in enumerate([*row["alpha"], None], 1):
            if rate is not None:
                run.append(axes.at(depth, rate))
                shapes.append(dot(*run[-1], colour, f"{row['drafter']}, depth {depth}: {rate:.3f}"))
            elif run:
                shapes.append(line(run, colour))
                run = []
    return figure_with_legend(title, axes, shapes, colours)


def acceptance_by_category(rows: Sequence[Row]) -> Figure | None:
    """tau: a group of bars a category, a bar a drafter."""
    lines = drafter_rows(rows)
    names = list(dict.fromkeys(name for row in lines for name in row["categories"]))
    values = [row["categories"][name]["tau"] for row in lines for name in row["categories"]]
    values_known = [value for value in values if value is not None]
    if not values_known:
        return None
    title = "Acceptance length by category"
    axes = Axes(len(names), axis_ticks(max(values_known))[-1], width=max(440, 90 * len(names)))
    shapes = axes.frame(title, "", "tau", [(place + 0.5, name) for place, name in enumerate(names)])
    colours = {row["drafter"]: drafter_colours(rows)[row["drafter"]] for row in lines}
    for number, (row, colour) in enumerate(zip(lines, colours.values(), strict=True)):
        for place, name in enumerate(names):
            tau = row["categories"].get(name, {"tau": None})["tau"]
            if tau is not None:
                left, top = axes.at(place + 0.1 + 0.8 * number / len(lines), tau)
                wide = axes.width / len(names) * 0.8 / len(lines) - 1
                label = f"{row['drafter']}, {name}: {tau:.2f}"
                shapes.append(rectangle(left, top, wide, axes.top + axes.height - top, colour, label))
    return figure_with_legend(title, axes, shapes, colours)


def tau_by_draft_time(rows: Sequence[Row]) -> Figure | None:
    """What a draft costs against what it brings; above and to the left is better."""
    known_rows = [row for row in timed_rows(rows) if row["tau"] is not None]
    if not known_rows:
        return None
    title = "Acceptance length against draft time"
    costs = [1e3 * (row["time"]["draft"] + row["time"]["tree"]) for row in known_rows]
    axes = Axes(axis_ticks(max(costs))[-1], axis_ticks(max(row["tau"] for row in known_rows))[-1])
    marks = [(value, f"{value:g}") for value in axis_ticks(max(costs))]
    label = "tau; beside the names the speed-up over autoregression"
    shapes = axes.frame(title, "draft and tree, milliseconds a pass", label, marks)
    names: dict[str, str] = {}
    for row, cost in zip(known_rows, costs, strict=True):
        colour = drafter_colours(rows)[row["drafter"]]
        shapes.append(dot(*axes.at(cost, row["tau"]), colour, f"{row['drafter']}: tau {row['tau']:.2f}, {cost:.3f} ms"))
        names[row["drafter"] + ("" if row["speedup"] is None else f" {row['speedup']:.2f}x")] = colour
    return figure_with_legend(title, axes, shapes, names)


def read_cost_by_nodes(rows: Sequence[Row], sizes: Mapping[str, Any]) -> Figure | None:
    """v of every contestant at its own size; where sizes were tried, a line: the cost of a whole pass by size."""
    points = [
        (1 if row["drafter"] == AUTOREGRESSIVE else row["nodes"], row["v"], row["drafter"]) for row in timed_rows(rows)
    ]
    tried = {name: [(size["nodes"], size["cost"]) for size in found["sizes"]] for name, found in sizes.items()}
    curves = {name: curve for name, curve in tried.items() if curve}
    if not points and not curves:
        return None
    costs = [cost for _, cost, _ in points] + [cost for curve in curves.values() for _, cost in curve]
    nodes = [n for n, _, _ in points] + [n for curve in curves.values() for n, _ in curve]
    title = "Cost of reading a tree, in autoregressive passes"
    axes = Axes(axis_ticks(max(nodes))[-1], axis_ticks(max(costs))[-1])
    lines = ", line: c + v + o" if curves else ""
    marks = [(value, f"{value:g}") for value in axis_ticks(max(nodes))]
    shapes = axes.frame(title, "nodes a tree may have", f"dot: v(n){lines}", marks)
    known = drafter_colours(rows)
    for n, v, name in points:
        shapes.append(dot(*axes.at(n, v), known[name], f"{name}: v({n}) = {v:.2f}"))
    for name, curve in curves.items():
        shapes.append(line([axes.at(n, cost) for n, cost in curve], known[name]))
    at = {name: f"{name} v({n}) = {v:.2f}" for n, v, name in points}
    named = dict.fromkeys([*(name for *_, name in points), *curves])
    return figure_with_legend(title, axes, shapes, {at.get(name, name): known[name] for name in named})


def latency_read_cost(measured: Sequence[Row]) -> Figure:
    """v(n) of a base, a line for every context, as the latency benchmark measures it."""
    curves = [[(int(nodes), v) for nodes, v in read["v"].items()] for read in measured]
    title = "Reading a tree of n nodes, in autoregressive passes"
    most = max(n for curve in curves for n, _ in curve)
    axes = Axes(axis_ticks(most)[-1], axis_ticks(max(v for curve in curves for _, v in curve))[-1])
    shapes = axes.frame(title, "nodes n", "v(n)", [(value, f"{value:g}") for value in axis_ticks(most)])
    names = assign_colours(f"behind {read['context']:,} tokens" for read in measured)
    for (name, colour), curve in zip(names.items(), curves, strict=True):
        shapes.append(line([axes.at(n, v) for n, v in curve], colour))
        shapes += [dot(*axes.at(n, v), colour, f"{name}: v({n}) = {v:.2f}") for n, v in curve]
    return figure_with_legend(title, axes, shapes, names)


def figure_with_legend(title: str, axes: Axes, shapes: Sequence[str], names: Mapping[str, str]) -> Figure:
    """With its legend, names and colours, and room for it."""
    low = max(axes.top + axes.height + 44, axes.top + 20 * len(names) + 8)
    aside = max(MIN_LEGEND_WIDTH, 42 + CHARACTER_WIDTH * max(map(len, names), default=0))
    return Figure(title, axes.left + axes.width + aside, low, [*shapes, *axes.legend(names)])


# Told apart in grey print, too: light and dark take turns.
PART_COLOURS = {
    "draft": "#1f5a8a",
    "tree": "#9ec9e8",
    "read": "#3c7a3c",
    "verify": "#f2b872",
    "keep": "#8c4a1f",
    "other": "#cccccc",
}
MIN_LEFT_MARGIN, BARS_WIDTH, RIGHT_MARGIN, BAR_HEIGHT, BAR_GAP, HEADER_HEIGHT = 170, 520, 90, 20, 10, 62


def breakdown_svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The figure as a file."""
    return breakdown_figure(rows, title).file()


def breakdown_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """One bar a row that was timed: row["drafter"], and row["time"] in seconds by part; the longest fills the width."""
    timed = [row for row in rows if row["time"]["read"] is not None]
    longest = max((step_milliseconds(row) for row in timed), default=0.0) or 1.0
    left = max([MIN_LEFT_MARGIN, *(16 + CHARACTER_WIDTH * len(row["drafter"]) for row in timed)])
    parts = [text(8, 18, title, bold=True), *breakdown_legend(left)]
    for number, row in enumerate(timed):
        parts += breakdown_bar(row, left, HEADER_HEIGHT + number * (BAR_HEIGHT + BAR_GAP), BARS_WIDTH / longest)
    return Figure(title, left + BARS_WIDTH + RIGHT_MARGIN, HEADER_HEIGHT + len(timed) * (BAR_HEIGHT + BAR_GAP), parts)


def step_milliseconds(row: Mapping[str, Any]) -> float:
    return 1e3 * sum(row["time"][part] for part in PART_COLOURS)


def breakdown_legend(left: int) -> list[str]:
    places = range(left, left + BARS_WIDTH, BARS_WIDTH // len(PART_COLOURS))
    return [
        shape
        for (part, colour), x in zip(PART_COLOURS.items(), places, strict=False)
        for shape in (rectangle(x, 30, 12, 12, colour), text(x + 17, 41, part))
    ]


def breakdown_bar(row: Mapping[str, Any], left: int, y: int, scale: float) -> list[str]:
    shapes, x = [text(left - 8, y + 15, row["drafter"], anchor="end")], float(left)
    for part, colour in PART_COLOURS.items():
        wide = 1e3 * row["time"][part] * scale
        shapes.append(rectangle(x, y, wide, BAR_HEIGHT, colour, f"{part} {1e3 * row['time'][part]:.3f} ms"))
        x += wide
    return [*shapes, text(x + 6, y + 15, f"{step_milliseconds(row):.2f}")]
