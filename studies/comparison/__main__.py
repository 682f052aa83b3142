"""The comparison of draft methods: `python -m studies.comparison [overrides]`; the keys are those of comparison.yaml.

It trains and measures what is missing, one job after the other, and writes tables and figures. Killed at any moment, it
goes on with the same command. `plan=true` prints the jobs; `hours=1.5` ends after the job with which they have passed.
"""

from __future__ import annotations

from time import monotonic

from ctcdraft.errors import run_cli
from studies.comparison import costs, measure
from studies.comparison.config import Comparison, load_config
from studies.comparison.jobs import Evaluation, Training, all_jobs, estimate_training
from studies.comparison.page import publish, write_page
from studies.comparison.store import ResultStore, seconds_of
from studies.comparison.tables import collect_raw


def main(overrides: list[str]) -> None:
    if {"-h", "--help"} & set(overrides):
        return print(__doc__)
    config = load_config(overrides)
    store = ResultStore(config.out, config.results)
    if config.plan:
        return print(describe_plan(config, store))
    refuse_changed(config, store)
    began = monotonic()
    while (name := run_next(config, store)) is not None:
        print(f"finished {name}", flush=True)
        if config.hours is not None and monotonic() - began >= 3600 * config.hours:
            return print(f"{config.hours:g} hours have passed; the same command goes on")
    costs.count_missing(config, store)
    collect_raw(config, store)
    (publish if config.publish else write_page)(store)


def run_next(config: Comparison, store: ResultStore) -> str | None:
    """Run the first missing job that can run and that no other process runs; None where there is none."""
    rows = store.rows()
    jobs = all_jobs(config, rows)
    trained = {job.name for job in jobs if isinstance(job, Training) and measure.is_trained(store, job, rows)}
    for job in jobs:
        if is_done(store, job, trained) or not job.settled or not needs_of(job) <= trained:
            continue
        with store.lock(job.name) as held:
            # Another process may have finished it since the rows were read.
            if not held or (isinstance(job, Training) and measure.is_trained(store, job, store.rows())):
                continue
            if isinstance(job, Training):
                measure.train(config, store, job)
            else:
                measure.measure(config, store, job)
            return job.name
    return None


def refuse_changed(config: Comparison, store: ResultStore) -> None:
    """Raise InputError if a job that was begun would now be made with other overrides."""
    entries = store.jobs()
    for job in all_jobs(config, store.rows()):
        if job.settled and job.name in entries:
            store.refuse_changed(job.name, entries[job.name]["overrides"], measure.overrides_of(config, store, job))


def is_done(store: ResultStore, job: Training | Evaluation, trained: set[str]) -> bool:
    return job.name in trained if isinstance(job, Training) else measure.is_measured(store, job)


def needs_of(job: Training | Evaluation) -> set[str]:
    heads = () if isinstance(job, Training) else job.heads
    return {f"{job.base}/{head.partition('@')[0]}" for head in heads}


def describe_plan(config: Comparison, store: ResultStore) -> str:
    """Return a line per job, and the estimated processor hours of what is missing.

    ~ marks an estimate from other methods, ? a job of which nothing like it is finished, and (provisional) a job whose
    learning rate, head or cell depends on jobs that are missing.
    """
    rows, entries = store.rows(), store.jobs()
    jobs = all_jobs(config, rows)
    trained = {job.name for job in jobs if isinstance(job, Training) and measure.is_trained(store, job, rows)}
    lines, left, unknown = [], 0.0, 0
    for job in jobs:
        if is_done(store, job, trained):
            lines.append(f"done      {job.name}")
            continue
        if isinstance(job, Training):
            seconds, own = estimate_training(config, job, rows)
            mark = "" if own else "~"
            what = f"{job.name}, {job.steps} steps at {job.rate:g}"
        else:
            seconds = measure.estimate_evaluation(job, seconds_of(entries, f"{job.benchmark}-{job.kind}"))
            mark, what = "", f"{job.name}, {len(job.heads) + len(job.untrained)} contestants"
        left, unknown = left + (seconds or 0.0), unknown + (seconds is None)
        hours = "?" if seconds is None else f"{mark}{seconds / 3600:.2f} h"
        long = f" (longer than {config.minutes:g} minutes)" if (seconds or 0.0) > 60 * config.minutes else ""
        lines.append(f"{hours:>8}  {what}{'' if job.settled else ' (provisional)'}{long}")
    missing = sum(not is_done(store, job, trained) for job in jobs)
    tail = f", and {unknown} jobs without an estimate" if unknown else ""
    return "\n".join([*lines, f"{missing} of {len(jobs)} jobs are missing: {left / 3600:.1f} processor hours{tail}"])


if __name__ == "__main__":
    run_cli("comparison", main)
