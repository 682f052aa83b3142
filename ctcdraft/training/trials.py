"""Trials of a search as optuna's study keeps them: which have ended, which go on, and which are equal."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.renamed import current_argument


@dataclass(frozen=True)
class Interval:
    """Numbers from `least` to `most`, both included; whole: integers only."""

    least: float
    most: float
    logarithmic: bool
    whole: bool


SearchSpace = Mapping[str, Interval | Sequence[Any]]


class TrialRegistry:
    """Trials of a study by command and values. Equal trials run one after another, so the second finds the first."""

    def __init__(self, study: Any, command: Sequence[str], states: Any) -> None:
        self.study = study
        self.command = shlex.join(command)
        self.states = states  # optuna's enumeration
        self.started: set[int] = set()  # trials of this call: the cause of an earlier failure may be gone
        self._locks: dict[str, threading.Lock] = {}

    def trials(self, *states: Any) -> list[Any]:
        """Return the trials of this command in one of these states, by number."""
        found = self.study.get_trials(deepcopy=False, states=states)
        return [trial for trial in found if recorded_command(trial) == self.command]

    @property
    def ended(self) -> int:
        """The number of trials of this command that have a tau."""
        return len(self.trials(self.states.COMPLETE, self.states.PRUNED))

    def continued(self, most: int) -> list[Any]:
        """Return the trials that have begun and not ended, and queue the values of failed ones, up to `most` in all."""
        begun = self.trials(self.states.RUNNING)
        room = most - self.ended - len(begun) - len(self.study.get_trials(deepcopy=False, states=[self.states.WAITING]))
        known = self.trials(self.states.COMPLETE, self.states.PRUNED, self.states.RUNNING)
        failed = {repr(trial.params): trial for trial in self.trials(self.states.FAIL)}
        for trial in list(failed.values())[: max(room, 0)]:
            if all(present_values(trial) != present_values(other) for other in known):
                self.study.enqueue_trial(trial.params)
        return begun

    @contextlib.contextmanager
    def exclusive(self, trial: Any) -> Iterator[Any]:
        """Yield the equal trial whose result is known and would repeat, or None; within, no equal trial runs."""

        def predicts(other: Any) -> bool:
            failed = other.state == self.states.FAIL and other.number in self.started
            ran = failed or other.state in (self.states.COMPLETE, self.states.PRUNED)
            return ran and other.number != trial.number and present_values(other) == present_values(trial)

        with self._locks.setdefault(repr(sorted(trial.params.items())), threading.Lock()):
            trial.set_user_attr("command", self.command)
            # Of trials that are equal the first one ran: later ones refer to it.
            equal = next(filter(predicts, self.trials(*self.states)), None)
            if equal is None:
                self.started.add(trial.number)
            yield equal


def recorded_command(trial: Any) -> str:
    """Return the command of a trial by present names of keys and options."""
    return shlex.join(current_argument(text) for text in shlex.split(trial.user_attrs.get("command", "")))


def present_values(trial: Any) -> set[str]:
    """Return the values of a trial by present names of keys and options: a study may be older than a renaming."""
    return {current_argument(f"{key}={value}") for key, value in trial.params.items()}


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
