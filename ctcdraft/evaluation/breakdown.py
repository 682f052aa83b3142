"""Where the time of a pass goes, as a stacked bar a drafter, in SVG. It knows numbers and colours, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.drawing import LETTER, Figure, rectangle, text

# Told apart in grey print, too: light and dark take turns.
COLOURS = {
    "draft": "#1f5a8a",
    "tree": "#9ec9e8",
    "read": "#3c7a3c",
    "verify": "#f2b872",
    "keep": "#8c4a1f",
    "other": "#cccccc",
}
LEAST_LEFT, WIDE, RIGHT, HIGH, GAP, HEAD = 170, 520, 90, 20, 10, 62


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The figure as a file."""
    return figure(rows, title).file()


def figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """One bar a row that was timed: row["drafter"], and row["time"] in seconds by part; the longest fills the width."""
    timed = [row for row in rows if row["time"]["read"] is not None]
    longest = max((milliseconds(row) for row in timed), default=0.0) or 1.0
    left = max([LEAST_LEFT, *(16 + LETTER * len(row["drafter"]) for row in timed)])
    parts = [text(8, 18, title, bold=True), *legend(left)]
    for number, row in enumerate(timed):
        parts += bar(row, left, HEAD + number * (HIGH + GAP), WIDE / longest)
    return Figure(title, left + WIDE + RIGHT, HEAD + len(timed) * (HIGH + GAP), parts)


def milliseconds(row: Mapping[str, Any]) -> float:
    return 1e3 * sum(row["time"][part] for part in COLOURS)


def legend(left: int) -> list[str]:
    places = range(left, left + WIDE, WIDE // len(COLOURS))
    return [
        shape
        for (part, colour), x in zip(COLOURS.items(), places, strict=False)
        for shape in (rectangle(x, 30, 12, 12, colour), text(x + 17, 41, part))
    ]


def bar(row: Mapping[str, Any], left: int, y: int, scale: float) -> list[str]:
    shapes, x = [text(left - 8, y + 15, row["drafter"], anchor="end")], float(left)
    for part, colour in COLOURS.items():
        wide = 1e3 * row["time"][part] * scale
        shapes.append(rectangle(x, y, wide, HIGH, colour, f"{part} {1e3 * row['time'][part]:.3f} ms"))
        x += wide
    return [*shapes, text(x + 6, y + 15, f"{milliseconds(row):.2f}")]
