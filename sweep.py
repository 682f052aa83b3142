"""Bayesian search over the keys of train.py, for the best acceptance length (tau) in validation.

    python sweep.py trials=20 experiment=demo run=runs/search \
        'drafter.frames=range(4,9)' 'trainer.learning_rate=tag(log,interval(1e-3,1e-2))'

Keys and ranges are written as for `train.py -m`, which tries every combination instead. trials= is the number of runs,
jobs= how many run at the same time, each on a GPU of its own, search_seed= the seed of the sampler. The same command
again finishes the search; more trials= add to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from ctcdraft.config.cli import compose_config, config_error
from ctcdraft.config.command_line import parse_override, quote_paths
from ctcdraft.errors import InputError, check_int, run_cli
from ctcdraft.io import refuse_unwritable
from ctcdraft.training.search import run_search
from ctcdraft.training.trials import Interval

OWN_KEYS = {"trials": 20, "jobs": 1, "search_seed": 0}


def main(arguments: list[str]) -> float | None:
    if {"--help", "-h"} & {*arguments}:
        print(__doc__)
        return None
    search = SearchArguments.parse(arguments)
    refuse_unwritable(search.run, "run")
    search.refuse_wrong_keys()
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *search.fixed]
    trials, jobs, seed = (search.options[key] for key in OWN_KEYS)
    tau = run_search(command, search.run, search.space, trials, jobs, seed)
    print(f"best tau {tau:.3f}; the table is {search.run / 'sweep.md'}")
    return tau


@dataclass
class SearchArguments:
    """Arguments of a search."""

    run: Path = Path("runs/search")  # every trial is a run in it
    options: dict[str, int] = field(default_factory=lambda: dict(OWN_KEYS))
    fixed: list[str] = field(default_factory=list)  # overrides of train.py that all trials share
    space: dict[str, Any] = field(default_factory=dict)  # values of each searched key, with the key's + if it has one

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Return what a command line asks for; raise InputError for what train.py would refuse in a trial."""
        parsed = cls()
        for text in quote_paths(arguments, searched=True):
            override = parse_override(text)
            if override is None:
                raise InputError(f"{text} is no key=value that Hydra can parse; train.py --cfg job prints all keys")
            key = override.key_or_group
            if key in OWN_KEYS:
                parsed.options[key] = check_int(override.value(), key, least=0 if key == "search_seed" else 1)
            elif key == "run":
                parsed.run = Path(str(override.value()))
            elif override.is_sweep_override():
                parsed.space[text.partition("=")[0]] = search_values(override)
            else:
                parsed.fixed.append(text)
        if not parsed.space:
            raise InputError("nothing is searched; give a key a range, as in 'drafter.frames=range(4,9)'")
        return parsed

    def refuse_wrong_keys(self) -> None:
        """Raise InputError where train.py's config cannot be composed with a value of a list or an end of a range."""
        tried = {
            key: [values.least, values.most] if isinstance(values, Interval) else values
            for key, values in self.space.items()
        }
        first = {key: values[0] for key, values in tried.items()}
        # One key at a time, the others at their first value: there may be too many combinations.
        for searched in (first | {key: value} for key, values in tried.items() for value in values):
            try:
                compose_config("train", *self.fixed, *(f"{key}={value}" for key, value in searched.items()))
            except Exception as error:
                if (sentence := config_error(error, "train", OWN_KEYS)) is None:
                    raise
                raise InputError(sentence) from error


def search_values(override: Override) -> Interval | list[str]:
    """Return the values of choice(..) or a,b, or the bounds of range(..) or interval(..)."""
    value: Any = override.value()
    key = override.key_or_group
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        return search_interval(key, value.start, value.end, "log" in value.tags, whole=False)
    if isinstance(value, RangeSweep):
        if not isinstance(value.start, int) or not isinstance(value.stop, int) or value.step != 1:
            raise InputError(f"{key}: range(..) in a search takes integers and steps of 1; or use choice(..)")
        return search_interval(key, value.start, value.stop - 1, "log" in value.tags, whole=True)
    if isinstance(value, ChoiceSweep):
        return list(override.sweep_string_iterator())
    raise InputError(f"{key}: a search takes choice(..), range(..) or interval(..), not {type(value).__name__}")


def search_interval(key: str, least: float, most: float, logarithmic: bool, whole: bool) -> Interval:
    if least > most or (logarithmic and least <= 0):
        above = " and, on a logarithmic scale, above 0" if logarithmic else ""
        raise InputError(f"{key}: the range from {least} to {most} is empty; give it in ascending order{above}")
    return Interval(least, most, logarithmic, whole)


if __name__ == "__main__":
    try:
        run_cli("sweep.py", main)
    except KeyboardInterrupt:
        print("sweep.py: stopped by Ctrl-C; the same command continues", file=sys.stderr)
        raise SystemExit(130) from None
