"""The trainings of the comparison, given what is finished; schedule.py has the order of all jobs.

The steps of a budget, the best learning rate and the chosen heads follow from finished trainings. Before these exist,
the jobs that depend on them are listed with a provisional choice and are not settled; only settled jobs run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from studies.comparison.config import FACTORS, Comparison, Overrides

DIVERGED_TAU = 0.0  # of a training whose gradients were no longer finite; every head that exists has 1 or more
PACE, TRIAL, TIMING = "pace", "1x", "timing"
CROSSED_PACE, CROSSED_TRIAL, CROSSED = "crossed_pace", "crossed_rate", "crossed"
REPLAY, AGAIN = "replay", "_again"  # the latter ends the name of a loop that is timed twice, of a role at another rate
CELLS = (CROSSED, CROSSED + AGAIN)
Row = dict[str, Any]
Rows = Mapping[str, Row]  # finished trainings by the name of their job


@dataclass(frozen=True)
class Training:
    """A head to train."""

    base: str
    role: str  # pace, 1x, timing, 2x, 2x_again, ..., crossed_pace, crossed_rate, crossed, crossed_again
    method: str
    seed: int
    steps: int
    rate: float
    own: Overrides
    minutes: float | None = None  # of the processor; None of one whose steps are timed
    settled: bool = True
    levels: Mapping[str, str] = field(default_factory=dict)  # of a cell, by factor
    trees: tuple[tuple[str, str], ...] = ()

    @property
    def head(self) -> str:
        """The name of the head in reports: ctc_gru.2x.s0, ctc_gru.1x-0.004.s0"""
        tried = f"-{self.rate:g}" if self.role in (TRIAL, CROSSED_TRIAL) else ""
        return f"{self.method}.{self.role}{tried}.s{self.seed}"

    @property
    def name(self) -> str:
        return f"{self.base}/{self.head}"

    @property
    def is_compared(self) -> bool:
        return self.role not in (PACE, TRIAL, TIMING, CROSSED_PACE, CROSSED_TRIAL)

    @property
    def is_timed(self) -> bool:
        """Whether its seconds give the steps of other trainings; it then has the machine alone."""
        return self.minutes is None


@dataclass(frozen=True)
class Evaluation:
    """Heads of one role and seed to measure on one benchmark: kind is replay, or the name of a timed loop."""

    base: str
    kind: str
    benchmark: str
    role: str
    seed: int
    part: str  # "" of the only evaluation of a role and seed, else ".0", ".1", ...
    heads: tuple[str, ...]  # contestants: heads as HEAD@TREE, then drafters without training
    untrained: tuple[str, ...]
    overrides: Overrides
    settled: bool

    @property
    def is_timed(self) -> bool:
        return self.kind != REPLAY

    @property
    def group(self) -> str:
        return f"{self.role}.s{self.seed}{self.part}"

    @property
    def name(self) -> str:
        return f"{self.base}/{self.benchmark}-{self.kind}-{self.group}"


def role_of(budget: int) -> str:
    return f"{budget}x"


def ladder_trainings(config: Comparison, rows: Rows) -> Iterator[Training]:
    """Yield budget 1x at every learning rate and longer ones at the best, then seeds and bases of the chosen heads."""
    seed, *others = config.seeds
    best: dict[str, Training] = {}
    for name, own in config.entrants.items():
        pace = Training(config.first_base, PACE, name, seed, config.pace, config.learning_rates[0], own)
        trials, fastest = try_rates(config, paced(pace, TRIAL, config.minutes, rows), rows)
        # Timed again with the rate that learns fastest, alone: how much a trial took depends on what else ran.
        timing = replace(pace, role=TIMING, rate=fastest.rate, settled=fastest.settled)
        best[name] = paced(timing, TRIAL, config.minutes, rows)
        yield from (pace, *trials, timing)
    longest: dict[str, Training] = {}
    for budget in config.ladder.budgets:
        longest = {name: at_budget(job, budget) for name, job in best.items()}
        yield from longest.values()
    names, settled = chosen_heads(config, longest, rows)
    chosen = [replace(best[name], settled=settled) for name in names]
    for each in (*others, *config.claim_seeds):
        repeated = {*sum(config.claims, ())} if each in config.claim_seeds else {*names}
        jobs = [at_budget(job, config.ladder.repeated) for job in chosen if job.method in repeated]
        yield from (replace(job, seed=each) for job in jobs)
    for name, rate in config.ladder.again.items():
        for budget in config.ladder.budgets:
            job = at_budget(replace(best[name], rate=rate), budget)
            seeds = (*config.seeds, *config.claim_seeds) if budget == config.ladder.repeated else (seed,)
            yield from (replace(job, role=job.role + AGAIN, seed=each) for each in seeds)
    for base in [*config.bases][1:]:
        for job in chosen:
            timing = replace(job, base=base, role=TIMING, steps=config.pace, minutes=None)
            yield timing
            yield at_budget(paced(timing, TRIAL, config.minutes, rows), config.ladder.repeated)


def paced(pace: Training, role: str, minutes: float, rows: Rows) -> Training:
    """Return a training of these minutes; its steps follow from the timed one, without which they are not settled."""
    row = rows.get(pace.name)
    per_step = row["seconds"] / row["steps"] if row else 1.0
    steps = max(1, round(60 * minutes / per_step))
    return replace(pace, role=role, steps=steps, minutes=minutes, settled=pace.settled and row is not None)


def at_budget(job: Training, budget: int) -> Training:
    assert job.minutes is not None
    return replace(job, role=role_of(budget), steps=budget * job.steps, minutes=budget * job.minutes)


def try_rates(config: Comparison, trial: Training, rows: Rows) -> tuple[list[Training], Training]:
    """Return trials of all learning rates and the one with the best validation tau, settled once all have been tried.

    Of a tie the first is best. One at an edge is followed by half or twice of it, `ladder.extensions` times.
    """
    rates, most = [*config.learning_rates], len(config.learning_rates) + config.ladder.extensions
    while True:
        trials = [replace(trial, rate=rate) for rate in rates]
        tried = {job.rate: rows[job.name]["tau"] for job in trials if job.name in rows}
        best = max(tried, key=lambda rate: tried[rate]) if tried else rates[0]
        settled, beyond = len(tried) == len(rates), {min(rates): best / 2, max(rates): best * 2}
        if not settled or best not in beyond or len(rates) == most:
            return trials, replace(trial, rate=best, settled=settled)
        rates.append(beyond[best])


def chosen_heads(config: Comparison, longest: Mapping[str, Training], rows: Rows) -> tuple[list[str], bool]:
    """Return the heads that are always chosen and the best of the others by validation tau at the longest budget."""
    settled = all(job.name in rows for job in longest.values())
    taus = {name: rows[job.name]["tau"] if job.name in rows else DIVERGED_TAU for name, job in longest.items()}
    ranked = sorted(taus, key=lambda name: -taus[name])
    best = [name for name in ranked if name not in config.ladder.always][: config.ladder.best]
    return [name for name in longest if name in (*config.ladder.always, *best)], settled


def crossed_trainings(config: Comparison, rows: Rows) -> Iterator[Training]:
    """Yield a timed training of each cell, trials of some, all cells, then further seeds and rates of single ones."""
    assert config.crossed is not None
    table = config.crossed
    first = Training(config.first_base, CROSSED_PACE, "", config.seeds[0], config.pace, config.learning_rates[0], ())
    paces = [
        replace(first, method=cell.name, own=cell.overrides, levels=cell.levels, trees=cell.trees)
        for cell in table.cells
    ]
    yield from paces
    deciding = [pace for pace in paces if all(pace.levels[key] in levels for key, levels in table.deciding.items())]
    tuned: dict[str, Training] = {}
    for pace in paces:
        if any(factors.items() <= pace.levels.items() for factors in (table.tuned_on, table.also_tuned)):
            trials, tuned[pace.method] = try_rates(
                config, paced(pace, CROSSED_TRIAL, table.trial * table.minutes, rows), rows
            )
            yield from trials
    for pace in paces:
        # The rate of its own trials, or of the cell with the same levels of all other factors.
        alike = next(one.method for one in paces if {**pace.levels, **table.tuned_on} == one.levels)
        best = tuned.get(pace.method, tuned[alike])
        cell = paced(pace, CROSSED, table.minutes, rows)
        cell = replace(cell, rate=best.rate, settled=cell.settled and best.settled)
        yield cell
        if pace in deciding:
            yield from (replace(cell, seed=each) for each in config.seeds[1:])
        if rate := table.again.get(pace.method):
            yield from (replace(cell, role=CROSSED + AGAIN, rate=rate, seed=each) for each in config.seeds)


def has_diverged(row: Row) -> bool:
    return row["tau"] == DIVERGED_TAU


def levels_of(row: Row) -> dict[str, str]:
    return {factor: row[factor] for factor in FACTORS if row.get(factor)}
