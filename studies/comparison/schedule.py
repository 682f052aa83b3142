"""All jobs of the comparison in the order in which they run, and the evaluations of its heads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from studies.comparison.config import Comparison
from studies.comparison.jobs import (
    AGAIN,
    CELLS,
    CROSSED,
    CROSSED_PACE,
    CROSSED_TRIAL,
    PACE,
    REPLAY,
    TIMING,
    TRIAL,
    Evaluation,
    Rows,
    Training,
    crossed_trainings,
    has_diverged,
    ladder_trainings,
    role_of,
)


def all_jobs(config: Comparison, rows: Rows) -> list[Training | Evaluation]:
    trainings = list(ladder_trainings(config, rows))
    cells = list(crossed_trainings(config, rows)) if config.crossed is not None else []
    jobs: list[Training | Evaluation] = [*trainings, *cells, *evaluations(config, [*trainings, *cells], rows)]
    return sorted(jobs, key=lambda job: turn(config, job))


def turn(config: Comparison, job: Training | Evaluation) -> tuple[int, int]:
    """Return by what jobs are sorted, so that a study that is stopped early has what matters most.

    Rates, the longest budget, the crossed table, further seeds, further bases, shorter budgets, which only say whether
    heads have converged. Within a stage, an evaluation runs as soon as its heads are trained, so that few heads are
    lost with `out`; trainings that run alone come before the other trainings, which would wait for each of them.
    """
    rates, longest, crossed, seeds, bases, shorter = range(6)
    stages = {PACE: rates, TRIAL: rates, TIMING: longest, role_of(config.ladder.budgets[-1]): longest}
    stages |= dict.fromkeys((CROSSED_PACE, CROSSED_TRIAL, CROSSED), crossed)
    stage = stages.get(job.role, shorter) if job.seed == config.seeds[0] else seeds
    stage = stage if job.base == config.first_base else bases
    return stage, 0 if isinstance(job, Evaluation) else 1 if job.is_timed else 2


def main_role(config: Comparison, base: str) -> str:
    """Return the budget whose heads are timed: the longest one; on further bases there is only one."""
    return role_of(config.ladder.budgets[-1] if base == config.first_base else config.ladder.repeated)


def evaluations(config: Comparison, trainings: Iterable[Training], rows: Rows) -> Iterator[Evaluation]:
    """Yield replays of all compared heads, and timed loops of those at the longest budget, by role and seed."""
    groups: dict[tuple[str, str, int], list[Training]] = {}
    for job in trainings:
        if job.is_compared:
            groups.setdefault((job.base, job.role, job.seed), []).append(job)
    for (base, role, seed), jobs in groups.items():
        first = role == main_role(config, base) and seed == config.seeds[0]
        lost = {job.head for job in jobs if job.name in rows and has_diverged(rows[job.name])}
        for kind in (REPLAY, *(config.measure.loops if first else ())):
            yield from grouped(config, kind, jobs, first, lost)
        again = [job for job in jobs if job.method in config.measure.again and first and base == config.first_base]
        for kind in config.measure.loops if again else ():
            yield from (replace(one, kind=kind + AGAIN) for one in grouped(config, kind, again, False, lost))


def grouped(
    config: Comparison, kind: str, jobs: Sequence[Training], with_untrained: bool, lost: Collection[str]
) -> Iterator[Evaluation]:
    """Yield the evaluations of heads of one base, role and seed, without those whose training was `lost`."""
    measure, base, role, seed = config.measure, jobs[0].base, jobs[0].role, jobs[0].seed
    nodes, timed = ",".join(map(str, measure.nodes)), kind != REPLAY
    replayed = ("measure=replay", f"measure.nodes=[{nodes}]", f"measure.checked={measure.checked}")
    fewer = measure.timed if timed else measure.crossed if role in CELLS else {}
    heads = [f"{job.head}@{tree}" for job in jobs for _, tree in job.trees]
    heads = heads or [f"{job.head}{tree}" for job in jobs for tree in ("", *further_trees(config, job))]
    # Speed-ups are compared within one evaluation alone, so that one times all heads.
    most = len(heads) if timed else measure.heads
    untrained = (*measure.untrained, *config.bases[base].untrained)
    # transformers' own generation does not run in our decoding loop, so it cannot be replayed.
    others = [one for one in untrained if timed or "transformers_" not in one] * with_untrained
    settled = all(job.settled for job in jobs)
    for benchmark, own in measure.benchmarks.items():
        for start in range(0, len(heads), most):
            part = f".{start // most}" if len(heads) > most else ""
            how = (*(measure.loops[kind] if timed else replayed), *fewer.get(benchmark, ()))
            overrides = (*config.bases[base].base, *own, *measure.evaluate, "decoding=greedy", *how)
            beside = tuple(others) if start == 0 else ()
            # Left out of its part, not before: the other parts stay as they are.
            chunk = tuple(head for head in heads[start : start + most] if head.partition("@")[0] not in lost)
            if chunk:
                yield Evaluation(base, kind, benchmark, role, seed, part, chunk, beside, overrides, settled)


def further_trees(config: Comparison, job: Training) -> list[str]:
    return [f"@{tree}" for tree in config.measure.trees.get(job.method, ())]
