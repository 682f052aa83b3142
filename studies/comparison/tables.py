"""main.csv, heads.csv, claims.csv and figures of a comparison, from the files of its results alone.

main.csv has a row per method, base, seed and benchmark; heads.csv all that was measured, by tree and its size;
claims.csv a row per difference of two heads, which names its kind of interval.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.hardware import HardwareSpec
from ctcdraft.io import write_text
from studies.comparison.config import FACTORS, Comparison
from studies.comparison.crossed import crossed_claims
from studies.comparison.figures import figures
from studies.comparison.jobs import AGAIN, CELLS, CROSSED_TRIAL, REPLAY, TRIAL, Row
from studies.comparison.measure import failed_rows, passed_rows
from studies.comparison.schedule import all_jobs, main_role
from studies.comparison.statistics import Measured, Place, claims, converged, doublings
from studies.comparison.store import ResultStore

SPEED, COMPARED = ("speedup", "speedup_low", "speedup_high"), ("equal", "compared")
TRAINED = ("parameters", "trials", "hours", "hours_with_trials", "converged", "learning_rate", "rate_at_edge", "steps")


def rules_of(config: Comparison, store: ResultStore) -> dict[str, Any]:
    """Return what the tables need of the config, and the names of its finished jobs, to which they are limited."""
    plan = {key: getattr(config.counted.plan, key) for key in ("flops", "bandwidth")}
    trees: dict[str, dict[str, str]] = {}
    levels: dict[str, list[str]] = {factor: [] for factor in FACTORS}
    for cell in config.crossed.cells if config.crossed is not None else ():
        for tree, option in cell.trees:
            trees.setdefault(tree, {})[cell.levels["objective"]] = option
        for factor in FACTORS:
            levels[factor] = [*dict.fromkeys([*levels[factor], cell.levels[factor]])]
    rows = store.rows()
    wanted = {job.name for job in all_jobs(config, rows)}
    return {
        "converged": config.ladder.converged, "claims": config.claims, "trees": trees, "levels": levels,
        "timed": {base: main_role(config, base) for base in config.bases},
        "unlike": config.crossed.unlike if config.crossed is not None else (),
        "counted": {"nodes": config.counted.nodes, "plan": plan},
        "trainings": sorted(wanted & {*rows}), "evaluations": sorted(wanted & {*store.measured()}),
    }  # fmt: skip


def rebuild(rules: Mapping[str, Any], store: ResultStore, out: Path) -> None:
    """Write heads.csv, claims.csv and the figures of what is finished in `store.results`."""
    costs = json.loads(store.costs.read_text()) if store.costs.is_file() else {}
    trained, measured = store.rows(), store.measured()
    rows = [trained[name] for name in trained if name in rules["trainings"]]
    evaluations = [measured[name] for name in rules["evaluations"]]
    for row in failed_rows(measured, rules["evaluations"]):
        print(f"in no table, as it failed a check: {row}")
    places = [*measured_places(evaluations)]
    doubled = [*doublings(rows, places)]
    ends = converged(rules["converged"], doubled)
    heads = [row for one in evaluations for row in head_rows(one, rules, rows, costs, ends)]
    pairs = [*claims(rules, rows, places), *crossed_claims(rules, rows, places), *doubled]
    for name, found in {"main": main_rows(heads), "heads": heads, "claims": pairs}.items():
        if found:
            # convert_dtypes, or whole numbers of a column with gaps become floats.
            frame = pd.DataFrame(found).dropna(axis="columns", how="all").convert_dtypes()
            text = frame.to_csv(index=False, float_format="%.8g", lineterminator="\n")
            write_text(out / f"{name}.csv", text)
    for name, svg in figures(heads, rows).items():
        write_text(out / name, svg)


def main_rows(heads: Sequence[Row]) -> list[Row]:
    """Return a line per method, base, budget, seed and benchmark: training, tau by tree size, costs and speed-up."""
    lines: dict[tuple[Any, ...], Row] = {}
    for row in heads:
        if row.get("role") not in CELLS and row["method"] != AUTOREGRESSIVE:
            key = {name: row.get(name) for name in ("base", "method", "role", "seed", "benchmark")}
            line = lines.setdefault(tuple(key.values()), key | {name: row.get(name) for name in TRAINED})
            if row["measure"] == REPLAY:
                line[f"tau_{row['nodes']}"] = row["tau"]
                line |= {name: row[name] for name in ("c_counted", "predicted") if name in row}
            elif row["measure"] == "adaptive":
                line |= {name: row[name] for name in (*SPEED, "mean_nodes", *COMPARED)}
            elif not row["measure"].endswith(AGAIN):
                line |= {f"{name}_{row['nodes']}": row[name] for name in (*SPEED, "c", *COMPARED)}
    return [*lines.values()]


def head_rows(
    one: Row,
    rules: Mapping[str, Any],
    rows: Sequence[Row],
    costs: Mapping[str, Any],
    ends: Mapping[tuple[str, str, bool], str],
) -> Iterator[Row]:
    """Yield a line per row of an evaluation's report that passed the checks; `ends` has where heads converged."""
    base = one["evaluation"].partition("/")[0]
    by_name, report = {row["job"]: row for row in rows}, one["report"]
    for row in passed_rows(one):
        head, _, option = row["drafter"].partition("@")
        line: Row = {"base": base, "benchmark": row["benchmark"], "measure": one["kind"]}
        line |= trained_columns(rules, rows, by_name.get(f"{base}/{head}"), row["drafter"])
        line["tree"] = tree_name(rules, line.get("objective"), option)
        keys = ("nodes", "mean_nodes", "prompts", "tau", "speedup", "tokens_per_second", "c", "v", "o")
        line |= {key: row[key] for key in keys} | {"speedup_from_costs": row["predicted_speedup"]}
        for key in ("tau", "speedup"):
            line |= dict(zip((f"{key}_low", f"{key}_high"), row[f"{key}_ci"] or (None, None), strict=True))
        line |= {"equal": row["lossless"]["equal"], "compared": row["lossless"]["prompts"]}
        if option and line.get("role") not in CELLS:
            line["method"] += f"@{option}"  # its draft may cost more or less, so nothing is known of it by that name
        if "parameters" in line:
            head_key = base, line["method"], line["role"].endswith(AGAIN)
            line["converged"] = "-" if line["role"] in CELLS else ends.get(head_key, "-")
        line |= counted_columns(rules, cost_of(costs, line), line)
        if one["kind"] != REPLAY and one.get("processor_seconds"):
            line["wall_per_processor"] = one["seconds"] / one["processor_seconds"]
        yield line | {"commit": report["environment"]["git"]["commit"][:7]}


