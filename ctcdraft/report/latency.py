"""report.json, report.md, figures and terminal table of the latency benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ctcdraft.io import write_text
from ctcdraft.report import tables
from ctcdraft.report.figures import breakdown_figure, latency_read_cost
from ctcdraft.report.tables import Columns, Row

DEFINITIONS = {
    "step": "one autoregressive step of the loop: draft, read, verify, keep, other",
    "v(n)": "the forward pass that verifies a tree of n nodes, its attention mask included, in steps",
    "c": "one draft, in steps: c_head is the draft head's part, c_search the prefix search or other tree building from "
    "its frames (none for drafters that grow a tree token by token). On a CPU the search takes up to twice as long on "
    "the sharp frames of a trained head as on random ones; contestants=[RUN] measures a trained head",
    "nodes": "mean size of the drafter's own trees, the root included",
    "v, o": "of a drafter: verifying its own tree, and all that is neither draft nor forward pass, in steps",
    "tau": "the acceptance length is not measured here, because the tokens are random. Where one is given, the "
    "predicted speed-up is tau / (c + v + o); tau = c + v + o breaks even",
    "utilization": "least time / measured time of the forward pass; the least time either streams all weights and the "
    "KV cache at the measured copy bandwidth or multiplies at the measured matrix rate, whichever takes longer; above "
    "1 where they fit into the processor's cache",
}
READ_COST_FIGURE = "reading_by_nodes.svg"
COLUMNS: Columns = {
    "drafter": lambda row: row["drafter"],
    "nodes": lambda row: tables.format_number(row["tree_nodes"], 1),  # a mean: trees of one drafter differ in size
    "c": lambda row: tables.format_number(row["c"], 3),
    "c_head": lambda row: tables.format_number(row["c_head"], 3),
    "c_search": lambda row: tables.format_number(row["c_search"], 3),
    "v": lambda row: tables.format_number(row["v"], 3),
    "o": lambda row: tables.format_number(row["o"], 3),
    "utilization": lambda row: tables.format_share(row["roof_share"]),
    "breaks even": lambda row: tables.format_number(row["tau_to_break_even"]),
    "given tau": lambda row: tables.format_number(row["tau_given"]),
    "predicted": lambda row: tables.format_number(row["predicted_speedup"]),
}
CONTEXT: Columns = {"context": lambda read: f"{read['context']:,}"}
CONTEXT_COLUMNS: Columns = {
    **CONTEXT,
    "prefill ms": lambda read: tables.format_number(1e3 * read["seconds_prefill"]),
    "step ms": lambda read: tables.format_number(1e3 * read["seconds_step"], 3),
    "tokens/s": lambda read: tables.format_number(1 / read["seconds_step"], 1),
}
TIME_COLUMNS: Columns = {
    "drafter": COLUMNS["drafter"],
    **tables.millisecond_columns(("draft", "tree", "read", "verify", "keep", "other", "prefill")),
}


def write(out: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, report.md and the figures."""
    write_text(out / "report.json", json.dumps(report, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(out / "report.md", markdown(report))
    write_text(out / READ_COST_FIGURE, latency_read_cost(report["reads"]).file())
    for context, rows in group_by_context(report["rows"]).items():
        title = f"Time per step after {context:,} tokens, milliseconds"
        write_text(out / figure_name(context), breakdown_figure(rows, title).file())


def figure_name(context: int) -> str:
    return f"breakdown-{context}.svg"


def group_by_context(rows: Sequence[Row]) -> dict[int, list[Row]]:
    contexts = dict.fromkeys(row["context"] for row in rows)
    return {context: [row for row in rows if row["context"] == context] for context in contexts}


def markdown(report: Mapping[str, Any]) -> str:
    environment, rows = report["environment"], report["rows"]
    parts = [
        f"# Latency of {environment['base']}{' (random weights)' if environment['random_weights'] else ''}",
        f"{environment['hardware']}, {rows[0]['dtype']}, {rows[0]['nodes']} nodes, {environment['date']}; "
        f"forward passes: {environment['reads']}\n\n    {environment['command']}",
        *base_parts(report),
        f"![]({READ_COST_FIGURE})",
    ]
    for context, group in group_by_context(rows).items():
        parts += [f"## Drafters after {context:,} tokens", tables.markdown_table(group, COLUMNS)]
        parts += [f"![]({figure_name(context)})", tables.markdown_table(group, TIME_COLUMNS)]
    return "\n\n".join([*parts, tables.markdown_definitions(DEFINITIONS)]) + "\n"


def terminal(report: Mapping[str, Any]) -> str:
    context, rows = max(group_by_context(report["rows"]).items())  # the longest: report.md has all of them
    return "\n\n".join([*base_parts(report), f"after {context:,} tokens:\n{tables.markdown_table(rows, COLUMNS)}"])


def base_parts(report: Mapping[str, Any]) -> list[str]:
    hardware, reads = report["machine"], report["reads"]
    parts = [
        f"a forward pass reads {hardware['weight_bytes'] / 1e9:.3f} GB of weights; copy bandwidth "
        f"{hardware['bandwidth'] / 1e9:.1f} GB/s; matrix rate {hardware['rate'] / 1e12:.3f} TFLOP/s",
        tables.markdown_table(
            reads, {**CONTEXT_COLUMNS, **columns_by_nodes("v({})", reads, "v", tables.format_number)}
        ),
        tables.markdown_table(
            reads, {**CONTEXT, **columns_by_nodes("utilization({})", reads, "roof_share", tables.format_share)}
        ),
    ]
    if steps := tables.describe_steps(report["rows"]):
        parts.append("\n".join(f"- {line}" for line in steps))
    # A base with few positions cannot hold the longer contexts.
    if skipped := report["environment"]["contexts_left_out"]:
        contexts = ", ".join(f"{context:,}" for context in skipped)
        parts.append(f"Contexts for which the base's positions leave no room: {contexts}.")
    return parts


def columns_by_nodes(header: str, reads: Sequence[Row], key: str, form: Callable[[Any], str]) -> Columns:
    """Return a column per tree size of a field that holds a value for each."""

    def cell(nodes: str, read: Row) -> str:
        return form(read[key][nodes])

    return {header.format(nodes): partial(cell, nodes) for nodes in reads[0]["v"]}
