"""Bayesian search over the keys of train.py, for the best acceptance length (tau) in validation.

    python sweep.py trials=20 experiment=demo run=runs/search \
        'drafter.frames=range(4,9)' 'trainer.learning_rate=tag(log,interval(1e-3,1e-2))'

Keys and ranges are written as for `train.py -m`, which tries every combination instead. trials= is the number of runs,
jobs= how many run at the same time, search_seed= the seed of the sampler.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ctcdraft.config.search_arguments import SearchArguments
from ctcdraft.errors import run_cli
from ctcdraft.io import refuse_unwritable
from ctcdraft.training.search import run_search


def main(arguments: list[str]) -> float:
    search = SearchArguments.parse(arguments)
    refuse_unwritable(search.run, "run")
    search.refuse_wrong_keys()
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *search.fixed]
    trials, jobs, seed = (search.options[key] for key in ("trials", "jobs", "search_seed"))
    tau = run_search(command, search.run, search.space, trials, jobs, seed)
    print(f"best tau {tau:.3f}; the table is {search.run / 'sweep.md'}")
    return tau


if __name__ == "__main__":
    try:
        run_cli("sweep.py", main)
    except KeyboardInterrupt:
        print("sweep.py: stopped by Ctrl-C; the same command continues with the finished trials", file=sys.stderr)
        raise SystemExit(130) from None
