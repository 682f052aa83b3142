"""Differences between heads: t intervals over seeds where both sides have some, else bootstrap over questions.

over seeds       a claim about two heads: pooled variance of the two sides, n + m - 2 degrees of freedom
over questions   one head of each side, or several pooled question by question: other seeds may differ
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import sqrt
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums, paired_difference, pool_sums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from studies.comparison.config import FACTORS
from studies.comparison.jobs import CROSSED, Row, has_diverged, levels_of

# Quantiles 0.975 of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
BEST, BOTH = "best", "both"  # in the column of trees: of each cell its own, and the two that are compared
SEEDS, QUESTIONS = "t over seeds", "bootstrap over questions"
Place = tuple[str, str, str, int]  # base, replay or loop, benchmark, nodes
Heads = Mapping[str, dict[int, Row]]  # trainings of a method by seed


@dataclass(frozen=True)
class Measured:
    """What was measured at one place: the counts by question of every row, by its name in reports."""

    place: Place
    sums: Mapping[str, QuestionSums]

    def tau(self, name: str) -> float:
        return sum(self.sums[name].committed) / sum(self.sums[name].passes)

    def labels(self) -> dict[str, Any]:
        return dict(zip(("base", "measure", "benchmark", "nodes"), self.place, strict=True))


def t_interval(more: Sequence[float], less: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of two means and its 95 % interval.

    [2, 3, 4] less [1, 2, 3]   ->   1, -1.27, 3.27: both variances 1, 4 degrees of freedom, 2.776 sqrt(1/3 + 1/3)
    """
    degrees = len(more) + len(less) - 2
    if min(len(more), len(less)) < 2 or degrees > len(T_QUANTILES):
        raise InputError(f"a t interval needs two to seven seeds of each head, got {len(more)} and {len(less)}")
    squares = (len(more) - 1) * statistics.variance(more) + (len(less) - 1) * statistics.variance(less)
    half = T_QUANTILES[degrees - 1] * sqrt(squares / degrees * (1 / len(more) + 1 / len(less)))
    difference = statistics.mean(more) - statistics.mean(less)
    return difference, difference - half, difference + half


def difference(measured: Measured, more: Sequence[str], less: Sequence[str]) -> Row | None:
    """Return the difference between heads, each given by the rows of its seeds; None where a side was not measured."""
    sides = [[name for name in side if name in measured.sums] for side in (more, less)]
    if not all(sides):
        return None
    if min(map(len, sides)) > 1 and measured.place[1] == "replay":
        value, low, high = t_interval(*([measured.tau(name) for name in side] for side in sides))
        found: Row = {"tau": value, "tau_low": low, "tau_high": high, "interval": SEEDS}
    else:
        found = bootstrap(measured, [sides[0][0]], [sides[1][0]])
    return {**measured.labels(), **found, "seeds": "+".join(str(len(side)) for side in sides)}


def bootstrap(measured: Measured, more: Sequence[str], less: Sequence[str]) -> Row:
    ours, theirs = (pool_sums([measured.sums[name] for name in side]) for side in (more, less))
    # Without a baseline no speed-up: a replay has no times, and its one row of autoregression stands at one size.
    base = measured.sums.get(AUTOREGRESSIVE, theirs)
    found = paired_difference(ours, theirs, base, seed=0)
    row: Row = {"interval": QUESTIONS, "questions": found["questions"], "pairs": len(more)}
    for key in ("tau", "speedup"):
        low, high = found[f"{key}_ci"] or (None, None)
        row |= {key: found[key], f"{key}_low": low, f"{key}_high": high}
    return row


def claims(rules: Mapping[str, Any], rows: Sequence[Row], measured: Sequence[Measured]) -> Iterator[Row]:
    """Yield the claimed differences at every budget, and those of the crossed table."""
    for at in measured:
        for role in dict.fromkeys(row["role"] for row in rows if row["role"].endswith("x")):
            heads = heads_of(rows, at.place[0], role)
            for more, less in rules["claims"]:
                found = difference(at, *(names_of(heads.get(side, {})) for side in (more, less)))
                if found is not None:
                    yield {"role": role, "more": more, "less": less, **found}
        if at.place[1] == "replay":
            yield from crossed_claims(rules, heads_of(rows, at.place[0], CROSSED), at)


