"""The figures of an evaluation, drawn from the rows of its report. It measures nothing: what is absent is not drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation import breakdown
from ctcdraft.evaluation.drawing import Axes, Figure, colour_of, dot, line, rectangle, ticks
from ctcdraft.evaluation.records import AUTOREGRESSIVE

Row = Mapping[str, Any]
ASIDE = 190  # room for names to the right


def drawn(rows: Sequence[Row], sizes: Mapping[str, Any] | None) -> dict[str, Figure]:
    """By the name of its file, every figure that there are numbers for."""
    made = {
        "acceptance_by_depth": by_depth(rows),
        "acceptance_by_category": by_category(rows),
        "time": breakdown.figure(rows, "Time of a pass, milliseconds") if timed(rows) else None,
        "tau_and_draft_time": tau_and_draft_time(rows),
        "reading_by_nodes": reading(rows, sizes or {}),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def drafting(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["drafter"] != AUTOREGRESSIVE]


def timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["time"]["read"] is not None]


def by_depth(rows: Sequence[Row]) -> Figure | None:
    """alpha[k]: a line a drafter, interrupted where no pass came so deep."""
    lines = [row for row in drafting(rows) if any(rate is not None for rate in row["alpha"])]
    if not lines:
        return None
    title, deepest = "Acceptance by depth", max(len(row["alpha"]) for row in lines)
    axes = Axes(deepest + 0.5, 1.0)
    marks = [(float(depth), str(depth)) for depth in range(1, deepest + 1, 1 + deepest // 16)]
    shapes = axes.frame(title, "depth k", "alpha[k]: accepted at k / passes that had a guess there", marks)
    for number, row in enumerate(lines):
        run: list[tuple[float, float]] = []
        for depth, rate in enumerate([*row["alpha"], None], 1):
            if rate is not None:
                run.append(axes.at(depth, rate))
                shapes.append(dot(*run[-1], colour_of(number), f"{row['drafter']}, depth {depth}: {rate:.3f}"))
            elif run:
                shapes.append(line(run, colour_of(number)))
                run = []
    return framed(title, axes, shapes, [row["drafter"] for row in lines])


def by_category(rows: Sequence[Row]) -> Figure | None:
    """tau: a group of bars a category, a bar a drafter."""
    lines = drafting(rows)
    names = list(dict.fromkeys(name for row in lines for name in row["categories"]))
    values = [row["categories"][name]["tau"] for row in lines for name in row["categories"]]
    there = [value for value in values if value is not None]
    if not there:
        return None
    title = "Acceptance length by category"
    axes = Axes(len(names), ticks(max(there))[-1], wide=max(440, 90 * len(names)))
    shapes = axes.frame(title, "", "tau", [(place + 0.5, name) for place, name in enumerate(names)])
    for number, row in enumerate(lines):
        for place, name in enumerate(names):
            tau = row["categories"].get(name, {"tau": None})["tau"]
            if tau is not None:
                left, top = axes.at(place + 0.1 + 0.8 * number / len(lines), tau)
                wide = axes.wide / len(names) * 0.8 / len(lines) - 1
                said = f"{row['drafter']}, {name}: {tau:.2f}"
                shapes.append(rectangle(left, top, wide, axes.top + axes.high - top, colour_of(number), said))
    return framed(title, axes, shapes, [row["drafter"] for row in lines])


def tau_and_draft_time(rows: Sequence[Row]) -> Figure | None:
    """What a draft costs against what it brings; above and to the left is better."""
    there = [row for row in timed(rows) if row["tau"] is not None]
    if not there:
        return None
    title = "Acceptance length against draft time"
    costs = [1e3 * (row["time"]["draft"] + row["time"]["tree"]) for row in there]
    axes = Axes(ticks(max(costs))[-1], ticks(max(row["tau"] for row in there))[-1])
    marks = [(value, f"{value:g}") for value in ticks(max(costs))]
    shapes = axes.frame(title, "draft and tree, milliseconds a pass", "tau", marks)
    for number, (row, cost) in enumerate(zip(there, costs, strict=True)):
        x, y = axes.at(cost, row["tau"])
        fast = "" if row["speedup"] is None else f", speed-up {row['speedup']:.2f}"
        shapes += [dot(x, y, colour_of(number), f"{row['drafter']}: tau {row['tau']:.2f}, {cost:.3f} ms{fast}")]
    names = [row["drafter"] + ("" if row["speedup"] is None else f" {row['speedup']:.2f}x") for row in there]
    return framed(title, axes, shapes, names)


def reading(rows: Sequence[Row], sizes: Mapping[str, Any]) -> Figure | None:
    """v of every contestant at its own size; where sizes were tried, a line: the cost of a whole pass by size."""
    points = [
        (1 if row["drafter"] == AUTOREGRESSIVE else row["nodes"], row["v"], row["drafter"]) for row in timed(rows)
    ]
    tried = {name: [(size["nodes"], size["cost"]) for size in found["sizes"]] for name, found in sizes.items()}
    curves = {name: curve for name, curve in tried.items() if curve}
    if not points and not curves:
        return None
    costs = [cost for _, cost, _ in points] + [cost for curve in curves.values() for _, cost in curve]
    nodes = [n for n, _, _ in points] + [n for curve in curves.values() for n, _ in curve]
    title = "Cost of reading a tree, in autoregressive passes"
    axes = Axes(ticks(max(nodes))[-1], ticks(max(costs))[-1])
    lines = ", line: c + v + o" if curves else ""
    marks = [(value, f"{value:g}") for value in ticks(max(nodes))]
    shapes = axes.frame(title, "nodes a tree may have", f"dot: v(n){lines}", marks)
    for number, (n, v, name) in enumerate(points):
        shapes.append(dot(*axes.at(n, v), colour_of(number), f"{name}: v({n}) = {v:.2f}"))
    order = [name for _, _, name in points]
    for name, curve in curves.items():
        number = order.index(name) if name in order else len(order)
        shapes.append(line([axes.at(n, cost) for n, cost in curve], colour_of(number)))
    return framed(title, axes, shapes, order or list(curves))


def reads(measured: Sequence[Row]) -> Figure:
    """v(n) of a base, a line for every context, as the latency benchmark measures it."""
    curves = [[(int(nodes), v) for nodes, v in read["v"].items()] for read in measured]
    title = "Reading a tree of n nodes, in autoregressive passes"
    most = max(n for curve in curves for n, _ in curve)
    axes = Axes(ticks(most)[-1], ticks(max(v for curve in curves for _, v in curve))[-1])
    shapes = axes.frame(title, "nodes n", "v(n)", [(value, f"{value:g}") for value in ticks(most)])
    names = [f"behind {read['context']:,} tokens" for read in measured]
    for number, (name, curve) in enumerate(zip(names, curves, strict=True)):
        shapes.append(line([axes.at(n, v) for n, v in curve], colour_of(number)))
        shapes += [dot(*axes.at(n, v), colour_of(number), f"{name}: v({n}) = {v:.2f}") for n, v in curve]
    return framed(title, axes, shapes, names)


def framed(title: str, axes: Axes, shapes: Sequence[str], names: Sequence[str]) -> Figure:
    """With its legend, one name a series, and room for it."""
    low = max(axes.top + axes.high + 44, axes.top + 20 * len(names) + 8)
    return Figure(title, axes.left + axes.wide + ASIDE, low, [*shapes, *axes.legend(names)])
