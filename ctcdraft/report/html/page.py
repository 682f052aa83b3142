"""The whole page of an evaluation, from what its report and its explorer hold. It knows sections, and no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.tracing.records import Trace
from ctcdraft.report import tables
from ctcdraft.report.html.explorer import explorer_section
from ctcdraft.report.html.losslessness import losslessness_section
from ctcdraft.report.html.markup import Html, bullets, html_table, join_html, tag
from ctcdraft.report.svg import Figure

Row = dict[str, Any]
# All columns of report.md in one row are wider than a page; those about the text get a table of their own.
TEXT_COLUMN_NAMES = ("alpha", "ended", "repeated 4-grams", "accuracy")
RESULT_COLUMNS = {name: cell for name, cell in tables.FULL_COLUMNS.items() if name not in TEXT_COLUMN_NAMES}
TEXT_COLUMNS = {name: tables.FULL_COLUMNS[name] for name in ("drafter", *TEXT_COLUMN_NAMES)}


def evaluation_page(
    rows: Sequence[Row], environment: Mapping[str, Any], figures: Mapping[str, Figure], seen: Trace | None
) -> Html:
    first = rows[0]
    title = f"{first['benchmark']}, {first['decoding']} decoding, base {environment['base']}"
    sections = {
        "Results": results_section(rows, environment),
        "Figures": join_html(tag("figure", Html(figure.inline()), id=name) for name, figure in figures.items())
        or tag("p", "Nothing to draw: no question is finished."),
        "Explorer": explorer_section(seen),
        "Certificate": losslessness_section(rows, environment, seen),
        "Words": bullets(join_html([tag("b", word), f": {meaning}"]) for word, meaning in DEFINITIONS.items()),
    }
    return assemble_page(title, sections)


def assemble_page(title: str, sections: Mapping[str, Html]) -> Html:
    """A page of these sections, with a link to each."""
    links = tag("nav", *(tag("a", name, href=f"#{name.lower()}") for name in sections))
    body = [tag("section", tag("h2", name), inside, id=name.lower()) for name, inside in sections.items()]
    return html_document(title, tag("header", tag("h1", title), links), *body)


def results_section(rows: Sequence[Row], environment: Mapping[str, Any]) -> Html:
    said = [report_table(rows, columns) for columns in (RESULT_COLUMNS, TEXT_COLUMNS, tables.DETAIL_COLUMNS)]
    about = f"{rows[0]['hardware']}, {rows[0]['dtype']}, seed {rows[0]['seed']}, {environment['date']}"
    return join_html([tag("p", about), tag("pre", environment["command"]), *said])


def report_table(rows: Sequence[Row], columns: tables.Columns) -> Html:
    return html_table(list(columns), ([cell(row) for cell in columns.values()] for row in rows))


def html_document(title: str, *body: Html) -> Html:
    """Style and script are in it: a page opens wherever it lies."""
    style, script = (Html(files(__package__).joinpath(name).read_text()) for name in ("page.css", "page.js"))
    head = join_html(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width">'),
            Html('<meta name="color-scheme" content="light dark">'),
            tag("title", title),
            tag("style", style),
        ],
        "\n",
    )
    content = join_html([*body, tag("script", script)], "\n")
    return join_html(
        [Html("<!doctype html>"), tag("html", tag("head", head), tag("body", content), lang="en"), Html("")], "\n"
    )
