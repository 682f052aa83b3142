"""Two drawings in SVG: lines of tau by nodes, dots of tau by draft time. It knows numbers, colours and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2

from ctcdraft.evaluation.drawing import Figure, dot, line, rectangle, text

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