def trained_columns(rules: Mapping[str, Any], rows: Sequence[Row], head: Row | None, drafter: str) -> Row:
    """Return what trainings.csv has about a head; of a drafter without training its name alone."""
    if head is None:
        return {"method": drafter, "timed": True}
    keys = ("role", "method", "seed", "steps", "learning_rate", "parameters", *FACTORS)
    same = [row for row in rows if all(row[key] == head[key] for key in ("base", "method"))]
    tried = [row for row in same if row["role"] in (TRIAL, CROSSED_TRIAL)]  # another base takes the rate of the first
    first = min(one["seed"] for one in same)
    rates = [row["learning_rate"] for row in tried]
    return {
        **{key: head.get(key) for key in keys}, "trials": len(tried), "hours": head["seconds"] / 3600,
        "rate_at_edge": len(rates) > 1 and head["learning_rate"] in (min(rates), max(rates)),
        "hours_with_trials": sum(row["seconds"] for row in [*tried, head]) / 3600, "validation_tau": head["tau"],
        "timed": head["role"] == rules["timed"][head["base"]] and head["seed"] == first,
    }  # fmt: skip


def tree_name(rules: Mapping[str, Any], objective: str | None, option: str) -> str | None:
    names = [name for name, options in rules["trees"].items() if objective and options.get(objective) == option]
    return names[0] if names else option or None


def cost_of(costs: Mapping[str, Any], line: Row) -> Mapping[str, Any]:
    """Return the counted cost of a method: nothing but the base's step for drafters that have no weights."""
    own = costs.get(line["method"])
    if own is not None or "parameters" in line or line["method"].startswith((AUTOREGRESSIVE, "transformers_")):
        return own or {}
    bases = [cost for cost in costs.values() if "refused" not in cost]
    step = {key: value for cost in bases[:1] for key, value in cost.items() if key.startswith("base_")}
    return step and {**step, "bytes": 0, "operations": 0}


def counted_columns(rules: Mapping[str, Any], cost: Mapping[str, Any], line: Row) -> Row:
    if not cost or "refused" in cost or line.get("role") in CELLS:
        return {}
    nodes = rules["counted"]["nodes"]
    c, v = predicted_costs(cost, nodes, HardwareSpec.of(rules["counted"]["plan"]))
    counted: Row = {f"step_{key}": cost.get(key) for key in ("launches", "synchronisations")}
    counted |= {"draft_bytes": cost["bytes"] / cost["base_bytes"], "c_counted": c, "v_counted": v}
    counted["draft_operations"] = cost["operations"] / cost["base_operations"]
    if line["measure"] == REPLAY and line["nodes"] == nodes:
        counted["predicted"] = line["tau"] / (c + v)
    return counted


def predicted_costs(cost: Mapping[str, Any], nodes: int, plan: HardwareSpec) -> tuple[float, float]:
    """Return c and v at the counted shape: times of a draft and of reading a tree, in steps of the base.

    Each is the slower of its bytes and its operations on the hardware; launches and the host are not counted.
    """
    step = plan.seconds(cost["base_operations"], cost["base_bytes"])
    draft = plan.seconds(cost["operations"], cost["bytes"])
    reading = plan.seconds(nodes * cost["base_operations"], cost["base_bytes"])
    if step is None or draft is None or reading is None:
        raise InputError("counted.plan needs flops and bandwidth, from which draft costs are predicted")
    return draft / step, reading / step


def measured_places(evaluations: Sequence[Row]) -> Iterator[Measured]:
    """Yield the counts by question of all rows that passed, by base, measure, benchmark and tree size."""
    places: dict[tuple[Place, str], dict[str, QuestionSums]] = {}
    for one in evaluations:
        base, name = one["evaluation"].split("/")
        for row in passed_rows(one):
            # Times of two evaluations are not comparable: each has a baseline of its own.
            place = base, one["kind"], row["benchmark"], row["nodes"]
            sums = QuestionSums(**one["counts"][row["drafter"]][str(row["nodes"])])
            evaluation = "" if one["kind"] == REPLAY else name
            places.setdefault((place, evaluation), {})[row["drafter"]] = sums
    yield from (Measured(place, sums) for (place, _), sums in places.items())
