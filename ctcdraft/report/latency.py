"""report.json and report.md of a latency measurement, and its table on the terminal. It prints what it is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctcdraft.io import write_text
from ctcdraft.report.figures import breakdown_svg, latency_read_cost
from ctcdraft.report.tables import Columns, Row, format_number, format_share, markdown_table

DEFINITIONS = {
    "step": "one whole autoregressive pass through the loop: draft, read, verify, keep, other",
    "v(n)": "reading a tree of n nodes, its mask included, in steps",
    "c": "one draft, in steps: c_head the head's part, c_search the prefix search or whatever makes a tree of its "
    "frames; none for drafters that grow a tree word by word. On a CPU the search takes up to twice as long on the "
    "sharp frames of a trained head as on random ones: contestants=[RUN] measures it",
    "nodes": "of the drafter's own trees, in the mean, root counted",
    "v, o": "of a drafter: reading its own tree, and all that is neither draft nor read, in steps",
    "tau": "acceptance length is not measured here: words were random. Where one was given, the predicted speed-up is "
    "tau / (c + v + o); a tau of c + v + o breaks even",
    "roof": "least time / measured time of the read; the least streams all weights and keys and values at the "
    "measured copy bandwidth, or does all products at the measured matrix rate, whichever is longer; above 1 where "
    "they fit into the processor's cache",
}
READ_COST_FIGURE = "reading_by_nodes.svg"


def write(out: Path, made: Mapping[str, Any]) -> None:
    write_text(out / "report.json", json.dumps(made, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(out / "report.md", markdown(made))
    write_text(out / READ_COST_FIGURE, latency_read_cost(made["reads"]).file())
    for context, rows in group_by_context(made["rows"]).items():
        write_text(
            out / figure_name(context), breakdown_svg(rows, f"Time of a pass behind {context:,} tokens, milliseconds")
        )


def figure_name(context: int) -> str:
    return f"breakdown-{context}.svg"


def group_by_context(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["context"], []).append(row)
    return found


def markdown(made: Mapping[str, Any]) -> str:
    environment, rows = made["environment"], made["rows"]
    parts = [
        f"# Latency of {environment['base']}{' (random weights)' if environment['random_weights'] else ''}",
        f"{environment['hardware']}, {rows[0]['dtype']}, {rows[0]['nodes']} nodes, {environment['date']}; "
        f"reads: {environment['reads']}\n\n"
        f"    {environment['command']}",
        describe_hardware(made["machine"]),
        markdown_table(made["reads"], read_columns(made["reads"][0])),
        markdown_table(made["reads"], utilization_columns(made["reads"][0])),
        *describe_left_out(environment),
        f"![]({READ_COST_FIGURE})",
    ]
    for context, those in group_by_context(rows).items():
        parts += [
            f"## Drafters behind {context:,} tokens",
            markdown_table(those, COLUMNS),
            f"![]({figure_name(context)})",
        ]
        parts += [markdown_table(those, time_columns())]
    parts += ["## What the words mean", "\n".join(f"- **{word}**: {meaning}" for word, meaning in DEFINITIONS.items())]
    return "\n\n".join(parts) + "\n"


def terminal(made: Mapping[str, Any]) -> str:
    longest = max(group_by_context(made["rows"]).items())
    return "\n\n".join(
        [
            describe_hardware(made["machine"]),
            markdown_table(made["reads"], read_columns(made["reads"][0])),
            markdown_table(made["reads"], utilization_columns(made["reads"][0])),
            *describe_left_out(made["environment"]),
            f"behind {longest[0]:,} tokens:\n{markdown_table(longest[1], COLUMNS)}",
        ]
    )


def describe_hardware(found: Mapping[str, Any]) -> str:
    return (
        f"a pass reads {found['weight_bytes'] / 1e9:.3f} GB of weights; copy bandwidth "
        f"{found['bandwidth'] / 1e9:.1f} GB/s; "
        f"matrix rate {found['rate'] / 1e12:.3f} T operations/s"
    )


def describe_left_out(environment: Mapping[str, Any]) -> list[str]:
    those = ", ".join(f"{context:,}" for context in environment["contexts_left_out"])
    return [f"Contexts for which the base's positions leave no room: {those}."] if those else []


COLUMNS: Columns = {
    "drafter": lambda row: row["drafter"],
    "nodes": lambda row: format_number(row["tree_nodes"], 1),
    "c": lambda row: format_number(row["c"], 3),
    "c_head": lambda row: format_number(row["c_head"], 3),
    "c_search": lambda row: format_number(row["c_search"], 3),
    "v": lambda row: format_number(row["v"], 3),
    "o": lambda row: format_number(row["o"], 3),
    "roof": lambda row: format_share(row["roof_share"]),
    "breaks even": lambda row: format_number(row["tau_to_break_even"]),
    "given tau": lambda row: format_number(row["tau_given"]),
    "predicted": lambda row: format_number(row["predicted_speedup"]),
}


def indexed_cell(key: str, nodes: str, cell: Any) -> Any:
    return lambda read: cell(read[key][nodes])


def read_columns(first: Mapping[str, Any]) -> Columns:
    return {
        "context": lambda read: f"{read['context']:,}",
        "prefill ms": lambda read: format_number(1e3 * read["seconds_prefill"]),
        "step ms": lambda read: format_number(1e3 * read["seconds_step"], 3),
        "tokens/s": lambda read: format_number(1 / read["seconds_step"], 1),
        **{f"v({nodes})": indexed_cell("v", nodes, format_number) for nodes in first["v"]},
    }


def utilization_columns(first: Mapping[str, Any]) -> Columns:
    return {
        "context": lambda read: f"{read['context']:,}",
        **{f"roof({nodes})": indexed_cell("roof_share", nodes, format_share) for nodes in first["v"]},
    }


def time_columns() -> Columns:
    def milliseconds(part: str) -> Any:
        return lambda row: format_number(row["time"][part] * 1e3, 3)

    parts = ("draft", "tree", "read", "verify", "keep", "other", "prefill")
    return {"drafter": COLUMNS["drafter"], **{part: milliseconds(part) for part in parts}}
