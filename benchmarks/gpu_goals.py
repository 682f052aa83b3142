"""Tables of the rows that benchmarks/gpu.py measures, with the goals of the project beside them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.report.tables import Columns, markdown_table

# Measure of a row, the limit, and whether it is the least.
GOALS: dict[str, tuple[str, float, bool]] = {
    AUTOREGRESSIVE: ("utilization", 0.75, True),
    "ctc": ("c", 0.07, False),
    "ctc_gru": ("c", 0.12, False),
}
GOALS_OF_ALL: dict[str, tuple[float, bool]] = {"v64": (1.15, False), "o": (0.03, False)}


def report(hardware: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as tables, with the goals beside them."""
    measured = [row for row in rows if "error" not in row]
    columns = columns_of("mode", "context", "drafter", "reads", "c", "v", "o", "utilization")
    parts = [f"# Latency on {hardware}"]
    if measured:
        bandwidth = statistics.median(row["machine"]["bandwidth"] for row in measured)
        parts += [f"Copy bandwidth {bandwidth / 1e9:,.0f} GB/s.", markdown_table(measured, columns)]
    goals = [goal for row in measured for goal in goals_of(row)]
    if goals:
        columns = columns_of("mode", "context", "drafter", "measure", "value", "goal", "reached")
        parts.append(markdown_table(goals, columns))
    parts += [f"{row['mode']}, {row['context']}, {row['drafter']}: {row['error']}" for row in rows if "error" in row]
    return "\n\n".join(parts) + "\n"


def columns_of(*keys: str) -> Columns:
    """Return columns of these fields, fractions with three digits."""

    def cell(key: str, row: dict[str, Any]) -> str:
        return f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key])

    return {key: partial(cell, key) for key in keys}


def goals_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the goals of a row whose steps were captured, all of them, and whether they are reached."""
    if not row["captured"]:
        return
    own = [GOALS[row["drafter"]]] if row["drafter"] in GOALS else []
    for measure, limit, least in [*own, *((name, *goal) for name, goal in GOALS_OF_ALL.items())]:
        if (value := row.get(measure)) is not None:
            reached = value >= limit if least else value <= limit
            named = {key: row[key] for key in ("mode", "context", "drafter")}
            goal = f"{'>=' if least else '<='} {limit}"
            yield {**named, "measure": measure, "value": value, "goal": goal, "reached": reached}
