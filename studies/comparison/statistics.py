"""Differences between heads: t intervals over seeds where both sides have some, else bootstrap over questions.

over seeds       a claim about two heads: pooled variance of the two sides, n + m - 2 degrees of freedom. It says what
                 other seeds would give on these questions; wide_low and wide_high say what they would on others.
over questions   one head of each side, or several pooled question by question: other seeds may differ
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import hypot, sqrt
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums, bootstrap_interval, paired_difference, pool_sums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from studies.comparison.jobs import AGAIN, REPLAY, Row

# Quantiles 0.975 of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
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


def over_seeds(measured: Measured, more: Sequence[Sequence[str]], less: Sequence[Sequence[str]]) -> Row:
    """Return the sum of some heads' tau less that of others: its t interval, and one that is wider by the questions.

    For the wider one the distances to the bounds of the t interval and to those of a bootstrap over questions, with all
    seeds of a head pooled, are combined by their squares.

    Args:
        more, less: the rows of the seeds of one head each; of two heads each for an interaction.
    """
    taus = [[[measured.tau(name) for name in seeds] for seeds in side] for side in (more, less)]
    value, low, high = t_interval(*taus)
    pooled = [pool_sums([measured.sums[name] for name in seeds]) for seeds in (*more, *less)]
    columns = [column for sums in pooled for column in (sums.committed, sums.passes)]

    def pooled_difference(*totals: Any) -> Any:
        ratios = [committed / passes for committed, passes in zip(totals[::2], totals[1::2], strict=True)]
        return sum(ratios[: len(more)]) - sum(ratios[len(more) :])

    found: Row = {"tau": value, "tau_low": low, "tau_high": high, "interval": SEEDS}
    if (over_questions := bootstrap_interval(pooled_difference, columns, seed=0)) is not None:
        middle = pooled_difference(*map(sum, columns))
        found["wide_low"] = value - hypot(value - low, middle - over_questions[0])
        found["wide_high"] = value + hypot(high - value, over_questions[1] - middle)
    return found | {"seeds": "+".join(str(len(seeds)) for seeds in (*more, *less))}


def difference(measured: Measured, more: Sequence[str], less: Sequence[str]) -> Row | None:
    """Return the difference between heads, each given by the rows of its seeds; None where a side was not measured."""
    sides = [[name for name in side if name in measured.sums] for side in (more, less)]
    if not all(sides):
        return None
    if min(map(len, sides)) > 1 and measured.place[1] == REPLAY:
        found = over_seeds(measured, sides[:1], sides[1:])
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
    """Yield the claimed differences at every budget, then those of heads with another learning rate in their place."""
    for at in measured:
        for role in dict.fromkeys(row["role"] for row in rows if row["role"].endswith("x")):
            heads, again = (heads_of(rows, at.place[0], each) for each in (role, role + AGAIN))
            with_again = [pair for pair in rules["claims"] if again.keys() & {*pair}]
            for label, trained, pairs in (
                (role, heads, rules["claims"]),
                (role + AGAIN, {**heads, **again}, with_again),
            ):
                for more, less in pairs:
                    found = difference(at, *(names_of(trained.get(side, {})) for side in (more, less)))
                    if found is not None:
                        yield {"role": label, "more": more, "less": less, **found}


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


def doublings(rows: Sequence[Row], measured: Sequence[Measured]) -> Iterator[Row]:
    """Yield what twice the budget adds to the first seed of a head, paired over questions; `gain_high` is a share."""
    for at in measured:
        budgets = {int(row["role"][:-1]) for row in rows if row["role"].endswith("x")} if at.place[1] == REPLAY else ()
        for budget, rate in product(sorted(budgets), ("", AGAIN)):
            roles = f"{budget}x{rate}", f"{2 * budget}x{rate}"
            once, twice = (heads_of(rows, at.place[0], role) for role in roles)
            for method in (method for method in once if method in twice):
                names = names_of(twice[method])[:1], names_of(once[method])[:1]
                if (found := difference(at, *names)) is not None:
                    share = {"gain_high": found["tau_high"] / at.tau(names[1][0])}
                    yield {"role": " to ".join(roles), "more": method, "less": method} | found | share


def converged(share: float, doubled: Sequence[Row]) -> dict[tuple[str, str, bool], str]:
    """Return by base, method and whether at another rate the budget beyond which a head gains less than the share.

    2x    from 2x to 4x all intervals of all benchmarks and tree sizes end below the share
    fell  all end below zero          not converged   all else
    """
    last: dict[tuple[str, str, bool], dict[int, list[float]]] = {}
    for row in doubled:
        highs = last.setdefault((row["base"], row["more"], row["role"].endswith(AGAIN)), {})
        highs.setdefault(int(row["role"].partition("x")[0]), []).append(row["gain_high"])
    found = {}
    for head, highs in last.items():
        budget, most = max(highs), max(highs[max(highs)])
        found[head] = "fell" if most < 0 else f"{budget}x" if most < share else "not converged"
    return found
