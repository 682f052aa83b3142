"""Shapes of SVG, and a figure that is a file by itself or part of a page. It knows places and colours, no measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from math import ceil, floor, log10

# Dark enough on white and light enough on black; in grey print the labels beside them tell.
SERIES_COLOURS = (
    *("#3b7dd8", "#d9692b", "#2f9e62", "#a855a0", "#8f8420", "#c8404f", "#4aa3a8", "#7a5637", "#e57fb4", "#5a55c9"),
    *("#7fb134", "#c9a227"),
)
GREY = "#777777"
CHARACTER_WIDTH = 7  # of the font below, about: how wide a name is, on the safe side


@dataclass(frozen=True)
class Figure:
    """Shapes on a field of this size. What has no colour of its own takes that of the text around it."""

    title: str
    width: int
    height: int
    shapes: Sequence[str]

    def file(self) -> str:
        """For a paper: on white."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f"{self._svg_attributes()} "
            'color="#222">\n'
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )

    def inline(self) -> str:
        """For a page: as wide as there is room, on whatever ground there is."""
        return (
            f'<svg class="figure" role="img" aria-label="{escape(self.title)}" style="max-width:{self.width}px" '
            f"{self._svg_attributes()}>\n" + "\n".join(self.shapes) + "\n</svg>"
        )

    def _svg_attributes(self) -> str:
        return f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="12"'


def rectangle(x: float, y: float, wide: float, high: float, colour: str, tooltip_text: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.0):.1f}" height="{max(high, 0.0):.1f}" fill="{colour}"'
    return f"<rect {size}>{tooltip(tooltip_text)}</rect>" if tooltip_text else f"<rect {size}/>"


def text(x: float, y: float, content: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{weight}>{escape(content)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str = "currentColor", faint: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    thin = 'stroke-opacity="0.2"' if faint else 'stroke-width="1.5"'
    return f'<polyline points="{path}" fill="none" stroke="{colour}" {thin}/>'


def dot(x: float, y: float, colour: str, tooltip_text: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{tooltip(tooltip_text)}</circle>'


def tooltip(content: str) -> str:
    return f"<title>{escape(content)}</title>" if content else ""


def axis_ticks(most: float, about: int = 5) -> list[float]:
    """Round values from 0 to at least `most`.   2.3  ->  0 0.5 1 1.5 2 2.5"""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / about
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [number * step for number in range(ceil(most / step * 0.999) + 1)]


@dataclass(frozen=True)
class Axes:
    """A field with both axes from 0: places for values, and the frame around them."""

    max_x: float
    max_y: float
    left: int = 60
    top: int = 54
    width: int = 440
    height: int = 220

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + self.width * x / self.max_x, self.top + self.height * (1 - y / self.max_y)

    def frame(self, title: str, name_x: str, name_y: str, marks_x: Sequence[tuple[float, str]]) -> list[str]:
        """Title, names, grid; marks_x: where the x axis is labelled, and how."""
        foot = self.top + self.height
        shapes = [text(8, 18, title, bold=True), text(8, self.top - 16, name_y)]
        shapes.append(text(self.left + self.width, foot + 34, name_x, anchor="end"))
        for value in axis_ticks(self.max_y):
            if value <= self.max_y * 1.001:
                _, y = self.at(0, value)
                shapes += [line([(self.left, y), (self.left + self.width, y)], faint=True)]
                shapes += [text(self.left - 6, y + 4, f"{value:g}", anchor="end")]
        return shapes + [text(self.at(value, 0)[0], foot + 17, label, anchor="middle") for value, label in marks_x]

    def legend(self, colours: Mapping[str, str]) -> list[str]:
        """To the right, a name and its colour a line."""
        x = self.left + self.width + 16
        shapes = []
        for number, (name, colour) in enumerate(colours.items()):
            y = self.top + 20 * number
            shapes += [rectangle(x, y, 12, 12, colour), text(x + 18, y + 11, name)]
        return shapes


def assign_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for every name; where there are more names than colours, some share one."""
    return dict(zip(names, cycle(SERIES_COLOURS), strict=False))
