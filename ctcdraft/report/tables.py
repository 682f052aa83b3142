"""report.json and report.md of one evaluation, and the table on the terminal. It prints what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ctcdraft.evaluation.distribution_test import CELLS, FEWEST

OWED = {
    "law": "the base's law, not the same words, because its guesses are drawn",
    "nothing": "nothing, but this is how its words fit the base's law",
}
BREAKDOWN = "breakdown.svg"
SIZED = (
    "Chosen before the first question, on prompts that are none: tau of every size is replayed from one run that "
    "drafts the largest tree behind every token, the cost of a pass is measured, and tau / cost is greatest at the "
    "size chosen."
)
UNLIKELY = 1e-4  # of a fit no better by chance: one honest row in ten thousand falls below it

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def with_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    return number(value) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def signed(value: float | None, bounds: Sequence[float] | None) -> str:
    """+0.31 [+0.22, +0.40]"""
    if value is None:
        return "-"
    return f"{value:+.2f}" + (f" [{bounds[0]:+.2f}, {bounds[1]:+.2f}]" if bounds else "")


def in_words(pair: Row) -> str:
    speed = "" if pair["speedup"] is None else f", speed-up {signed(pair['speedup'], pair['speedup_ci'])}"
    tau = signed(pair["tau"], pair["tau_ci"])
    return f"{pair['more']} less {pair['less']}, {pair['nodes']} nodes: tau {tau}{speed}"


def named(row: Row) -> str:
    """The drafter's name, with a mark in every table where its text is not the base's, or its frames are read
    otherwise than they were taught."""
    lossy = " (LOSSY)" if row["lossless"]["owes"] == "nothing" else ""
    return f"{row['drafter']}{' (crossing)' if row.get('crossing') else ''}{lossy}"


def equal(row: Row) -> str:
    """118+2/120: equal, + those that rounding explains, of all. Where no words are owed, how well the law fits."""
    lossless = row["lossless"]
    if lossless["owes"] != "words":
        return f"law p={number(p_of_law(row), 3)}"
    rounding = f"+{lossless['rounding']}" if lossless["rounding"] else ""
    return f"{lossless['equal']}{rounding}/{lossless['prompts']}"


MAIN: Columns = {
    "drafter": named,
    "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
    "speedup": lambda row: with_interval(row["speedup"], row["speedup_ci"]),
    "tokens/s": lambda row: number(row["tokens_per_second"], 1),
    "c": lambda row: number(row["c"]),
    "v": lambda row: number(row["v"]),
    "o": lambda row: number(row["o"]),
    "predicted": lambda row: number(row["predicted_speedup"]),
    "decode": lambda row: number(row["speedup_decode"]),
    "equal": equal,
}
FULL: Columns = {
    "drafter": MAIN["drafter"],
    "benchmark": lambda row: row["benchmark"],
    "T": lambda row: f"{row['temperature']:g}",
    "nodes": lambda row: str(row["nodes"]),
    "prompts": lambda row: str(row["prompts"]),
    **{name: cell for name, cell in MAIN.items() if name not in ("drafter", "decode", "equal")},
    "speedup_decode": MAIN["decode"],
    "alpha": lambda row: " ".join(number(rate) for rate in row["alpha"]) or "-",
    "equal": equal,
    "ended": lambda row: share(row["ended_share"]),
    "repeated 4-grams": lambda row: share(row["repeated_4gram_share"]),
    "accuracy": lambda row: share(row["accuracy"]),
}
REPLAY: Columns = {
    **{name: FULL[name] for name in ("drafter", "nodes", "prompts", "tau", "alpha")},
    "equal": equal,
    "passes alike": lambda row: "{alike}/{answers}".format(**row["replay"]),
}
DIFFERENCES: Columns = {
    "more": lambda pair: pair["more"],
    "less": lambda pair: pair["less"],
    "nodes": lambda pair: str(pair["nodes"]),
    "tau": lambda pair: signed(pair["tau"], pair["tau_ci"]),
    "speedup": lambda pair: signed(pair["speedup"], pair["speedup_ci"]),
}
MORE: Columns = {
    "drafter": MAIN["drafter"],
    "tau_mean": lambda row: number(row["tau_mean"]),
    "tau_paper": lambda row: number(row["tau_paper"]),
    "speedup_paper": lambda row: number(row["speedup_paper"]),
    "acceptance_rate": lambda row: number(row["acceptance_rate"], 3),
    "tokens": lambda row: f"{row['tokens']:,}",
    "passes": lambda row: f"{row['passes']:,}",
    "parameters": lambda row: f"{row['draft_parameters']:,}",
    "roof_share": lambda row: share(row["roof_share"]),
    "peak memory": lambda row: "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
}


def table(rows: Sequence[Row], columns: Columns) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def null(row: Row) -> str:
    """How often other kernels alone make autoregression differ from itself; nothing for the row that shows it."""
    found = row["lossless"].get("null")
    if found is not None:
        return f"; autoregression by other kernels ({found['drafter']}) differs from itself on {found['different']}"
    return (
        ""
        if row.get("other_kernels")
        else "; how often autoregression does, contestants=[...,transformers_eager] tells"
    )


def fit(found: dict[str, Any]) -> str:
    tokens = f"{found['tokens']:,} tokens"
    if found["p_value"] is None:
        return f"{tokens} are too few to tell (it takes {FEWEST})"
    return f"chi-square {found['chi_square']:.1f} in {CELLS} cells over {tokens} (p = {found['p_value']:.2g})"


def p_of_law(row: Row) -> float | None:
    """The worse of the two fits; with two of them chance has two tries, so it counts twice."""
    both = [row["lossless"], row["lossless"]["by_draft"] or {"p_value": None}]
    found = [one["p_value"] for one in both if one["p_value"] is not None]
    return min(1.0, len(found) * min(found)) if found else None
