"""Who is ahead of whom, with intervals over questions: from what was counted (counts.py). It measures nothing.

Seeds of one entrant are pooled: a question's tokens and passes are summed over them. In a grid, every cell that has
a twin which differs in one factor alone is set against it, and all twins are pooled.
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
READING_FACTOR = "reading"  # a factor, too, where heads are read in several ways
FactorLevels = tuple[tuple[str, Any], ...]  # levels of the factors, sorted by factor


def write_statistics(config: ComparisonConfig, store: ResultStore) -> None:
    """Writes verdict.json: differences of the pairs, effects of the factors."""
    training = store.read(TRAINING)
    found: dict[str, list[Entry]] = {"differences": [], "effects": []}
    for where, answers in sums_by_task(store).items():
        labels = dict(zip(("kind", "benchmark", "temperature"), where, strict=True))
        for nodes in sorted({nodes for _, nodes in answers if nodes > 1}):
            for arm in config.arms:
                place = {**labels, "nodes": nodes, "arm": arm}
                told = pair_differences(config, training, answers, arm, nodes)
                found["differences"] += [{**place, **one} for one in told]
                if where[0] == "replay":
                    found["effects"] += [
                        {**place, **one} for one in factor_effects(config, training, answers, arm, nodes)
                    ]
    store.write(VERDICT, found)


def sums_by_task(store: ResultStore) -> dict[tuple[str, str, float], RowSums]:
    """What all certified rows counted, by (kind, benchmark, temperature), across the groups of a grid."""
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
        there = [[answers[name, nodes] for name in some if (name, nodes) in answers] for some in names]
        base = answers.get((AUTOREGRESSIVE, nodes))
        if all(there) and base is not None:
            made = paired_difference(pool_sums(there[0]), pool_sums(there[1]), base, config.seed)
            yield {"more": more, "less": less, "seeds": [len(some) for some in there], **made}


def row_names(training: Mapping[str, Entry], side: str, arm: str) -> list[str]:
    """The rows of an entrant (`medusa`, `medusa@direct`) in an arm, one a seed."""
    name, _, reading = side.partition("@")
    entries = {key: entry for key, entry in training.items() if (entry["entrant"], entry["arm"]) == (name, arm)}
    return list(dict.fromkeys(row_name(entry["same_as"] or key, reading or None) for key, entry in entries.items()))


def factor_effects(
    config: ComparisonConfig, training: Mapping[str, Entry], answers: RowSums, arm: str, nodes: int
) -> Iterator[dict[str, Any]]:
    """Of every factor, each level less its first one, all else being equal: over all cells, and among those that are
    read alike (within), because some losses are read well in one way only."""
    cells = factor_cells(config, training, arm)
    base = answers.get((AUTOREGRESSIVE, nodes))
    if base is None:
        return
    for factor in dict.fromkeys(key for cell in cells for key, _ in cell):
        first, *others = levels_of_factor(cells, factor)
        for level, within in product(others, (None, *(config.readings_as if factor != READING_FACTOR else ()))):
            twins = [  # a seed that one side lacks would weigh for the other alone
                (cell, seed, answers[ours, nodes], answers[cells[twin][seed], nodes])
                for cell, twin in matched_cells(cells, factor, level, first)
                for seed, ours in cells[cell].items()
                if within in (None, dict(cell).get(READING_FACTOR))
                and (ours, nodes) in answers
                and (cells[twin].get(seed), nodes) in answers
            ]
            if twins:
                told, seeds, more, less = zip(*twins, strict=True)
                made = paired_difference(pool_sums(more), pool_sums(less), base, config.seed)
                counts = {"twins": len(set(told)), "seeds": len(set(seeds))}
                yield {"factor": factor, "more": level, "less": first, "within": within, **counts, **made}


def factor_cells(
    config: ComparisonConfig, training: Mapping[str, Entry], arm: str
) -> dict[FactorLevels, dict[int, str]]:
    """Row names by their levels and seeds. How a head is read is a factor, too, where there are several ways."""
    found: dict[FactorLevels, dict[int, str]] = {}
    for name, entry in training.items():
        if entry["arm"] != arm or not entry["factors"]:
            continue
        for number, reading in enumerate(entry["readings"]):
            read = {READING_FACTOR: config.readings_as[number]} if len(entry["readings"]) > 1 else {}
            cell = tuple(sorted({**entry["factors"], **read}.items()))
            found.setdefault(cell, {})[entry["seed"]] = row_name(entry["same_as"] or name, reading)
    return found


def levels_of_factor(cells: Iterable[FactorLevels], factor: str) -> list[Any]:
    return list(dict.fromkeys(value for cell in cells for key, value in cell if key == factor))


def matched_cells(
    cells: Iterable[FactorLevels], factor: str, level: Any, first: Any
) -> Iterator[tuple[FactorLevels, FactorLevels]]:
    known = set(cells)
    for cell in cells:
        if dict(cell).get(factor) == level:
            twin = tuple(sorted({**dict(cell), factor: first}.items()))
            if twin in known:
                yield cell, twin
