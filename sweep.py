"""A Bayesian search over train.py's keys: `python sweep.py trials=20 'drafter.frames=range(4,9)' ...`.

    python sweep.py trials=20 experiment=demo run=runs/search \
        'drafter.frames=range(4,9)' 'trainer.learning_rate=tag(log,interval(1e-3,1e-2))'

Keys and ranges are spelt as for `train.py -m`; trials= is how many, jobs= how many side by side, search_seed= whose
dice. What maximises the probe's tau is looked for; train.py -m tries every combination instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from ctcdraft.config.cli import compose_config, config_error
from ctcdraft.config.command_line import parse_override, quote_paths
from ctcdraft.errors import InputError, check_int
from ctcdraft.io import refuse_unwritable
from ctcdraft.training.search import Interval, run_search

OWN_KEYS = {"trials": 20, "jobs": 1, "search_seed": 0}


def main(words: list[str]) -> float:
    own, fixed, space, run = dict(OWN_KEYS), [], {}, Path("runs/search")
    for word in quote_paths(words, searched=True):
        override = parse_override(word)
        if override is None:
            raise InputError(f"{word} is no key=value that Hydra can parse; train.py --cfg job prints all keys")
        key = override.key_or_group
        if key in OWN_KEYS:
            own[key] = check_int(override.value(), key, least=0 if key == "search_seed" else 1)
        elif key == "run":
            run = Path(str(override.value()))
        elif override.is_sweep_override():
            space[word.partition("=")[0]] = search_values(override)  # with its +, if it has one
        else:
            fixed.append(word)
    if not space:
        raise InputError("nothing is searched; give a key a range, as in 'drafter.frames=range(4,9)'")
    refuse_unwritable(run, "run")
    refuse_wrong_keys(fixed, space)
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *fixed]
    tau = run_search(command, run, space, own["trials"], own["jobs"], own["search_seed"])
    print(f"best tau {tau:.3f}; the table is {run / 'sweep.md'}")
    return tau


def refuse_wrong_keys(fixed: list[str], space: dict[str, Any]) -> None:
    """Raise InputError for words that train.py would refuse in every trial: each value of a list, the ends of a range.
    Only the config is composed; nothing is loaded."""
    ends = {key: [each.least, each.most] if isinstance(each, Interval) else each for key, each in space.items()}
    first = {key: values[0] for key, values in ends.items()}
    for key, values in ends.items():
        for value in values:
            try:
                compose_config("train", *fixed, *(f"{name}={each}" for name, each in (first | {key: value}).items()))
            except Exception as error:
                sentence = config_error(error, "train", OWN_KEYS)
                if sentence is None:
                    raise
                raise InputError(sentence) from error


def search_values(override: Override) -> Any:
    """What a key may be: the words of choice(..) and a,b, the numbers of range(..) and interval(..)."""
    value: Any = override.value()
    key = override.key_or_group
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        return search_interval(key, value.start, value.end, "log" in value.tags, whole=False)
    if isinstance(value, RangeSweep):
        if not isinstance(value.start, int) or not isinstance(value.stop, int) or value.step != 1:
            raise InputError(f"{key}: range(..) of a search goes over whole numbers in steps of 1; or use choice(..)")
        return search_interval(key, value.start, value.stop - 1, "log" in value.tags, whole=True)
    if isinstance(value, ChoiceSweep):
        return list(override.sweep_string_iterator())
    raise InputError(f"{key}: a search knows choice(..), range(..) and interval(..), not {type(value).__name__}")


def search_interval(key: str, least: float, most: float, logarithmic: bool, whole: bool) -> Interval:
    if least > most or (logarithmic and least <= 0):
        above = " and, for its logarithm, from above 0" if logarithmic else ""
        raise InputError(f"{key}: nothing lies from {least} to {most}; give its range upwards{above}")
    return Interval(least, most, logarithmic, whole)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("sweep.py: stopped by Ctrl-C; the same command goes on with the trials there are", file=sys.stderr)
        raise SystemExit(130) from None
    except InputError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        raise SystemExit(1) from None
