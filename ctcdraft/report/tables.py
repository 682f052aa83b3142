"""Columns and cell formats of the tables in an evaluation's reports.

A column is a header and a function from a row of report.json to text, so that report.md, report.html, the terminal and
the model card print the same cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ctcdraft.evaluation.distribution_test import HISTOGRAM_CELLS, MIN_TOKENS_FOR_P_VALUE
from ctcdraft.evaluation.records import NO_GUARANTEE, SAME_DISTRIBUTION, SAME_TOKENS

GUARANTEES = {SAME_TOKENS: "token-identical", SAME_DISTRIBUTION: "same distribution", NO_GUARANTEE: "none (LOSSY)"}
BREAKDOWN_FILE = "breakdown.svg"
MIN_P_VALUE = 1e-4  # a lossless method falls below it in one of ten thousand rows

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]


def format_number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def format_with_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    return format_number(value) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def format_difference(value: float | None, bounds: Sequence[float] | None) -> str:
    """+0.31 [+0.22, +0.40]"""
    if value is None:
        return "-"
    return f"{value:+.2f}" + (f" [{bounds[0]:+.2f}, {bounds[1]:+.2f}]" if bounds else "")


def describe_difference(pair: Row) -> str:
    speed = "" if pair["speedup"] is None else f", speed-up {format_difference(pair['speedup'], pair['speedup_ci'])}"
    tau = format_difference(pair["tau"], pair["tau_ci"])
    return f"{pair['more']} minus {pair['less']}, {nodes_cell(pair)} nodes: tau {tau}{speed}"


def nodes_cell(row: Row) -> str:
    """Return the limit of a tree's nodes; for adaptive sizes `adaptive (12.3)`, the mean number read per step."""
    if not row.get("adaptive"):
        return str(row["nodes"])
    return "adaptive" + (f" ({row['mean_nodes']:.1f})" if row.get("mean_nodes") else "")


def drafter_label(row: Row) -> str:
    """Return the drafter's name, marked where decoding is lossy or objective and tree do not fit each other."""
    lossy = " (LOSSY)" if row["lossless"]["owes"] == NO_GUARANTEE else ""
    return f"{row['drafter']}{' (mismatch)' if row.get('crossing') else ''}{lossy}"


def equal_cell(row: Row) -> str:
    """Return `118+2/120`: equal questions, + those that differ by rounding, of all; or a p value."""
    lossless = row["lossless"]
    # Tokens may differ: the distribution alone is guaranteed, or nothing. At temperature 0 there is none to be tested.
    if lossless["owes"] != SAME_TOKENS and row["temperature"] > 0:
        return f"p={format_number(distribution_p_value(row), 3)}"
    rounding = f"+{lossless['rounding']}" if lossless["rounding"] else ""
    return f"{lossless['equal']}{rounding}/{lossless['prompts']}"


