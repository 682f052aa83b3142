"""Figures of a comparison: the Pareto front of tau against draft cost, measured and counted; tau by training time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ctcdraft.report.svg import Axes, Point, assign_colours, axis_ticks, dot, line, numeric_ticks, text
from studies.comparison.jobs import Row


def figures(heads: Sequence[Row], rows: Sequence[Row]) -> dict[str, str]:
    """Return SVG by file name: the measured front of each base, then the counted one and budgets of the first base."""
    drawn: dict[str, str] = {}
    bases = list(dict.fromkeys(row["base"] for row in rows))
    for base in bases:
        once = [row for row in heads if row["base"] == base and row["timed"] and row["tau"] > 1]
        first = [row for row in once if row["benchmark"] == once[0]["benchmark"]]
        timed = {row["method"]: (row["c"], row["tau"]) for row in first if row["measure"] == "fixed" and row["c"]}
        of = f"{base}, {once[0]['benchmark']}" if once else base
        title = f"tau by measured draft cost, {of}, trees of fixed size"
        drawn |= front_figure(f"front-{base}.svg", title, "c, in steps of the base", timed)
        if base != bases[0]:
            continue
        counted = {row["method"]: (row["c_counted"], row["tau"]) for row in first if row.get("predicted")}
        title = f"tau by draft cost counted at the 7B shape, {of}, same size"
        drawn |= front_figure(f"front-counted-{base}.svg", title, "c from bytes and operations", counted)
        drawn |= budget_figure(base, [row for row in rows if row["base"] == base])
    return drawn


def front_figure(name: str, title: str, axis: str, points: Mapping[str, Point]) -> dict[str, str]:
    """Return a figure of (cost, tau) by method, with a line through those that no other one dominates."""
    if not points:
        return {}
    ordered = sorted(points.items(), key=lambda one: -one[1][1])
    longest = max(cost for cost, _ in points.values())
    axes = tau_axes(longest, ordered[0][1][1])
    shapes = axes.frame(title, axis, "tau", numeric_ticks(longest))
    shapes.append(line([axes.at(*point) for point in front(list(points.values()))]))
    colours = assign_colours(numbered(f"{method} ({cost:.2f}, {tau:.2f})" for method, (cost, tau) in ordered))
    for (label, colour), (_, point) in zip(colours.items(), ordered, strict=True):
        shapes += numbered_dot(axes.at(*point), colour, label)
    return {name: axes.figure(title, shapes, colours).file()}


def tau_axes(longest: float, most: float) -> Axes:
    """Return axes of tau, which is 1 for no draft."""
    return Axes(axis_ticks(longest)[-1], axis_ticks(most)[-1], min_y=1.0, height=440)


def numbered(labels: Iterable[str]) -> list[str]:
    """Return labels with numbers, by which points are found where colours are repeated."""
    return [f"{number} {label}" for number, label in enumerate(labels, 1)]


def numbered_dot(pixel: Point, colour: str, label: str) -> list[str]:
    return [dot(*pixel, colour, label), text(pixel[0] + 6, pixel[1] + 4, label.partition(" ")[0])]


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points with more tau than all cheaper ones, cheapest first."""
    best: list[Point] = []
    for cost, tau in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or tau > best[-1][1]:
            best.append((cost, tau))
    return best


def budget_figure(base: str, rows: Sequence[Row]) -> dict[str, str]:
    """Return a figure of validation tau by training time, a line per head that has several budgets."""
    seed = min(row["seed"] for row in rows)
    best: dict[tuple[str, str], Row] = {}  # of the learning rates tried
    for row in sorted(rows, key=lambda row: row["tau"]):
        if row["role"].endswith("x") and row["seed"] == seed:
            best[row["method"], row["role"]] = row
    curves: dict[str, list[Point]] = {}
    for (method, _), row in best.items():
        curves.setdefault(method, []).append((row["seconds"] / 60, row["tau"]))
    curves = {method: sorted(points) for method, points in curves.items() if len(points) > 1}
    if not curves:
        return {}
    longest, most = (max(point[side] for points in curves.values() for point in points) for side in (0, 1))
    axes = tau_axes(longest, most)
    title = f"validation tau by training time, {base}"
    shapes = axes.frame(title, "processor minutes", "tau", numeric_ticks(longest))
    ordered = sorted(curves, key=lambda method: -curves[method][-1][1])
    colours = assign_colours(numbered(f"{method} ({curves[method][-1][1]:.2f})" for method in ordered))
    for (label, colour), method in zip(colours.items(), ordered, strict=True):
        *pixels, last = (axes.at(*point) for point in curves[method])
        shapes += [line([*pixels, last], colour), *(dot(*pixel, colour, label) for pixel in pixels)]
        shapes += numbered_dot(last, colour, label)
    return {f"budgets-{base}.svg": axes.figure(title, shapes, colours).file()}
