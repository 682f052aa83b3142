"""The whole page of an evaluation, from what its report and its explorer hold. It knows sections, and no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.tracing.records import Seen
from ctcdraft.report import tables
from ctcdraft.report.html.explorer import explorer
from ctcdraft.report.html.losslessness import certificate
from ctcdraft.report.html.markup import Html, bullets, joined, table, tag
from ctcdraft.report.svg import Figure

Row = dict[str, Any]
# All columns of report.md in one row are wider than a page; those about the text get a table of their own.
OF_TEXTS = ("alpha", "ended", "repeated 4-grams", "accuracy")
FIRST = {name: cell for name, cell in tables.FULL.items() if name not in OF_TEXTS}
TEXTS = {name: tables.FULL[name] for name in ("drafter", *OF_TEXTS)}


def page(rows: Sequence[Row], environment: Mapping[str, Any], figures: Mapping[str, Figure], seen: Seen | None) -> Html:
    first = rows[0]
    title = f"{first['benchmark']}, {first['decoding']} decoding, base {environment['base']}"
    sections = {
        "Results": results(rows, environment),
        "Figures": joined(tag("figure", Html(figure.inline()), id=name) for name, figure in figures.items())
        or tag("p", "Nothing to draw: no question is finished."),
        "Explorer": explorer(seen),
        "Certificate": certificate(rows, environment, seen),
        "Words": bullets(joined([tag("b", word), f": {meaning}"]) for word, meaning in DEFINITIONS.items()),
    }
    return assembled(title, sections)


def assembled(title: str, sections: Mapping[str, Html]) -> Html:
    """A page of these sections, with a link to each."""
    links = tag("nav", *(tag("a", name, href=f"#{name.lower()}") for name in sections))
    body = [tag("section", tag("h2", name), inside, id=name.lower()) for name, inside in sections.items()]
    return document(title, tag("header", tag("h1", title), links), *body)


def results(rows: Sequence[Row], environment: Mapping[str, Any]) -> Html:
    said = [report_table(rows, columns) for columns in (FIRST, TEXTS, tables.MORE)]
    about = f"{rows[0]['hardware']}, {rows[0]['dtype']}, seed {rows[0]['seed']}, {environment['date']}"
    return joined([tag("p", about), tag("pre", environment["command"]), *said])


def report_table(rows: Sequence[Row], columns: tables.Columns) -> Html:
    return table(list(columns), ([cell(row) for cell in columns.values()] for row in rows))


def document(title: str, *body: Html) -> Html:
    """Style and script are in it: a page opens wherever it lies."""
    style, script = (Html(files(__package__).joinpath(name).read_text()) for name in ("page.css", "page.js"))
    head = joined(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width">'),
            Html('<meta name="color-scheme" content="light dark">'),
            tag("title", title),
            tag("style", style),
        ],
        "\n",
    )
    content = joined([*body, tag("script", script)], "\n")
    return joined(
        [Html("<!doctype html>"), tag("html", tag("head", head), tag("body", content), lang="en"), Html("")], "\n"
    )
