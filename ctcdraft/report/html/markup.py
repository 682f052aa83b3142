"""HTML in a few functions. Every string is text and escaped, unless it is Html already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Markup: what goes into a page as it is."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str | bool) -> Html:
    """An element. class_="a" is class="a", data_depth="2" is data-depth="2"; True is an attribute without a value."""
    rendered = "".join(attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Html(f"<{name}{rendered}>{join_html(inside)}</{name}>")


def attribute(key: str, value: str | bool) -> str:
    if value is False:
        return ""
    return f" {key}" if value is True else f' {key}="{escape(value)}"'


def join_html(parts: Iterable[str], between: str = "") -> Html:
    return Html(between.join(part if isinstance(part, Html) else escape(part) for part in parts))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> Html:
    head = tag("thead", tag("tr", *(tag("th", name) for name in header)))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    # In a box of its own: a wide table scrolls there, and not the page.
    return tag("div", tag("table", head, body), class_=f"wide {class_}".strip())


def bullets(lines: Iterable[str]) -> Html:
    return tag("ul", *(tag("li", item) for item in lines))


def visible_whitespace(text: str) -> str:
    """A word by itself, with its spaces and line ends to be seen."""
    return (
        text.replace(" ", "\N{OPEN BOX}")
        .replace("\n", "\N{RETURN SYMBOL}")
        .replace("\t", "\N{RIGHTWARDS ARROW TO BAR}")
    )


def format_percent(share: float) -> str:
    """0.5 is 50 %; what is tiny keeps one digit, 0.003 %, as long as it is one that a reader can take in."""
    if 0 < share < 1e-5:
        return "< 0.001 %"
    if 0 < share < 5e-4:
        return f"{100 * share:.1g} %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"
