"""SVG shapes, axes and figures; a figure is written as a file or placed inline in an HTML page.

No plotting library, because the HTML page needs what such SVG lacks: text and axes that follow the page's light or dark
colours (`currentColor`), a tooltip on every point, and no element ids, which would clash within one page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from math import ceil, floor, log10

# Readable on white and on black.
SERIES_COLOURS = (
    *("#3b7dd8", "#d9692b", "#2f9e62", "#a855a0", "#8f8420", "#c8404f", "#4aa3a8", "#7a5637", "#e57fb4", "#5a55c9"),
    *("#7fb134", "#c9a227"),
)
GREY = "#777777"
CHARACTER_WIDTH = 7  # pixels, an upper estimate for sans-serif 12: SVG cannot measure text
MIN_LEGEND_WIDTH = 190

Point = tuple[float, float]
Tick = tuple[float, str]  # a value on an axis and its label


@dataclass(frozen=True)
class Figure:
    """SVG shapes and the size of their canvas. Shapes without a colour of their own take the surrounding text's."""

    title: str
    width: int
    height: int
    shapes: Sequence[str]

    def file(self) -> str:
        """Return a complete SVG file."""
        size = f'width="{self.width}" height="{self.height}"'
        # White, because a viewer in dark mode would put the dark text on a dark ground.
        ground = f'<rect {size} fill="white"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {self._attributes()} color="#222">'
        return "\n".join([head, ground, *self.shapes, "</svg>\n"])

    def inline(self) -> str:
        """Return an SVG element for a page."""
        # Transparent, and as wide as the page allows up to its own width.
        label = f'class="figure" role="img" aria-label="{escape(self.title)}" style="max-width:{self.width}px"'
        return "\n".join([f"<svg {label} {self._attributes()}>", *self.shapes, "</svg>"])

    def _attributes(self) -> str:
        return f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="12"'


def rectangle(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{max(height, 0.0):.1f}" fill="{colour}"'
    return f"<rect {size}>{tooltip(hint)}</rect>" if hint else f"<rect {size}/>"


def text(x: float, y: float, content: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{weight}>{escape(content)}</text>'


def line(points: Sequence[Point], colour: str = "currentColor", faint: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = 'stroke-opacity="0.2"' if faint else 'stroke-width="1.5"'
    return f'<polyline points="{path}" fill="none" stroke="{colour}" {stroke}/>'


def dot(x: float, y: float, colour: str, hint: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{tooltip(hint)}</circle>'


def tooltip(content: str) -> str:
    return f"<title>{escape(content)}</title>" if content else ""


def axis_ticks(most: float, about: int = 5) -> list[float]:
    """Return round values from 0 to at least `most`.   2.3  ->  0 0.5 1 1.5 2 2.5"""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / about
    unit = 10.0 ** floor(log10(rough))
    # 0.999: a division may miss a round number by its rounding error, and would add a tick.
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [number * step for number in range(ceil(most / step * 0.999) + 1)]


def numeric_ticks(most: float) -> list[Tick]:
    return [(value, f"{value:g}") for value in axis_ticks(most)]


@dataclass(frozen=True)
class Axes:
    """A plotting area in pixels whose axes begin at `min_x` and `min_y`."""

    max_x: float
    max_y: float
    min_x: float = 0.0
    min_y: float = 0.0
    left: int = 60
    top: int = 54
    width: int = 440
    height: int = 220

    def at(self, x: float, y: float) -> Point:
        """Return the pixel of a pair of values."""
        across = (x - self.min_x) / (self.max_x - self.min_x or 1.0)  # 0 where a figure has one value of x
        up = (y - self.min_y) / (self.max_y - self.min_y or 1.0)
        return self.left + self.width * across, self.top + self.height * (1 - up)

    def frame(self, title: str, name_x: str, name_y: str, ticks_x: Sequence[Tick]) -> list[str]:
        foot = self.top + self.height
        shapes = [text(8, 18, title, bold=True), text(8, self.top - 16, name_y)]
        shapes.append(text(self.left + self.width, foot + 34, name_x, anchor="end"))
        for value in axis_ticks(self.max_y):
            if self.min_y <= value <= self.max_y * 1.001:  # an axis may end between two ticks
                y = self.at(self.min_x, value)[1]
                shapes.append(line([(self.left, y), (self.left + self.width, y)], faint=True))
                shapes.append(text(self.left - 6, y + 4, f"{value:g}", anchor="end"))
        across = [(self.at(value, self.min_y)[0], label) for value, label in ticks_x]
        return shapes + [text(x, foot + 17, label, anchor="middle") for x, label in across]

    def figure(self, title: str, shapes: Sequence[str], colours: Mapping[str, str]) -> Figure:
        """Return a figure of these shapes with a legend, one name and its colour per line, to the right of the axes."""
        x, legend = self.left + self.width + 16, []
        for number, (name, colour) in enumerate(colours.items()):
            y = self.top + 20 * number
            legend += [rectangle(x, y, 12, 12, colour), text(x + 18, y + 11, name)]
        height = max(self.top + self.height + 44, self.top + 20 * len(colours) + 8)
        aside = max(MIN_LEGEND_WIDTH, 42 + CHARACTER_WIDTH * max(map(len, colours), default=0))
        return Figure(title, self.left + self.width + aside, height, [*shapes, *legend])


def assign_colours(names: Iterable[str]) -> dict[str, str]:
    return dict(zip(names, cycle(SERIES_COLOURS), strict=False))  # of more than twelve names some share a colour
