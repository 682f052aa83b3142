"""Claims about the crossed table: effects of its factors and trees, and pairs of cells that have several seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from studies.comparison.config import FACTORS
from studies.comparison.jobs import AGAIN, CROSSED, REPLAY, Row, levels_of
from studies.comparison.statistics import Heads, Measured, bootstrap, difference, heads_of, names_of, over_seeds

OWN, BOTH = "own", "both"  # in the column of trees: the last one that its loss has, and the two that are compared


def crossed_claims(rules: Mapping[str, Any], rows: Sequence[Row], measured: Sequence[Measured]) -> Iterator[Row]:
    """Yield all claims about the cells, then those that name a cell trained at another rate as well, at that rate."""
    for at in measured:
        if at.place[1] == REPLAY:
            heads, again = (heads_of(rows, at.place[0], role) for role in (CROSSED, CROSSED + AGAIN))
            yield from claims_at(rules, heads, at)
            for row in claims_at(rules, {**heads, **again}, at) if again else ():
                if any(cell in f"{row['more']} {row['less']}" for cell in again):
                    yield row | {"role": CROSSED + AGAIN}


def claims_at(rules: Mapping[str, Any], heads: Heads, at: Measured) -> Iterator[Row]:
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
    several = [cell for cell, seeds in names.items() if len(seeds) > 1]

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
            row = over_seeds(at, [names[upper], names[less]], [names[lower], names[more]])
            pair = {"more": f"{upper} minus {lower}", "less": f"{more} minus {less}"}
            yield {"factor": f"{one[0]} by {other[0]}", **pair, **at.labels(), **row}
