"""Paired differences between methods and effects of factors, with bootstrap intervals over questions (verdict.json).

Seeds of a method are pooled: a question's tokens and steps are summed over them. In a grid every cell is compared with
the cell that differs in one factor alone, and all such pairs are pooled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from ctcdraft.evaluation.bootstrap import QuestionSums, paired_difference, pool_sums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from studies.comparison.config import ComparisonConfig
from studies.comparison.evaluate import checked_counts, evaluation_rows, passed_check, row_name, row_sizes
from studies.comparison.store import EVALUATIONS, TRAINING, VERDICT, Entry, ResultStore

RowSums = dict[tuple[str, int], QuestionSums]  # by row name and nodes
READING_FACTOR = "reading"  # the tree built from a draft, a factor where heads are read in several ways
FactorLevels = tuple[tuple[str, Any], ...]  # levels of the factors, sorted by factor


def write_statistics(config: ComparisonConfig, store: ResultStore) -> None:
    training = store.read(TRAINING)
    verdict: dict[str, list[Entry]] = {"differences": [], "effects": []}
    for task, answers in sums_by_task(store).items():
        labels = dict(zip(("kind", "benchmark", "temperature"), task, strict=True))
        for nodes in sorted({nodes for _, nodes in answers if nodes > 1}):
            for arm in config.arms:
                place = {**labels, "nodes": nodes, "arm": arm}
                differences = pair_differences(config, training, answers, arm, nodes)
                verdict["differences"] += [{**place, **one} for one in differences]
                effects = factor_effects(config, training, answers, arm, nodes) if task[0] == "replay" else ()
                verdict["effects"] += [{**place, **one} for one in effects]
    store.write(VERDICT, verdict)


def sums_by_task(store: ResultStore) -> dict[tuple[str, str, float], RowSums]:
    """Return the counts of all lossless rows by (kind, benchmark, temperature), across the groups of a grid."""
    tasks: dict[tuple[str, str, float], RowSums] = {}
    for name, entry in store.read(EVALUATIONS).items():
        here = tasks.setdefault((entry["kind"], entry["benchmark"], entry["temperature"]), {})
        rows = evaluation_rows(store, name)
        counts = checked_counts(store, name, rows)
        for row in filter(passed_check, rows):
            here |= {(row["drafter"], size): counts[row["drafter"]][size] for size in row_sizes(row, counts)}
    return tasks


def pair_differences(
    config: ComparisonConfig, training: Mapping[str, Entry], answers: RowSums, arm: str, nodes: int
) -> Iterator[dict[str, Any]]:
    for more, less in config.pairs:
        names = [row_names(training, side, arm) for side in (more, less)]
        sums = [[answers[name, nodes] for name in side if (name, nodes) in answers] for side in names]
        base = answers.get((AUTOREGRESSIVE, nodes))
        if all(sums) and base is not None:
            difference = paired_difference(pool_sums(sums[0]), pool_sums(sums[1]), base, config.seed)
            yield {"more": more, "less": less, "seeds": [len(side) for side in sums], **difference}


def row_names(training: Mapping[str, Entry], side: str, arm: str) -> list[str]:
    """Return the row names of a method (`medusa`, `medusa@direct`) in an arm, one per seed."""
    name, _, reading = side.partition("@")
    entries = {key: entry for key, entry in training.items() if (entry["entrant"], entry["arm"]) == (name, arm)}
    return list(dict.fromkeys(row_name(entry["same_as"] or key, reading or None) for key, entry in entries.items()))


def factor_effects(
    config: ComparisonConfig, training: Mapping[str, Entry], answers: RowSums, arm: str, nodes: int
) -> Iterator[dict[str, Any]]:
    """Yield the difference between each level of a factor and its first one, all else equal."""
    cells = factor_cells(config, training, arm)
    base = answers.get((AUTOREGRESSIVE, nodes))
    if base is None:
        return
    for factor in dict.fromkeys(key for cell in cells for key, _ in cell):
        first, *others = dict.fromkeys(value for cell in cells for key, value in cell if key == factor)
        # Over all cells, and among cells with the same tree, because some objectives suit one tree only.
        for level, within in product(others, (None, *(config.readings_as if factor != READING_FACTOR else ()))):
            matched = [  # only seeds that both sides have
                (cell, seed, answers[ours, nodes], answers[cells[twin][seed], nodes])
                for cell, twin in matched_cells(cells, factor, level, first)
                for seed, ours in cells[cell].items()
                if within in (None, dict(cell).get(READING_FACTOR))
                and (ours, nodes) in answers
                and (cells[twin].get(seed), nodes) in answers
            ]
            if matched:
                pairs, seeds, more, less = zip(*matched, strict=True)
                difference = paired_difference(pool_sums(more), pool_sums(less), base, config.seed)
                counts = {"twins": len(set(pairs)), "seeds": len(set(seeds))}
                yield {"factor": factor, "more": level, "less": first, "within": within, **counts, **difference}


def factor_cells(
    config: ComparisonConfig, training: Mapping[str, Entry], arm: str
) -> dict[FactorLevels, dict[int, str]]:
    """Return row names by factor levels and seed."""
    cells: dict[FactorLevels, dict[int, str]] = {}
    for name, entry in training.items():
        if entry["arm"] != arm or not entry["factors"]:
            continue
        for number, reading in enumerate(entry["readings"]):
            # The tree is a factor, too, where heads have several.
            read = {READING_FACTOR: config.readings_as[number]} if len(entry["readings"]) > 1 else {}
            cell = tuple(sorted({**entry["factors"], **read}.items()))
            cells.setdefault(cell, {})[entry["seed"]] = row_name(entry["same_as"] or name, reading)
    return cells


def matched_cells(
    cells: Iterable[FactorLevels], factor: str, level: Any, first: Any
) -> Iterator[tuple[FactorLevels, FactorLevels]]:
    """Yield the cells of a level, each with the cell that differs in this factor alone, at its first level."""
    known = set(cells)
    for cell in cells:
        if dict(cell).get(factor) == level:
            twin = tuple(sorted({**dict(cell), factor: first}.items()))
            if twin in known:
                yield cell, twin
