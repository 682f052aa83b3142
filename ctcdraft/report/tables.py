"""report.json and report.md of one evaluation, and the table on the terminal. It prints what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ctcdraft.evaluation.distribution_test import HISTOGRAM_CELLS, MIN_TOKENS_FOR_P_VALUE

GUARANTEES = {
    "law": "the base's law, not the same words, because its guesses are drawn",
    "nothing": "nothing, but this is how its words fit the base's law",
}
BREAKDOWN_FILE = "breakdown.svg"
TREE_SIZE_NOTE = (
    "Chosen before the first question, on prompts that are none: tau of every size is replayed from one run that "
    "drafts the largest tree behind every token, the cost of a pass is measured, and tau / cost is greatest at the "
    "size chosen."
)
MIN_P_VALUE = 1e-4  # of a fit no better by chance: one honest row in ten thousand falls below it

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
    return f"{pair['more']} less {pair['less']}, {pair['nodes']} nodes: tau {tau}{speed}"


def drafter_label(row: Row) -> str:
    """The drafter's name, with a mark in every table where its text is not the base's, or its frames are read
    otherwise than they were taught."""
    lossy = " (LOSSY)" if row["lossless"]["owes"] == "nothing" else ""
    return f"{row['drafter']}{' (crossing)' if row.get('crossing') else ''}{lossy}"


def equal_cell(row: Row) -> str:
    """118+2/120: equal, + those that rounding explains, of all. Where no words are owed, how well the law fits."""
    lossless = row["lossless"]
    if lossless["owes"] != "words":
        return f"law p={format_number(distribution_p_value(row), 3)}"
    rounding = f"+{lossless['rounding']}" if lossless["rounding"] else ""
    return f"{lossless['equal']}{rounding}/{lossless['prompts']}"


MAIN_COLUMNS: Columns = {
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
FULL_COLUMNS: Columns = {
    "drafter": MAIN_COLUMNS["drafter"],
    "benchmark": lambda row: row["benchmark"],
    "T": lambda row: f"{row['temperature']:g}",
    "nodes": lambda row: str(row["nodes"]),
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
    "passes alike": lambda row: "{alike}/{answers}".format(**row["replay"]),
}
DIFFERENCE_COLUMNS: Columns = {
    "more": lambda pair: pair["more"],
    "less": lambda pair: pair["less"],
    "nodes": lambda pair: str(pair["nodes"]),
    "tau": lambda pair: format_difference(pair["tau"], pair["tau_ci"]),
    "speedup": lambda pair: format_difference(pair["speedup"], pair["speedup_ci"]),
}
DETAIL_COLUMNS: Columns = {
    "drafter": MAIN_COLUMNS["drafter"],
    "tau_mean": lambda row: format_number(row["tau_mean"]),
    "tau_paper": lambda row: format_number(row["tau_paper"]),
    "speedup_paper": lambda row: format_number(row["speedup_paper"]),
    "acceptance_rate": lambda row: format_number(row["acceptance_rate"], 3),
    "tokens": lambda row: f"{row['tokens']:,}",
    "passes": lambda row: f"{row['passes']:,}",
    "parameters": lambda row: f"{row['draft_parameters']:,}",
    "roof_share": lambda row: format_share(row["roof_share"]),
    "peak memory": lambda row: "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
}


def markdown_table(rows: Sequence[Row], columns: Columns) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe_null(row: Row) -> str:
    """How often other kernels alone make autoregression differ from itself; nothing for the row that shows it."""
    found = row["lossless"].get("null")
    if found is not None:
        return f"; autoregression by other kernels ({found['drafter']}) differs from itself on {found['different']}"
    return (
        ""
        if row.get("other_kernels")
        else "; how often autoregression does, contestants=[...,transformers_eager] tells"
    )


def format_fit(metrics: dict[str, Any]) -> str:
    tokens = f"{metrics['tokens']:,} tokens"
    if metrics["p_value"] is None:
        return f"{tokens} are too few to tell (it takes {MIN_TOKENS_FOR_P_VALUE})"
    return (
        f"c"
        f"hi-square {metrics['chi_square']:.1f} in {HISTOGRAM_CELLS} cells over {tokens} (p = {metrics['p_value']:.2g})"
    )


def distribution_p_value(row: Row) -> float | None:
    """The worse of the two fits; with two of them chance has two tries, so it counts twice."""
    both = [row["lossless"], row["lossless"]["by_draft"] or {"p_value": None}]
    p_values = [one["p_value"] for one in both if one["p_value"] is not None]
    return min(1.0, len(p_values) * min(p_values)) if p_values else None
