"""A search for the best tau: what a trial learns decides what is tried next. It knows command lines; no config.

Every trial is train.py in a process of its own. A trial that falls behind the others is asked to stop as any run may
be, by SIGTERM, so its state stays and resume= could go on with it.
"""

from __future__ import annotations

import contextlib
import json
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
from ctcdraft.training.progress import RemainingTime
from ctcdraft.training.sweep import write_table

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Interval:
    """Numbers from least to most; whole ones, or any."""

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
    """Run `trials` trials, `jobs` side by side, into run/0, run/1, ...; returns the best tau.

    command: what trains, without what is searched. What was tried is in run/study.log: called again, the search goes
    on from there. tau of every probe is reported, and a trial below the median of the others at that step is stopped.
    Values that were tried before by the same command are not tried again: their tau is known.
    """
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    run.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(run / "study.log")))
    study = optuna.create_study(
        study_name="ctcdraft", storage=storage, load_if_exists=True, direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed), pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )  # fmt: skip

    remaining, tries = RemainingTime(trials, jobs), TrialRegistry(study, command)

    def one(number: int) -> None:
        trial = study.ask()
        try:
            overrides = [f"{key}={suggest_value(trial, key, space[key])}" for key in space]
        except ValueError as error:
            raise InputError(
                f"{run / 'study.log'} holds a search among other values ({error}); choose another run="
            ) from error
        folder, began = run / str(trial.number), clock()
        state = optuna.trial.TrialState
        with tries.of(trial) as before:
            if before is not None:
                study.tell(trial, before.value if before.state == state.COMPLETE else None, state=before.state)
                line = f"trial {trial.number}: {' '.join(overrides)}  is trial {before.number} again and was not run"
                log(f"{line}; {remaining.run_ended(None)}")
                return
            status, tau, pruned = run_trial([*command, *overrides, f"run={folder}"], folder, trial, overrides)
            if tau is None or (status != 0 and not pruned):
                study.tell(trial, state=state.FAIL)
                line = f"trial {trial.number} failed with status {status}: {' '.join(overrides)}; see {folder}.log"
                log(f"{line}; {remaining.run_ended(None)}")
                return
            study.tell(trial, state=state.PRUNED) if pruned else study.tell(trial, tau)
        line = f"trial {trial.number}: {' '.join(overrides)}  tau {tau:.3f}{' (stopped early)' if pruned else ''}"
        log(f"{line}; {remaining.run_ended(clock() - began)}")
        write_table(run)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, range(trials)))
    done = [trial.value for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])]
    if not done:
        raise InputError(f"none of {trials} trials came to its end; the first log is {run / '0.log'}")
    return max(done)


class TrialRegistry:
    """The trials of a study by what they tried: a command and values. Equal trials run one after another."""

    def __init__(self, study: Any, command: Sequence[str]) -> None:
        self.study = study
        self.command = shlex.join(command)
        self.here: set[int] = set()  # of this search: what failed in an earlier one may have been mended
        self._locks: dict[str, threading.Lock] = {}

    @contextlib.contextmanager
    def of(self, trial: Any) -> Iterator[Any]:
        """Within, no equal trial runs; yields the one that ended before, or None."""
        with self._locks.setdefault(repr(sorted(trial.params.items())), threading.Lock()):
            before = next(
                (one for one in self.study.get_trials(deepcopy=False) if self.has_known_outcome(one, trial)), None
            )
            if before is None:  # so that what is known names the trial that ran
                trial.set_user_attr("command", self.command)
                self.here.add(trial.number)
            yield before

    def has_known_outcome(self, one: Any, trial: Any) -> bool:
        """Return whether what came of one says what would come of the other."""
        usable = one.state.name in ("COMPLETE", "PRUNED") or (one.state.name == "FAIL" and one.number in self.here)
        equal = one.params == trial.params and one.user_attrs.get("command") == self.command
        return usable and equal and one.number != trial.number


def run_trial(
    command: Sequence[str], folder: Path, trial: Any, overrides: Sequence[str] = ()
) -> tuple[int, float | None, bool]:
    """One trial to its end, or to where the pruner ends it: exit status, best tau, whether it was stopped. overrides:
    what
    the search chose, by which W&B calls it."""
    group = folder.parent.name
    named = {"WANDB_RUN_GROUP": group, **os.environ, "WANDB_NAME": " ".join([f"{group}/{folder.name}", *overrides])}
    reported, pruned = 0, False
    with Path(f"{folder}.log").open("w") as log:
        log.write(shlex.join(command) + "\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=named)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                for step, tau in read_probes(folder)[reported:]:
                    reported += 1
                    trial.report(tau, step)
                    if not pruned and trial.should_prune():
                        pruned = True
                        process.terminate()
        finally:
            process.terminate()
    taus = [tau for _, tau in read_probes(folder)]
    # It may have come to its end before it heard that it should stop.
    return process.wait(), max(taus, default=None), pruned and process.returncode != 0


def read_probes(folder: Path) -> list[tuple[int, float]]:
    """(step, tau) of every probe so far."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                figures = json.loads(line)
                if "tau" in figures:
                    found.append((figures["step"], figures["tau"]))
    return found


def suggest_value(trial: Any, key: str, choice: Interval | Sequence[Any]) -> Any:
    if not isinstance(choice, Interval):
        return trial.suggest_categorical(key, list(choice))
    if choice.whole:
        return trial.suggest_int(key, int(choice.least), int(choice.most), log=choice.logarithmic)
    return trial.suggest_float(key, choice.least, choice.most, log=choice.logarithmic)


def load_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise InputError("a search needs optuna, which is not installed; pip install 'ctcdraft[sweep]'") from error
    return optuna