MAIN_COLUMNS: Columns = {  # on a terminal, at most 110 characters wide
    "drafter": drafter_label,
    "tau": lambda row: format_with_interval(row["tau"], row["tau_ci"]),
    "speedup": lambda row: format_with_interval(row["speedup"], row["speedup_ci"]),
    "tokens/s": lambda row: format_number(row["tokens_per_second"], 1),
    "c": lambda row: format_number(row["c"]),
    "v": lambda row: format_number(row["v"]),
    "o": lambda row: format_number(row["o"]),
    "predicted": lambda row: format_number(row["predicted_speedup"]),
    "decode": lambda row: format_number(row["speedup_decode"]),
    "equal": equal_cell,
}
FULL_COLUMNS: Columns = {  # of report.md and the model card
    "drafter": MAIN_COLUMNS["drafter"],
    "benchmark": lambda row: row["benchmark"],
    "T": lambda row: f"{row['temperature']:g}",
    "nodes": nodes_cell,
    "prompts": lambda row: str(row["prompts"]),
    **{name: cell for name, cell in MAIN_COLUMNS.items() if name not in ("drafter", "decode", "equal")},
    "speedup_decode": MAIN_COLUMNS["decode"],
    "alpha": lambda row: " ".join(format_number(rate) for rate in row["alpha"]) or "-",
    "equal": equal_cell,
    "ended": lambda row: format_share(row["ended_share"]),
    "repeated 4-grams": lambda row: format_share(row["repeated_4gram_share"]),
    "accuracy": lambda row: format_share(row["accuracy"]),
}
REPLAY_COLUMNS: Columns = {
    **{name: FULL_COLUMNS[name] for name in ("drafter", "nodes", "prompts", "tau", "alpha")},
    "equal": equal_cell,
    "identical steps": lambda row: "{alike}/{answers}".format(**row["replay"]),
}
DIFFERENCE_COLUMNS: Columns = {
    "method": lambda pair: pair["more"],
    "minus": lambda pair: pair["less"],
    "nodes": nodes_cell,
    "tau": lambda pair: format_difference(pair["tau"], pair["tau_ci"]),
    "speedup": lambda pair: format_difference(pair["speedup"], pair["speedup_ci"]),
}
DETAIL_COLUMNS: Columns = {  # other definitions of the same measures, for comparison with papers, and sizes
    "drafter": MAIN_COLUMNS["drafter"],
    "tau_mean": lambda row: format_number(row["tau_mean"]),
    "tau_paper": lambda row: format_number(row["tau_paper"]),
    "speedup_paper": lambda row: format_number(row["speedup_paper"]),
    "acceptance_rate": lambda row: format_number(row["acceptance_rate"], 3),
    "tokens": lambda row: f"{row['tokens']:,}",
    "forward passes": lambda row: f"{row['passes']:,}",
    "parameters": lambda row: f"{row['draft_parameters']:,}",
    "c_least": lambda row: format_number(row.get("c_least"), 3),  # reports of older versions lack it
    "roof_share": lambda row: format_share(row["roof_share"]),
    "peak memory": lambda row: "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
}


def markdown_table(rows: Sequence[Row], columns: Columns) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_definitions(definitions: dict[str, str]) -> str:
    """Return the last section of a report: what its columns mean."""
    return "## Definitions\n\n" + "\n".join(f"- **{term}**: {meaning}" for term, meaning in definitions.items())


def aligned_lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines for the terminal, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def millisecond_columns(parts: Sequence[str]) -> Columns:
    """Return a column per phase of row["time"], seconds shown as milliseconds."""

    def milliseconds(part: str, row: Row) -> str:
        seconds = row["time"][part]  # None in every phase of a row that was not timed
        return "-" if seconds is None else format_number(seconds * 1e3, 3)

    return {part: partial(milliseconds, part) for part in parts}


def describe_steps(rows: Sequence[Row]) -> list[str]:
    """Return a line per drafter with how its steps run, where base.static_shapes=true: some may not be captured."""
    steps = {row["drafter"]: row["steps"] for row in rows if row.get("steps")}  # reports of older versions lack it
    return [f"steps of {name}: {how}" for name, how in steps.items()] if {*steps.values()} - {"exact shapes"} else []


def describe_null(row: Row) -> str:
    """Return how often other kernels alone change the baseline's tokens."""
    null = row["lossless"].get("null")
    if null is not None:
        return f"; autoregression by other kernels ({null['drafter']}) differs from itself on {null['different']}"
    if row.get("other_kernels"):
        return ""  # this row is what measures it
    return "; add transformers_eager to contestants= to measure how often other kernels alone change the tokens"


def format_fit(fit: Row) -> str:
    tokens = f"{fit['tokens']:,} tokens"
    if fit["p_value"] is None:
        return f"{tokens} are too few for a test (it needs {MIN_TOKENS_FOR_P_VALUE})"
    return f"chi-square {fit['chi_square']:.1f} in {HISTOGRAM_CELLS} cells over {tokens} (p = {fit['p_value']:.2g})"


def distribution_p_value(row: Row) -> float | None:
    # The same tokens are tested in two orders; the smaller p value times their number bounds both (Bonferroni).
    fits = [row["lossless"], row["lossless"]["by_draft"] or {"p_value": None}]
    p_values = [fit["p_value"] for fit in fits if fit["p_value"] is not None]
    return min(1.0, len(p_values) * min(p_values)) if p_values else None
