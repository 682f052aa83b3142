"""Bayesian search for the run with the best acceptance length, by optuna.

Every trial is train.py in a process of its own, which sees one GPU. A trial that falls behind the median of the others
is stopped by SIGTERM, which any run answers by saving its state. The same command again finishes the trials that were
killed, tries those that failed once more, and adds none to a finished search.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ctcdraft.devices import VISIBLE, end_with_parent, leased_device, visible_devices
from ctcdraft.errors import InputError
from ctcdraft.progress import RemainingTime
from ctcdraft.training.run_lock import LOCK_FILE
from ctcdraft.training.sweep import forget_failure, read_metrics, write_failure, write_table
from ctcdraft.training.trials import SearchSpace, TrialRegistry, choose_values

POLL_SECONDS = 0.2
# Exit statuses of a process that was interrupted or killed: by itself, and as shells and containers report it.
KILLED = {status for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM) for status in (-number, 128 + number)}


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
        trials: how many shall have ended with a tau, those of earlier calls included.
    """
    optuna = import_optuna()
    run.mkdir(parents=True, exist_ok=True)
    with exclusive_search(run):
        backend = optuna.storages.journal.JournalFileBackend(str(run / "study.log"))
        study = optuna.create_study(
            study_name="ctcdraft",
            storage=optuna.storages.JournalStorage(backend),
            load_if_exists=True,
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        )
        # With the same seed again the values of the first call would be drawn again.
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.get_trials(deepcopy=False)))
        registry = TrialRegistry(study, command, optuna.trial.TrialState)
        begun = [optuna.trial.Trial(study, trial._trial_id) for trial in registry.continued(trials)]
        left = max(trials - registry.ended, len(begun))
        runner = TrialRunner(registry, command, run, space, RemainingTime(left, jobs), log, clock)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(runner, [*begun, *[None] * (left - len(begun))]))
        taus: list[Any] = [trial.value for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])]
    if runner.unfinished:
        best = f"best tau {max(taus):.3f}" if taus else f"none of {trials} trials finished"
        names = ", ".join(map(str, sorted(runner.unfinished)))
        raise InputError(
            f"{best}; of the trials, {names} failed or were killed, the first log is "
            f"{run / str(min(runner.unfinished))}.log; the same command tries them again"
        )
    return max(taus, default=0.0)


def import_optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError as error:
        raise InputError("a search needs optuna, which is not installed; pip install 'ctcdraft[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextlib.contextmanager
def exclusive_search(run: Path) -> Iterator[None]:
    """Hold the lock on a search: trials that have begun and not ended would be taken for killed ones."""
    try:
        with FileLock(run / "study.lock", timeout=0):
            yield
    except Timeout as error:
        raise InputError(f"{run} is searched by another process; stop it, or choose another run=") from error


@dataclass
class TrialRunner:
    """Runs one trial after another, each on a GPU of its own, and tells the study how it ended."""

    registry: TrialRegistry
    command: Sequence[str]
    run: Path
    space: SearchSpace
    remaining: RemainingTime
    log: Callable[[str], None]
    clock: Callable[[], float]
    unfinished: list[int] = field(default_factory=list)  # trials of this call that failed or were killed

    def __post_init__(self) -> None:
        chosen = any(argument.startswith(("device=", "base.device_map=")) for argument in self.command)
        self.devices = [] if chosen else visible_devices()

    def __call__(self, begun: Any) -> None:
        """Run a trial that has begun in an earlier call, or a new one if it is None."""
        study, began = self.registry.study, self.clock()
        trial = study.ask() if begun is None else begun
        overrides = choose_values(trial, self.space, self.run)
        name, folder = f"trial {trial.number}: {' '.join(overrides)}", self.run / str(trial.number)
        with self.registry.exclusive(trial) as equal, leased_device(self.devices) as device:
            if equal is not None:
                study.tell(trial, equal.value if equal.state.name == "COMPLETE" else None, state=equal.state)
                self.log(f"{name}  is trial {equal.number} again and was not run; {self.remaining.run_ended(None)}")
                return
            wait_for_end(folder)
            status, tau, pruned = run_trial(self.arguments(folder, overrides), folder, trial, overrides, device)
            failed = tau is None or (status != 0 and not pruned)
            if failed and status not in KILLED:
                study.tell(trial, state=self.registry.states.FAIL)
            elif not failed:  # a killed trial stays begun, and the next call continues it
                study.tell(trial, state=self.registry.states.PRUNED) if pruned else study.tell(trial, tau)
        if failed:
            self.unfinished.append(trial.number)
            reason = f"status {status}, see {folder}.log"
            write_failure(folder, dict(text.lstrip("+").split("=", 1) for text in overrides), reason)
            ended = f"  failed: {reason}; {self.remaining.run_ended(None)}"
        else:
            forget_failure(folder)
            early = " (stopped early)" if pruned else ""
            ended = f"  tau {tau:.3f}{early}; {self.remaining.run_ended(self.clock() - began)}"
        self.log(f"{name}{ended}")
        write_table(self.run)

    def arguments(self, folder: Path, overrides: Sequence[str]) -> list[str]:
        """Return the command of a trial, or the one that continues it from its newest checkpoint."""
        if any(folder.glob("resume-*.pt")):
            given = [argument for argument in self.command[2:] if argument.startswith(("trust=", "timeout_minutes="))]
            return [*self.command[:2], f"resume={folder}", *given]
        again = ["overwrite=true"] if (folder / "config.yaml").exists() else []  # killed before its first checkpoint
        return [*self.command, *overrides, f"run={folder}", *again]


def wait_for_end(folder: Path) -> None:
    """Wait for a process that an earlier, killed search has left training in this folder, so that it is continued."""
    if (folder / LOCK_FILE).exists():
        with FileLock(folder / LOCK_FILE):
            pass


def run_trial(
    command: Sequence[str], folder: Path, trial: Any, overrides: Sequence[str] = (), device: str | None = None
) -> tuple[int, float | None, bool]:
    """Run a trial to its end, or until the pruner stops it.

    Returns its exit status, its best tau (None without a validation), and whether it was stopped early.

    Args:
        overrides: the values that the search chose, which become the run's name in W&B.
        device: the GPU that the trial sees; None: all of this process.
    """
    group = folder.parent.name
    variables = {"WANDB_RUN_GROUP": group, **os.environ, "WANDB_NAME": " ".join([f"{group}/{folder.name}", *overrides])}
    variables |= {} if device is None else {VISIBLE: device}
    reported, pruned = set(trial.study.trials[trial.number].intermediate_values), False
    with Path(f"{folder}.log").open("a") as log:  # of a trial that is continued, the log too
        log.write(shlex.join(command) + "\n")
        log.flush()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=variables, preexec_fn=end_with_parent
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                for step, tau in read_validations(folder):
                    if step in reported:
                        continue
                    reported.add(step)
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
