"""Differences between heads: t intervals over seeds where both sides have some, else bootstrap over questions.

over seeds       a claim about two heads: pooled variance of the two sides, n + m - 2 degrees of freedom
over questions   one head of each side, or several pooled question by question: other seeds may differ
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import sqrt
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums, paired_difference, pool_sums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from studies.comparison.config import FACTORS
from studies.comparison.jobs import CROSSED, REPLAY, Row, levels_of

# Quantiles 0.975 of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
OWN, BOTH = "own", "both"  # in the column of trees: the last one that its loss has, and the two that are compared
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


def t_interval(more: Sequence[Sequence[float]], less: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the sum of some means less the sum of others, and its 95 % interval.

    [[2, 3, 4]] less [[1, 2, 3]]   ->   1, -1.27, 3.27: both variances 1, 4 degrees of freedom, 2.776 sqrt(1/3 + 1/3)

    Args:
        more, less: the seeds of one head each; of two heads each for an interaction.
    """
    groups = [*more, *less]
    degrees = sum(map(len, groups)) - len(groups)
    if min(map(len, groups)) < 2 or degrees > len(T_QUANTILES):
        seeds = " and ".join(str(len(group)) for group in groups)
        raise InputError(f"a t interval needs two to seven seeds of each head, got {seeds}")
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
    half = T_QUANTILES[degrees - 1] * sqrt(squares / degrees * sum(1 / len(group) for group in groups))
    difference = sum(map(statistics.mean, more)) - sum(map(statistics.mean, less))
    return difference, difference - half, difference + half


