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

from ctcdraft.config.cli import compose_config, entry_point, run_hydra_main
from ctcdraft.config.command_line import MULTIRUN_FLAGS, parse_override, quote_paths
from ctcdraft.config.contestant_files import refuse_unknown_contestants
from ctcdraft.config.schema import as_list, check_config
from ctcdraft.errors import InputError
from ctcdraft.io import has_complete_corpus, refuse_existing_run, refuse_missing_run, refuse_unwritable


def check_before_imports(verb: str) -> None:
    """Put the command line into words that Hydra takes, and refuse what is wrong with it. verb: train, evaluate, ..."""
    run_hydra_main(lambda: entry_point(partial(check_command_line, verb))(sys.argv[1:]))


def check_command_line(verb: str, typed: Sequence[str]) -> None:
    """Rewrite sys.argv, then raise InputError for what the config shows to be wrong."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sys.argv[1:] = words = quote_paths(typed)
    sweeping = not MULTIRUN_FLAGS.isdisjoint(words)
    if any(word.startswith("-") and word not in MULTIRUN_FLAGS for word in words):
        return  # --help, --cfg job, --config-dir and others: the config is not what is run, or not the whole of it
    words = list(first_job_words(word for word in words if word not in MULTIRUN_FLAGS)) if sweeping else words
    try:
        config = compose_config(verb, *words)
    except (HydraException, OmegaConfBaseException):
        refuse_foreign_keys(verb, words)
        raise
    for key, folder in output_folders(verb, config).items():
        refuse_unwritable(Path(folder), key)
    if not sweeping:
        CHECKS[verb](config)


def first_job_words(words: Iterator[str]) -> Iterator[str]:
    """Yield the words of a multirun's first job; what only a sweeper or the config's folder can count is left out."""
    for word in words:
        override = parse_override(word)
        if override is None or not override.is_sweep_override():
            yield word
        elif override.is_discrete_sweep() and "glob(" not in word:
            yield f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def refuse_foreign_keys(verb: str, words: Sequence[str]) -> None:
    """Raise InputError for a key that another entry point has."""
    own = compose_config(verb)
    for word in words:
        key, _, value = word.partition("=")
        root = re.split(r"[./@]", key.lstrip("+~"))[0]
        others = [other for other in CHECKS if other != verb and root not in own and root in compose_config(other)]
        if not others:
            continue
        if (verb, root) == ("evaluate", "drafter"):
            raise InputError(
                f"{key}= is a key of train.py, and a run is evaluated with the drafter that was trained; "
                f"{drafter_advice(key, value)}"
            )
        theirs = " and ".join(SCRIPTS[other] for other in others)
        raise InputError(
            f"{key}= is a key of {theirs}, not of {SCRIPTS[verb]}; {SCRIPTS[verb]} --cfg job prints all of its own"
        )


def drafter_advice(key: str, value: str) -> str:
    """Return how evaluate.py takes what was meant by drafter=, drafter/GROUP= or drafter.KEY=."""
    if key == "drafter":
        return "name runs, and drafters without weights, as contestants=[RUN,prompt_lookup]"
    if key.startswith("drafter/"):
        return f"to read its frames, or grow its tree, in another way: contestants=[RUN@{value}]"
    for part in reversed(key.split(".")[1:]):
        value = f"{{{part}:{value}}}"
    return f"values are for drafters without weights: contestants=[{{NAME:{value}}}]; or train another run with them"


def output_folders(verb: str, config: Any) -> dict[str, Any]:
    """Return the folders that a command is going to write, by their keys."""
    if config.plan_only or (verb == "prepare" and config.show):
        return {}
    if verb != "train":
        return {} if config.out is None else {"out": config.out}
    if config.resume is not None:
        return {"resume": config.resume}
    folders = {"run": config.run}
    given = config.corpus.path  # prompts, or a prepared corpus, which is only read
    if not any(has_complete_corpus(Path(str(place))) for place in (given, config.prepared)):
        folders["prepared"] = config.prepared
    return folders | ({"states.path": config.states.path} if "path" in config.states else {})


def refuse_wrong_train_config(config: Any) -> None:
    """Raise InputError for what is wrong with a config of train.py."""
    if config.resume is not None:
        refuse_missing_run(Path(config.resume))
    elif (Path(config.run) / "config.yaml").exists() and not config.overwrite:
        refuse_existing_run(Path(config.run))
    check_config(config)


def refuse_wrong_evaluate_config(config: Any) -> None:
    """Raise InputError for what is wrong with a config of evaluate.py."""
    check_config(config)
    elsewhere = (config.arena, config.recorded.path, config.recorded.baseline, config.table.name)
    if all(one is None for one in elsewhere):
        run = [] if config.checkpoint is None else [config.checkpoint]
        refuse_unknown_contestants([*run, *as_list(config.contestants, "contestants")])


CHECKS = {
    "train": refuse_wrong_train_config,
    "evaluate": refuse_wrong_evaluate_config,
    "prepare": check_config,
}
SCRIPTS = {verb: f"{verb}.py" for verb in CHECKS} | {"prepare": "data/prepare.py"}
