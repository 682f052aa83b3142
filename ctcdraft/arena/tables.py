"""Tables of a comparison's page: which columns, in which words. It knows no files."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

from ctcdraft.arena.judging import rows_named
from ctcdraft.arena.lines import Found, runs_of
from ctcdraft.arena.reports import Row, draft_seconds, row_name
from ctcdraft.arena.rules import Rules
from ctcdraft.evaluation.report import Columns, equal, number, signed, table, with_interval


def columns(rules: Rules) -> Columns:
    """Of the tables of arms: tau by nodes, then what the clock said at the sizes that were timed."""

    def entry(key: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["entry"] is None or line["entry"][key] is None else form(line["entry"][key])

    def tau(nodes: int) -> Callable[[Row], str]:
        def cell(line: Row) -> str:
            row = line["replay"].get(nodes) or line["loop"].get(nodes)
            return "-" if row is None else with_interval(row["tau"], row["tau_ci"])

        return cell

    def clocked(nodes: int, form: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda line: "-" if line["loop"][nodes] is None else form(line["loop"][nodes])

    made: Columns = {
        "drafter": lambda line: line["drafter"],
        "parameters": entry("parameters", lambda value: f"{value:,}"),
        "of reference": lambda line: number(line["ratio"]),
        "steps": entry("steps", lambda value: f"{value:,}"),
        "train s": entry("seconds", lambda value: f"{value[rules.clock]:.0f}" if rules.clock in value else "-"),
        "rate": entry("learning_rate", lambda value: f"{value:g}"),
    }
    made |= {f"tau, {nodes}": tau(nodes) for nodes in dict.fromkeys((*rules.replay.nodes, *rules.timing.nodes))}
    for nodes in rules.timing.nodes:
        made[f"speedup, {nodes}"] = clocked(nodes, lambda row: with_interval(row["speedup"], row["speedup_ci"]))
        made[f"draft ms, {nodes}"] = clocked(nodes, draft_milliseconds)
        made[f"c + v + o, {nodes}"] = clocked(nodes, lambda row: " + ".join(number(row[part]) for part in "cvo"))
        made[f"equal, {nodes}"] = clocked(nodes, equal)
    made["replay equal"] = replay_equal
    made["evaluations"] = lambda line: ", ".join(sorted({row["evaluation"] for row in rows_in(line)}))
    return made


def draft_milliseconds(row: Row) -> str:
    seconds = draft_seconds(row)
    return "-" if seconds is None else number(1e3 * seconds, 2)


def replay_equal(line: Row) -> str:
    """Texts of the loop that are autoregression's, at all sizes; and answers that took the passes replayed."""
    rows = [row for row in line["replay"].values() if row is not None]
    if not rows:
        return "-"
    texts = [sum(row["lossless"][key] for row in rows) for key in ("equal", "prompts")]
    passes = [sum(row["replay"][key] for row in rows) for key in ("alike", "answers")]
    return f"{texts[0]}/{texts[1]}, passes {passes[0]}/{passes[1]}"


def rows_in(line: Row) -> list[Row]:
    return [row for kind in ("replay", "loop") for row in line[kind].values() if row is not None]


def sampled(rules: Rules, found: Found) -> list[str]:
    """tau at the other temperatures, at the sizes that are told."""
    hot = [temperature for temperature in rules.replay.temperatures if temperature > 0]
    rows = [row for row in found.rows if row["kind"] == "replay" and row["temperature"] in hot]
    if not rows:
        return []
    made: Columns = {
        "drafter": lambda row: row["drafter"],
        "benchmark": lambda row: row["benchmark"],
        "T": lambda row: f"{row['temperature']:g}",
        "nodes": lambda row: str(row["nodes"]),
        "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
        "equal": equal,
    }
    return ["## Sampled", table([row for row in rows if row["nodes"] in rules.sizes_told], made)]


def matched(found: Found) -> list[str]:
    lines = [{"arm": arm, "entrant": name, **one} for arm, all_ in found.matching.items() for name, one in all_.items()]
    made: Columns = {
        "arm": lambda one: one["arm"],
        "entrant": lambda one: one["entrant"],
        "dial": lambda one: f"{one['key']}={one['value']}" if one["value"] is not None else "-",
        "of reference": lambda one: with_interval(one["ratio"], one["interval"]),
        "matched by": lambda one: one["how"],
    }
    return ["## How budgets were matched", table(lines, made)] if lines else []


def seeds(rules: Rules, found: Found) -> list[str]:
    """Heads that were trained more than once: tau of each seed, at the sizes that are told."""
    lines = []
    for arm in rules.arms:
        for entrant, same in runs_of(found, arm).items():
            sides = [row_name(entrant, reading) for reading in found.training[same[0]]["readings"]]
            heads = {side: rows_named(found.training, side, arm) for side in sides}
            for side, benchmark, nodes in product(sides, rules.benchmarks, rules.sizes_told):
                rows = [found.row("replay", benchmark, 0.0, head, nodes) for head in heads[side]]
                taus = [row["tau"] for row in rows if row is not None]
                if len(taus) > 1:
                    lines.append({"arm": arm, "entrant": side, "benchmark": benchmark, "nodes": nodes, "taus": taus})
    made: Columns = {
        "arm": lambda one: one["arm"],
        "entrant": lambda one: one["entrant"],
        "benchmark": lambda one: one["benchmark"],
        "nodes": lambda one: str(one["nodes"]),
        "tau of each seed": lambda one: " ".join(f"{tau:.3f}" for tau in one["taus"]),
        "mean": lambda one: number(statistics.mean(one["taus"]), 3),
        "standard deviation": lambda one: number(statistics.stdev(one["taus"]), 3),
    }
    return ["## Seeds", table(lines, made)] if lines else []


PLACE: Columns = {
    "benchmark": lambda one: one["benchmark"],
    "T": lambda one: f"{one['temperature']:g}",
    "arm": lambda one: one["arm"],
    "nodes": lambda one: str(one["nodes"]),
    "by": lambda one: one["kind"],
}
GAIN: Columns = {
    "tau": lambda one: signed(one["tau"], one["tau_ci"]),
    "speedup": lambda one: signed(one["speedup"], one["speedup_ci"]),
}
DIFFERENCES: Columns = {
    "more": lambda one: f"{one['more']} less {one['less']}",
    **PLACE,
    "seeds": lambda one: "{} and {}".format(*one["seeds"]),
    **GAIN,
}
EFFECTS: Columns = {
    "factor": lambda one: one["factor"],
    "more": lambda one: f"{one['more']} less {one['less']}",
    "read as": lambda one: one["within"] or "all",
    **PLACE,
    "twins": lambda one: str(one["twins"]),
    "seeds": lambda one: str(one["seeds"]),
    "tau": GAIN["tau"],
}


def pairs(found: Found, part: str, made: Columns, title: str) -> list[str]:
    lines = found.verdict.get(part, [])
    return [f"## {title}", table(lines, made)] if lines else []