def difference(measured: Measured, more: Sequence[str], less: Sequence[str]) -> Row | None:
    """Return the difference between heads, each given by the rows of its seeds; None where a side was not measured."""
    sides = [[name for name in side if name in measured.sums] for side in (more, less)]
    if not all(sides):
        return None
    if min(map(len, sides)) > 1 and measured.place[1] == REPLAY:
        value, low, high = t_interval(*([[measured.tau(name) for name in side]] for side in sides))
        seeds = "+".join(str(len(side)) for side in sides)
        found: Row = {"tau": value, "tau_low": low, "tau_high": high, "interval": SEEDS, "seeds": seeds}
    else:
        found = {**bootstrap(measured, [sides[0][0]], [sides[1][0]]), "seeds": "1+1"}
    return {**measured.labels(), **found}


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

    In each tree, and with every cell in the tree that its loss is meant for; then of the trees over cells with both.
    """
    order = [dict(zip(rules["levels"], levels, strict=True)) for levels in product(*rules["levels"].values())]
    cells = {name: levels for name, head in heads.items() if (levels := levels_of(next(iter(head.values())))) in order}
    cells = dict(sorted(cells.items(), key=lambda cell: order.index(cell[1])))
    by_tree: dict[str, dict[str, list[str]]] = {tree: {} for tree in rules["trees"]}
    own: dict[str, list[str]] = {}
    for (tree, options), (cell, levels) in product(rules["trees"].items(), cells.items()):
        seeds = names_of(heads[cell], options.get(levels["objective"], "none"))
        if seeds := [one for one in seeds if one in at.sums]:
            by_tree[tree][cell] = own[cell] = seeds
    for tree, names in {**by_tree, OWN: own}.items():
        factors = [factor for factor in FACTORS if factor != "objective" or tree not in rules["unlike"]]
        labels: Row = {"role": CROSSED, "tree": tree}
        yield from (labels | row for row in factor_effects(rules["levels"], cells, names, at, factors))
        yield from (labels | row for row in decided_pairs(cells, names, at, factors))
    yield from tree_effects(rules, cells, by_tree, at)


def tree_effects(
    rules: Mapping[str, Any],
    cells: Mapping[str, Mapping[str, str]],
    by_tree: Mapping[str, Mapping[str, Sequence[str]]],
    at: Measured,
) -> Iterator[Row]:
    """Yield each tree minus another one over all cells with both; for each loss where it has a tree of its own kind."""
    for less, more in combinations(by_tree, 2):
        both = [cell for cell in by_tree[more] if cell in by_tree[less]]
        groups = {"all": both}
        if {less, more} & {*rules["unlike"]}:
            losses = dict.fromkeys(cells[cell]["objective"] for cell in both)
            groups = {loss: [one for one in both if cells[one]["objective"] == loss] for loss in losses}
        for loss, group in groups.items():
            if group:
                labels = {"role": CROSSED, "tree": BOTH, "factor": "tree", "more": more, "less": less, "seeds": "1+1"}
                sides = [[by_tree[tree][cell][0] for cell in group] for tree in (more, less)]
                yield labels | {"objective": loss} | at.labels() | bootstrap(at, *sides)


def factor_effects(
    levels: Mapping[str, Sequence[str]],
    cells: Mapping[str, Mapping[str, str]],
    names: Mapping[str, Sequence[str]],
    at: Measured,
    factors: Sequence[str],
) -> Iterator[Row]:
    """Yield each level of a factor minus its first one, the first seeds of all pairs that differ in it alone pooled."""
    for factor in factors:
        for level in levels[factor][1:]:
            pairs = [
                (more, less)
                for more in names
                for less in names
                if cells[more][factor] == level and dict(cells[more]) == {**cells[less], factor: level}
                if cells[less][factor] == levels[factor][0]
            ]
            if pairs:
                sides = [[names[cell][0] for cell in side] for side in zip(*pairs, strict=True)]
                labels = {"factor": factor, "more": level, "less": levels[factor][0], "seeds": "1+1"}
                yield labels | at.labels() | bootstrap(at, *sides)


def decided_pairs(
    cells: Mapping[str, Mapping[str, str]], names: Mapping[str, Sequence[str]], at: Measured, factors: Sequence[str]
) -> Iterator[Row]:
    """Yield differences of cells with several seeds that differ in one factor, and how they change with another one."""
    several = {cell: [at.tau(name) for name in seeds] for cell, seeds in names.items() if len(seeds) > 1}

    def changed(less: str, more: str) -> list[str]:
        return [factor for factor in FACTORS if cells[more][factor] != cells[less][factor]]

    pairs = [pair for pair in combinations(several, 2) if len(changed(*pair)) == 1 and changed(*pair)[0] in factors]
    for less, more in pairs:
        row = difference(at, names[more], names[less])
        assert row is not None
        yield {"factor": changed(less, more)[0], "more": more, "less": less, **row}
    for (less, more), (lower, upper) in combinations(pairs, 2):
        one, other = changed(less, more), changed(less, lower)
        # All four cells differ in two factors: an interaction, which is seen twice.
        is_square = one == changed(lower, upper) and other == changed(more, upper) and len(other) == 1
        if is_square and FACTORS.index(one[0]) < FACTORS.index(other[0]):
            value, low, high = t_interval([several[upper], several[less]], [several[lower], several[more]])
            seeds = "+".join(str(len(several[cell])) for cell in (upper, lower, more, less))
            found = {"tau": value, "tau_low": low, "tau_high": high, "interval": SEEDS, "seeds": seeds}
            pair = {"more": f"{upper} minus {lower}", "less": f"{more} minus {less}"}
            yield {"factor": f"{one[0]} by {other[0]}", **pair, **at.labels(), **found}


def doublings(rows: Sequence[Row], measured: Sequence[Measured]) -> Iterator[Row]:
    """Yield what twice the budget adds to the first seed of a head, paired over questions; `gain_high` is a share."""
    for at in measured:
        budgets = {int(row["role"][:-1]) for row in rows if row["role"].endswith("x")} if at.place[1] == REPLAY else ()
        for budget in sorted(budgets):
            once, twice = (heads_of(rows, at.place[0], f"{number}x") for number in (budget, 2 * budget))
            for method in (method for method in once if method in twice):
                names = names_of(twice[method])[:1], names_of(once[method])[:1]
                if (found := difference(at, *names)) is not None:
                    share = {"gain_high": found["tau_high"] / at.tau(names[1][0])}
                    labels = {"role": f"{budget}x to {2 * budget}x", "more": method, "less": method}
                    yield labels | found | share


def converged(share: float, doubled: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return by base and method the budget beyond which a head gains less than the share of tau.

    2x    from 2x to 4x all intervals of all benchmarks and tree sizes end below the share
    fell  all end below zero          not converged   all else
    """
    last: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in doubled:
        highs = last.setdefault((row["base"], row["more"]), {})
        highs.setdefault(int(row["role"].partition("x")[0]), []).append(row["gain_high"])
    found = {}
    for head, highs in last.items():
        budget, most = max(highs), max(highs[max(highs)])
        found[head] = "fell" if most < 0 else f"{budget}x" if most < share else "not converged"
    return found