def heads_of(rows: Sequence[Row], base: str, role: str) -> Heads:
    heads: dict[str, dict[int, Row]] = {}
    for row in rows:
        if (row["base"], row["role"]) == (base, role):
            heads.setdefault(row["method"], {})[row["seed"]] = row
    return heads


def names_of(head: Mapping[int, Row], tree: str | None = None) -> list[str]:
    """Return the names in reports of a head's seeds: ctc.1x.s0, or with the option of its tree ctc.1x.s0@collapse."""
    names = [head[seed]["job"].partition("/")[2] for seed in sorted(head)]
    return names if tree is None else [f"{name}@{tree}" for name in names]


def crossed_claims(rules: Mapping[str, Any], heads: Heads, at: Measured) -> Iterator[Row]:
    """Yield effects of factors over all matched pairs of cells, then single pairs that have several seeds.

    In each tree, and with every cell in the tree that is best for it; then of the trees over the cells that have both.
    """
    cells = {name: levels_of(next(iter(head.values()))) for name, head in heads.items()}
    by_tree: dict[str, dict[str, list[str]]] = {tree: {} for tree in rules["trees"]}
    best: dict[str, list[str]] = {}
    for (tree, options), (cell, levels) in product(rules["trees"].items(), cells.items()):
        seeds = names_of(heads[cell], options.get(levels["objective"], "none"))
        if seeds := [one for one in seeds if one in at.sums]:
            by_tree[tree][cell] = seeds
            best[cell] = max(best.get(cell, seeds), seeds, key=lambda each: at.tau(each[0]))
    for tree, names in {**by_tree, BEST: best}.items():
        factors = [factor for factor in FACTORS if factor != "objective" or tree not in rules["unlike"]]
        yield from factor_effects(cells, names, at, tree, factors)
        for less, more in combinations(names, 2):
            changed = [factor for factor in FACTORS if cells[more][factor] != cells[less][factor]]
            if len(changed) == 1 and changed[0] in factors and min(len(names[more]), len(names[less])) > 1:
                found = difference(at, names[more], names[less])
                labels = {"role": CROSSED, "tree": tree, "factor": changed[0], "more": more, "less": less}
                yield labels | (found or {})
    for less, more in combinations(by_tree, 2):
        if both := [cell for cell in by_tree[more] if cell in by_tree[less]]:
            labels = {"role": CROSSED, "tree": BOTH, "factor": "tree", "more": more, "less": less, "seeds": "1+1"}
            yield (
                labels
                | at.labels()
                | bootstrap(at, *([by_tree[tree][cell][0] for cell in both] for tree in (more, less)))
            )


def factor_effects(
    cells: Mapping[str, Mapping[str, str]],
    names: Mapping[str, Sequence[str]],
    at: Measured,
    tree: str,
    factors: Sequence[str],
) -> Iterator[Row]:
    """Yield each level of a factor minus its first one, the first seeds of all pairs that differ in it alone pooled."""
    for factor in factors:
        first, *others = dict.fromkeys(cells[cell][factor] for cell in names) or [""]
        for level in others:
            pairs = [
                (more, less)
                for more in names
                for less in names
                if cells[more][factor] == level and dict(cells[more]) == {**cells[less], factor: level}
                if cells[less][factor] == first
            ]
            if pairs:
                sides = [[names[cell][0] for cell in side] for side in zip(*pairs, strict=True)]
                labels = {"role": CROSSED, "tree": tree, "factor": factor, "more": level, "less": first, "seeds": "1+1"}
                yield labels | at.labels() | bootstrap(at, *sides)


def converged_at(once: int, share: float, rows: Collection[Row]) -> str:
    """Return the first budget of a head from which no doubling adds the share of tau, else `not converged`.

    1x 2.00, 2x 2.30, 4x 2.32   ->   2x        1x 2.00, 2x 2.03, 4x 2.60   ->   not converged        1x 2.00   ->   -

    Args:
        once: steps of budget 1x.
    """
    taus = {row["steps"]: row["tau"] for row in sorted(rows, key=lambda row: row["steps"]) if not has_diverged(row)}
    doubled = [(steps, taus[2 * steps] / tau - 1) for steps, tau in taus.items() if 2 * steps in taus]
    below = [steps for steps, _ in doubled if all(gain < share for later, gain in doubled if later >= steps)]
    return f"{below[0] // once}x" if below else "not converged" if doubled else "-"
