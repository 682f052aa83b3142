"""The comparison of draft methods: `python -m studies.comparison [overrides]`; the keys are those of comparison.yaml.

It trains and measures what is missing, one job after the other, and writes tables and figures. Killed at any moment, it
goes on with the same command. A job that fails is left out until the next start, and the exit status is then 1.
`plan=true` prints the jobs; `hours=1.5` ends when no missing job is estimated to fit in what is left of them;
`publish=true` runs none and puts what is finished into the tables and figures in `results`.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from math import inf
from time import monotonic

from ctcdraft.errors import InputError, run_cli
from studies.comparison import costs, measure
from studies.comparison.config import Comparison, load_config
from studies.comparison.jobs import Evaluation, Training
from studies.comparison.page import publish, write_page
from studies.comparison.schedule import all_jobs
from studies.comparison.store import ResultStore
from studies.comparison.tables import rules_of

UNKNOWN = 900.0  # seconds that must be left for an evaluation unlike those finished


def main(overrides: list[str]) -> None:
    if {"-h", "--help"} & set(overrides):
        return print(__doc__)
    config = load_config(overrides)
    store = ResultStore(config.out, config.results)
    refuse_changed(config, store)
    if config.plan:
        return print(describe_plan(config, store))
    if config.publish:
        return publish(store, rules_of(config, store))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and the running job with it
    end, failed = monotonic() + 3600 * (inf if config.hours is None else config.hours), set[str]()
    while (name := run_next(config, store, failed, end)) is not None:
        print(f"{'failed' if name in failed else 'finished'} {name}", flush=True)
        costs.count_missing(config, store)  # now, while the head is there
        if monotonic() >= end:
            print(f"{config.hours:g} hours have passed; the same command goes on")
            break
    else:
        costs.count_missing(config, store, wait=True)
        write_page(store, rules_of(config, store))
    if failed:
        raise InputError(f"{len(failed)} jobs failed: {', '.join(sorted(failed))}; the same command tries them again")


def run_next(config: Comparison, store: ResultStore, failed: set[str], end: float = inf) -> str | None:
    """Run the first missing job that can run and that no other process runs; None where there is none.

    One that fails is added to `failed`, whose jobs are not run. Jobs estimated to last beyond `end`, on the clock of
    monotonic(), are not begun. What is timed waits until no other process runs a job, and these wait until it ends.
    """
    rows, measured = store.rows(), store.measured()
    jobs = all_jobs(config, rows)
    done = measure.finished_jobs(store, jobs, rows)
    for job in jobs:
        needs = measure.needed_heads(job) if isinstance(job, Evaluation) else set()
        if job.name in done | failed or not job.settled or not needs <= done:
            continue
        takes = measure.estimate(job, measured) or (UNKNOWN if isinstance(job, Evaluation) else 0.0)
        if takes and monotonic() + takes > end:
            continue
        with ExitStack() as locks:
            locks.enter_context(store.lock("machine", wait=True, shared=not job.is_timed))
            held = locks.enter_context(store.lock(job.name))
            # The wait may have been long, and another process may have finished it since the rows were read.
            if not held or (takes and monotonic() + takes > end):
                continue
            if job.name in measure.finished_jobs(store, jobs, store.rows()):
                continue
            try:
                if isinstance(job, Training):
                    measure.train(config, store, job)
                else:
                    measure.measure(config, store, job)
            except InputError as error:
                print(f"{job.name}: {error}", flush=True)
                failed.add(job.name)
            return job.name
    return None


def refuse_changed(config: Comparison, store: ResultStore) -> None:
    """Raise InputError if a job that was begun or is finished would now be made with other overrides."""
    entries, rows = store.jobs(), store.rows()
    finished = rows | store.measured()
    for job in all_jobs(config, rows):
        overrides = measure.overrides_of(config, store, job)
        if job.settled and job.name in entries:
            store.refuse_changed(job.name, entries[job.name]["overrides"], overrides)
        if job.settled and job.name in finished:
            store.refuse_other(job.name, finished[job.name], overrides)


def describe_plan(config: Comparison, store: ResultStore) -> str:
    """Return a line per job, and the estimated processor hours of what is missing.

    ? marks a job that takes about a minute or of which nothing like it is finished, (provisional) one whose steps,
    learning rate or head depends on jobs that are missing.
    """
    rows, measured = store.rows(), store.measured()
    jobs = all_jobs(config, rows)
    done = measure.finished_jobs(store, jobs, rows)
    lines, left, unknown = [], 0.0, 0
    for job in jobs:
        if job.name in done:
            lines.append(f"done      {job.name}")
            continue
        seconds = measure.estimate(job, measured)
        if isinstance(job, Training):
            what = f"{job.steps} steps at {job.rate:g}"
        else:
            what = f"{len(job.heads) + len(job.untrained)} contestants"
        left, unknown = left + (seconds or 0.0), unknown + (seconds is None)
        hours = "?" if seconds is None else f"{seconds / 3600:.2f} h"
        lines.append(f"{hours:>8}  {job.name}, {what}{'' if job.settled else ' (provisional)'}")
    tail = f", and {unknown} jobs without an estimate" if unknown else ""
    lines.append(f"{len(jobs) - len(done)} of {len(jobs)} jobs are missing: {left / 3600:.1f} processor hours{tail}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cli("comparison", main)
