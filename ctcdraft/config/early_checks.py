"""Checks of an entry point that need its config and the file system alone, made before its imports.

torch, transformers and DeepSpeed take 3 to 13 s to import, and the usual mistake is a misspelt key or a path. So an
entry point calls `begin` above those imports: it composes the config once more (0.1 s of every start) and refuses what
that shows. Jobs of a multirun check their values themselves, as one of them may be wrong where others are right; of
them only keys and folders are looked at here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import composed, entry_point, from_command_line
from ctcdraft.config.command_line import MULTIRUN, parsed, understood
from ctcdraft.config.contestant_files import refuse_absent
from ctcdraft.corpus import settings as preparing
from ctcdraft.errors import InputError
from ctcdraft.evaluation import settings as evaluating
from ctcdraft.io import holds_corpus, refuse_held, refuse_no_run, refuse_unwritable
from ctcdraft.training import settings as training


def begin(verb: str) -> None:
    """Put the command line into words that Hydra takes, and refuse what is wrong with it. verb: train, evaluate, ..."""
    from_command_line(lambda: entry_point(partial(checked, verb))(sys.argv[1:]))


def checked(verb: str, typed: Sequence[str]) -> None:
    """Rewrite sys.argv, then raise InputError for what the config shows to be wrong."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sys.argv[1:] = words = understood(typed)
    sweeping = not MULTIRUN.isdisjoint(words)
    if any(word.startswith("-") and word not in MULTIRUN for word in words):
        return  # --help, --cfg job, --config-dir and others: the config is not what is run, or not the whole of it
    words = list(first_job(word for word in words if word not in MULTIRUN)) if sweeping else words
    try:
        config = composed(verb, *words)
    except (HydraException, OmegaConfBaseException):
        refuse_keys_of_others(verb, words)
        raise
    for key, folder in written(verb, config).items():
        refuse_unwritable(Path(folder), key)
    if not sweeping:
        CHECKS[verb](config)


def first_job(words: Iterator[str]) -> Iterator[str]:
    """Yield the words of a multirun's first job; what only a sweeper or the config's folder can count is left out."""
    for word in words:
        override = parsed(word)
        if override is None or not override.is_sweep_override():
            yield word
        elif override.is_discrete_sweep() and "glob(" not in word:
            yield f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def refuse_keys_of_others(verb: str, words: Sequence[str]) -> None:
    """Raise InputError for a key that another entry point has."""
    own = composed(verb)
    for word in words:
        key, _, value = word.partition("=")
        root = re.split(r"[./@]", key.lstrip("+~"))[0]
        others = [other for other in CHECKS if other != verb and root not in own and root in composed(other)]
        if not others:
            continue
        if (verb, root) == ("evaluate", "drafter"):
            raise InputError(
                f"{key}= is a key of train.py, and a run is evaluated with the drafter that was trained; "
                f"{drafter_instead(key, value)}"
            )
        theirs = " and ".join(SCRIPTS[other] for other in others)
        raise InputError(
            f"{key}= is a key of {theirs}, not of {SCRIPTS[verb]}; {SCRIPTS[verb]} --cfg job prints all of its own"
        )


def drafter_instead(key: str, value: str) -> str:
    """Return how evaluate.py takes what was meant by drafter=, drafter/GROUP= or drafter.KEY=."""
    if key == "drafter":
        return "name runs, and drafters without weights, as contestants=[RUN,prompt_lookup]"
    if key.startswith("drafter/"):
        return f"to read its frames, or grow its tree, in another way: contestants=[RUN@{value}]"
    for part in reversed(key.split(".")[1:]):
        value = f"{{{part}:{value}}}"
    return f"values are for drafters without weights: contestants=[{{NAME:{value}}}]; or train another run with them"


def written(verb: str, config: Any) -> dict[str, Any]:
    """Return the folders that a command is going to write, by their keys."""
    if config.plan_only or (verb == "prepare" and config.show):
        return {}
    if verb != "train":
        return {} if config.out is None else {"out": config.out}
    if config.resume is not None:
        return {"resume": config.resume}
    folders = {"run": config.run}
    given = config.corpus.path  # prompts, or a prepared corpus, which is only read
    if not any(holds_corpus(Path(str(place))) for place in (given, config.prepared)):
        folders["prepared"] = config.prepared
    return folders | ({"states.path": config.states.path} if "path" in config.states else {})


def refuse_train(config: Any) -> None:
    """Raise InputError for what is wrong with a config of train.py."""
    if config.resume is not None:
        refuse_no_run(Path(config.resume))
    elif (Path(config.run) / "config.yaml").exists() and not config.overwrite:
        refuse_held(Path(config.run))
    training.refuse_impossible(config.trainer, config.seed)


def refuse_evaluate(config: Any) -> None:
    """Raise InputError for what is wrong with a config of evaluate.py."""
    evaluating.refuse_impossible(config)
    elsewhere = (config.arena, config.recorded.path, config.recorded.baseline, config.table.name)
    if all(one is None for one in elsewhere):
        run = [] if config.checkpoint is None else [config.checkpoint]
        refuse_absent([*run, *evaluating.several(config.contestants, "contestants")])


CHECKS = {"train": refuse_train, "evaluate": refuse_evaluate, "prepare": preparing.refuse_impossible}
SCRIPTS = {verb: f"{verb}.py" for verb in CHECKS} | {"prepare": "data/prepare.py"}
