"""jinja2 templates with autoescape: prompts, responses and drafter names stay text whatever markup they hold.

The page holds its style and script, so that the file opens without a network or other files beside it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> Markup:
    """Return templates/TEMPLATE.html.jinja with these values."""
    # Markup: the page inserts a section unescaped, and the section's own template has escaped every value in it.
    return Markup(templates().get_template(f"{template}.html.jinja").render(values))


@cache
def templates() -> Environment:
    # StrictUndefined: a misspelt value of a template is an error, not an empty cell.
    loader = PackageLoader("ctcdraft.report.html")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True  # a line with a tag alone leaves no empty line
    environment.keep_trailing_newline = True
    environment.filters["percent"] = format_percent
    return environment


def visible_whitespace(text: str) -> str:
    """Return a token's text with its spaces, line ends and tabs made visible."""
    return text.translate(str.maketrans(" \n\t", "\N{OPEN BOX}\N{RETURN SYMBOL}\N{RIGHTWARDS ARROW TO BAR}"))


def format_percent(share: float) -> str:
    """Return 0.5 as `50 %`; small shares keep one significant digit (`0.003 %`) down to `< 0.001 %`."""
    if 0 < share < 1e-5:
        return "< 0.001 %"
    if 0 < share < 5e-4:
        return f"{100 * share:.1g} %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"
