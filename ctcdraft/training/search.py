"""Bayesian search for the run with the best acceptance length, by optuna.

Every trial is train.py in a process of its own. A trial that falls behind the median of the others is stopped by
SIGTERM, which any run answers by saving its state, so that resume= could continue it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.renamed import current_argument
from ctcdraft.training.sweep import RemainingTime, read_metrics, write_table

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Interval:
    """Numbers from `least` to `most`, both included; whole: integers only."""

    least: float
    most: float
    logarithmic: bool
    whole: bool


SearchSpace = Mapping[str, Interval | Sequence[Any]]


def run_search(
    command: Sequence[str],
    run: Path,
    space: SearchSpace,
    trials: int,
    jobs: int,
    seed: int,
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Run `trials` trials, `jobs` at a time, into run/0, run/1, ...; return the best tau.

    All trials are kept in run/study.log, so that the same call continues a search. Values that the same command tried
    before are not run again: their tau is known.

    Args:
        command: the training command, without the searched keys.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise InputError("a search needs optuna, which is not installed; pip install 'ctcdraft[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    run.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(run / "study.log")))
    study = optuna.create_study(
        study_name="ctcdraft", storage=storage, load_if_exists=True, direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed), pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )  # fmt: skip
    remaining, registry, states = RemainingTime(trials, jobs), TrialRegistry(study, command), optuna.trial.TrialState

    def run_one(number: int) -> None:
        trial = study.ask()
        overrides = choose_values(trial, space, run)
        name, folder, chosen, began = f"trial {trial.number}", run / str(trial.number), " ".join(overrides), clock()
        with registry.exclusive(trial) as equal:
            if equal is not None:
                study.tell(trial, equal.value if equal.state == states.COMPLETE else None, state=equal.state)
                again = f"{name}: {chosen}  is trial {equal.number} again and was not run"
                return log(f"{again}; {remaining.run_ended(None)}")
            status, tau, pruned = run_trial([*command, *overrides, f"run={folder}"], folder, trial, overrides)
            if tau is None or (status != 0 and not pruned):
                study.tell(trial, state=states.FAIL)
                failed = f"{name} failed with status {status}: {chosen}; see {folder}.log"
                return log(f"{failed}; {remaining.run_ended(None)}")
            study.tell(trial, state=states.PRUNED) if pruned else study.tell(trial, tau)
        ended = f"{name}: {chosen}  tau {tau:.3f}{' (stopped early)' if pruned else ''}"
        log(f"{ended}; {remaining.run_ended(clock() - began)}")
        write_table(run)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, range(trials)))
    taus: list[Any] = [trial.value for trial in study.get_trials(states=[states.COMPLETE])]
    if not taus:
        raise InputError(f"none of {trials} trials finished; the first log is {run / '0.log'}")
    return max(taus)


class TrialRegistry:
    """Trials of a study by command and values. Equal trials run one after another, so the second finds the first."""

    def __init__(self, study: Any, command: Sequence[str]) -> None:
        self.study = study
        self.command = shlex.join(command)
        self.started: set[int] = set()  # trials of this call: the cause of an earlier failure may be gone
        self._locks: dict[str, threading.Lock] = {}

    @contextlib.contextmanager
    def exclusive(self, trial: Any) -> Iterator[Any]:
        """Yield the equal trial whose result is known and would repeat, or None; within, no equal trial runs."""

        def predicts(other: Any) -> bool:
            failed = other.state.name == "FAIL" and other.number in self.started
            recorded = [current_argument(override) for override in shlex.split(other.user_attrs.get("command", ""))]
            equal = present_values(other) == present_values(trial) and shlex.join(recorded) == self.command
            return equal and other.number != trial.number and (failed or other.state.name in ("COMPLETE", "PRUNED"))

        with self._locks.setdefault(repr(sorted(trial.params.items())), threading.Lock()):
            equal = next(filter(predicts, self.study.get_trials(deepcopy=False)), None)
            if equal is None:  # a trial that is not run gets no command, so later ones refer to the one that ran
                trial.set_user_attr("command", self.command)
                self.started.add(trial.number)
            yield equal


def present_values(trial: Any) -> set[str]:
    """Return the values of a trial by present names of keys and options: a study may be older than a renaming."""
    return {current_argument(f"{key}={value}") for key, value in trial.params.items()}


def run_trial(
    command: Sequence[str], folder: Path, trial: Any, overrides: Sequence[str] = ()
) -> tuple[int, float | None, bool]:
    """Run a trial to its end, or until the pruner stops it.

    Returns its exit status, its best tau (None without a validation), and whether it was stopped early.

    Args:
        overrides: the values that the search chose, which become the run's name in W&B.
    """
    group = folder.parent.name
    names = {"WANDB_RUN_GROUP": group, **os.environ, "WANDB_NAME": " ".join([f"{group}/{folder.name}", *overrides])}
    reported, pruned = 0, False
    with Path(f"{folder}.log").open("w") as log:
        log.write(shlex.join(command) + "\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=names)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                for step, tau in read_validations(folder)[reported:]:
                    reported += 1
                    trial.report(tau, step)
                    if not pruned and trial.should_prune():
                        pruned = True
                        process.terminate()
        finally:
            process.terminate()
    taus = [tau for _, tau in read_validations(folder)]
    # Status 0: the run ended before the signal reached it, and its tau is final.
    return process.wait(), max(taus, default=None), pruned and process.returncode != 0


def read_validations(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["tau"]) for line in read_metrics(folder) if "tau" in line]


def choose_values(trial: Any, space: SearchSpace, run: Path) -> list[str]:
    """Return the overrides of a trial; raise InputError where the study holds other values of the same keys."""

    def suggested(key: str, values: Interval | Sequence[Any]) -> Any:
        if not isinstance(values, Interval):
            return trial.suggest_categorical(key, list(values))
        suggest = trial.suggest_int if values.whole else trial.suggest_float
        return suggest(key, values.least, values.most, log=values.logarithmic)

    try:
        return [f"{key}={suggested(key, values)}" for key, values in space.items()]
    except ValueError as error:
        raise InputError(f"{run / 'study.log'} is a search over other values ({error}); choose another run=") from error
