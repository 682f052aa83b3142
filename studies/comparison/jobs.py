"""The jobs of the comparison, in the order in which they run: what to train and to measure, given what is finished.

Which learning rate is best, which heads are chosen and which cells decide follows from finished trainings. Before these
exist, the jobs that depend on them are listed with a provisional choice and are not settled; only settled jobs run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from studies.comparison.config import FACTORS, Cell, Comparison, Overrides

DIVERGED_TAU = 0.0  # of a training whose gradients were no longer finite; every head that exists has 1 or more
TRIAL, CROSSED, CROSSED_TRIAL, PACE = "rate", "crossed", "crossed_rate", "pace"
Row = dict[str, Any]
Rows = Mapping[str, Row]  # finished trainings by the name of their job


@dataclass(frozen=True)
class Training:
    """A head to train."""

    base: str
    role: str  # rate, 1x, 2x, ..., pace, crossed_rate, crossed
    method: str
    seed: int
    steps: int
    rate: float
    own: Overrides
    settled: bool = True
    levels: Mapping[str, str] = field(default_factory=dict)  # of a cell, by factor
    trees: tuple[tuple[str, str], ...] = ()

    @property
    def head(self) -> str:
        """The name of the head in reports: ctc_gru.2x.s0, ctc_gru.rate-0.004.s0"""
        tried = f"-{self.rate:g}" if self.role in (TRIAL, CROSSED_TRIAL) else ""
        return f"{self.method}.{self.role}{tried}.s{self.seed}"

    @property
    def name(self) -> str:
        return f"{self.base}/{self.head}"

    @property
    def is_compared(self) -> bool:
        return self.role not in (TRIAL, CROSSED_TRIAL, PACE)


@dataclass(frozen=True)
class Evaluation:
    """Heads of one role and seed to measure on one benchmark: kind is replay or loop."""

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
    def group(self) -> str:
        return f"{self.role}.s{self.seed}{self.part}"

    @property
    def name(self) -> str:
        return f"{self.base}/{self.benchmark}-{self.kind}-{self.group}"


def all_jobs(config: Comparison, rows: Rows) -> list[Training | Evaluation]:
    trainings = list(ladder_trainings(config, rows))
    cells = list(crossed_trainings(config, rows)) if config.crossed is not None else []
    jobs: list[Training | Evaluation] = [*trainings, *cells, *evaluations(config, [*trainings, *cells], rows)]
    return sorted(jobs, key=lambda job: turn(config, job))


def turn(config: Comparison, job: Training | Evaluation) -> int:
    """Return a number by which jobs are sorted: a study that is stopped early has all heads and cells, at one seed.

    The evaluations of heads follow their trainings.
    """
    stages = {TRIAL: 0, "1x": 1, PACE: 2, CROSSED_TRIAL: 2, CROSSED: 2}
    stage = stages.get(job.role, 5) if job.seed == config.seeds[0] else 3
    return 2 * (stage if job.base == config.first_base else 4) + isinstance(job, Evaluation)


def ladder_trainings(config: Comparison, rows: Rows) -> Iterator[Training]:
    """Yield trials of learning rates, budget 1x of all heads, then budgets, seeds and bases of the chosen ones."""
    first, seed, *others = config.first_base, *config.seeds
    once: dict[str, Training] = {}
    trials: dict[str, list[Training]] = {}
    for name, own in config.entrants.items():
        trial = Training(first, TRIAL, name, seed, config.trial_steps, config.learning_rates[0], own)
        trials[name], rate, settled = try_rates(config, trial, rows)
        yield from trials[name]
        once[name] = Training(first, "1x", name, seed, config.steps, rate, own, settled)
    yield from once.values()
    names, settled = chosen_heads(config, once, trials, rows)
    chosen = [replace(once[name], settled=settled and once[name].settled) for name in names]
    yield from (replace(job, seed=each) for each in others for job in chosen)
    claimed = {name for claim in config.claims for name in claim}
    yield from (replace(job, seed=each) for each in config.claim_seeds for job in chosen if job.method in claimed)
    for base in [*config.bases][1:]:
        yield from (replace(job, base=base) for job in chosen)
    for budget in config.ladder.budgets:
        yield from (replace(job, role=f"{budget}x", steps=budget * config.steps) for job in chosen)


def try_rates(config: Comparison, trial: Training, rows: Rows) -> tuple[list[Training], float, bool]:
    """Return trials of all learning rates, the one with the best validation tau, and whether all have been tried.

    Of a tie the first is best. One at an edge is followed by half or twice of it, `ladder.extensions` times.
    """
    rates, most = [*config.learning_rates], len(config.learning_rates) + config.ladder.extensions
    while True:
        trials = [replace(trial, rate=rate) for rate in rates]
        tried = {job.rate: rows[job.name]["tau"] for job in trials if job.name in rows}
        best = max(tried, key=lambda rate: tried[rate]) if tried else rates[0]
        settled, beyond = len(tried) == len(rates), {min(rates): best / 2, max(rates): best * 2}
        if not settled or best not in beyond or len(rates) == most:
            return trials, best, settled
        rates.append(beyond[best])


def chosen_heads(
    config: Comparison, once: Mapping[str, Training], trials: Mapping[str, list[Training]], rows: Rows
) -> tuple[list[str], bool]:
    """Return the heads that are always chosen and the best by validation tau at 1x, in the order of the config.

    As long as heads are missing, the best are sought among the others, so that a plan does not promise too little.
    """
    settled = all(job.name in rows for job in once.values())
    known = {
        name: max((rows[job.name]["tau"] for job in ([once[name]] if settled else trials[name]) if job.name in rows),
                  default=0.0)
        for name in once
    }  # fmt: skip
    ranked = sorted(known, key=lambda name: -known[name])
    best = [name for name in ranked if settled or name not in config.ladder.always][: config.ladder.best]
    return [name for name in once if name in (*config.ladder.always, *best)], settled


def crossed_trainings(config: Comparison, rows: Rows) -> Iterator[Training]:
    """Yield a timed training of each cell, trials of each loss, all cells, then further seeds of those that decide."""
    assert config.crossed is not None
    table, rate = config.crossed, config.learning_rates[0]
    paces, jobs = {}, {}
    for cell in table.cells:
        paces[cell.name] = cell_training(config, PACE, cell, table.pace, rate)
    yield from paces.values()
    tuned: dict[str, tuple[float, bool]] = {}
    for loss in dict.fromkeys(cell.levels["objective"] for cell in table.cells):
        cell = table.tuning_cell(loss)
        steps, settled = cell_steps(config, rows, paces[cell.name])
        trial = cell_training(config, CROSSED_TRIAL, cell, max(1, round(steps * config.ladder.trial)), rate)
        trials, best, tried = try_rates(config, replace(trial, settled=settled), rows)
        yield from trials
        tuned[loss] = best, tried
    for cell in table.cells:
        steps, paced = cell_steps(config, rows, paces[cell.name])
        rate, tried = tuned[cell.levels["objective"]]
        jobs[cell.name] = replace(cell_training(config, CROSSED, cell, steps, rate), settled=paced and tried)
    yield from jobs.values()
    names, settled = deciding_cells(config, jobs, rows)
    for each in config.seeds[1:]:
        yield from (replace(jobs[name], seed=each, settled=settled and jobs[name].settled) for name in names)


def cell_training(config: Comparison, role: str, cell: Cell, steps: int, rate: float) -> Training:
    base, seed = config.first_base, config.seeds[0]
    return Training(base, role, cell.name, seed, steps, rate, cell.overrides, levels=cell.levels, trees=cell.trees)


def cell_steps(config: Comparison, rows: Rows, pace: Training) -> tuple[int, bool]:
    """Return the steps that take the minutes of a cell, and whether its steps have been timed."""
    assert config.crossed is not None
    if (row := rows.get(pace.name)) is None:
        return config.steps, False
    return max(1, round(60 * config.crossed.minutes * row["steps"] / row["seconds"])), True


def deciding_cells(config: Comparison, jobs: Mapping[str, Training], rows: Rows) -> tuple[list[str], bool]:
    """Return the best cell of each level of a factor and the best others, by validation tau of the first seed."""
    assert config.crossed is not None
    known = {name: rows[job.name]["tau"] if job.name in rows else 0.0 for name, job in jobs.items()}
    ranked = sorted(known, key=lambda name: -known[name])
    best: dict[str, str] = {}
    for name in ranked:
        best.setdefault(jobs[name].levels[config.crossed.best_of_each], name)
    others = [name for name in ranked if name not in best.values()][: config.crossed.others]
    wanted = {*best.values(), *others}
    return [name for name in jobs if name in wanted], all(job.name in rows for job in jobs.values())


def evaluations(config: Comparison, trainings: Iterable[Training], rows: Rows) -> Iterator[Evaluation]:
    """Yield replays of all compared heads, and timed loops of those at budget 1x, in groups of one role and seed."""
    groups: dict[tuple[str, str, int], list[Training]] = {}
    for job in trainings:
        if job.is_compared and not (job.name in rows and has_diverged(rows[job.name])):
            groups.setdefault((job.base, job.role, job.seed), []).append(job)
    for (_, role, seed), jobs in groups.items():
        first = role == "1x" and seed == config.seeds[0]
        yield from grouped(config, "replay", jobs, first)
        if first and config.measure.loop is not None:
            yield from grouped(config, "loop", jobs, first)


def grouped(config: Comparison, kind: str, jobs: Sequence[Training], with_untrained: bool) -> Iterator[Evaluation]:
    """Yield the evaluations of heads of one base, role and seed."""
    measure, base, role, seed = config.measure, jobs[0].base, jobs[0].role, jobs[0].seed
    nodes = ",".join(map(str, measure.nodes))
    how = measure.loop or () if kind == "loop" else ("measure=replay", f"measure.nodes=[{nodes}]")
    how += () if kind == "loop" else (f"measure.checked={measure.checked}",)
    how += measure.crossed if role == CROSSED else ()
    heads = [f"{job.head}@{tree}" for job in jobs for _, tree in job.trees] or [job.head for job in jobs]
    # Speed-ups are compared within one evaluation alone, so that one times all heads.
    most = len(heads) if kind == "loop" else measure.heads
    untrained = (*measure.untrained, *config.bases[base].untrained)
    # transformers' own generation does not run in our decoding loop, so it cannot be replayed.
    others = [one for one in untrained if kind == "loop" or "transformers_" not in one] * with_untrained
    settled = all(job.settled for job in jobs)
    for benchmark, own in measure.benchmarks.items():
        for start in range(0, len(heads), most):
            part = f".{start // most}" if len(heads) > most else ""
            overrides = (*config.bases[base].base, *own, *measure.evaluate, "decoding=greedy", *how)
            beside = tuple(others) if start == 0 else ()
            chunk = tuple(heads[start : start + most])
            yield Evaluation(base, kind, benchmark, role, seed, part, chunk, beside, overrides, settled)


def has_diverged(row: Row) -> bool:
    return row["tau"] == DIVERGED_TAU


def levels_of(row: Row) -> dict[str, str]:
    return {factor: row[factor] for factor in FACTORS if row.get(factor)}
