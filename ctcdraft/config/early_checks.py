"""Checks of an entry point that need only its config and the file system, made before its imports.

torch, transformers and DeepSpeed take 3 to 13 s to import, and the usual mistake is a misspelt key or path. So an entry
point calls `check_before_imports` above those imports; composing the config twice costs 0.1 s of every start. In a
multirun only keys and folders are checked here: each job checks its own values, so that a wrong one fails alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.config.cli import CONFIGS, compose_config, entry_point, run_hydra_main
from ctcdraft.config.command_line import MULTIRUN_FLAGS, parse_override, quote_paths
from ctcdraft.config.schema import as_list, check_config
from ctcdraft.distributed import from_environment
from ctcdraft.errors import InputError
from ctcdraft.io import has_complete_corpus, refuse_existing_run, refuse_missing_run, refuse_unwritable

DRAFTER_CONFIGS, OUTSIDE_CONFIGS = CONFIGS / "drafter", CONFIGS / "outside"
# Studies are commands of their own; evaluate.py hands a config that sets one of these keys (experiment=table_mt_bench,
# recorded.path=FILE) to `run(config)` of the study's __main__.
STUDIES = {
    "table.name": "studies.paper",
    "recorded.path": "studies.external_logs",
    "recorded.baseline": "studies.external_logs",
}


def check_before_imports(verb: str) -> None:
    """Quote the paths in sys.argv for Hydra, and exit with one sentence if the command is wrong.

    OpenMP reads its variable when torch is imported. Threads that spin while they wait are many times slower where
    cores are shared.

    Args:
        verb: name of the entry point's config: train, evaluate or prepare.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    run_hydra_main(lambda: entry_point(partial(check_command_line, verb))(sys.argv[1:]))


def check_command_line(verb: str, arguments: Sequence[str]) -> None:
    """Rewrite sys.argv, then raise InputError for a wrong key, value or folder."""
    sys.argv[1:] = overrides = quote_paths(arguments)
    multirun = not MULTIRUN_FLAGS.isdisjoint(overrides)
    if any(override.startswith("-") and override not in MULTIRUN_FLAGS for override in overrides):
        return  # --help, --cfg job, --config-dir and others: nothing is run, or the config is composed differently
    if multirun:  # the jobs differ in values alone, so the first one shows every wrong key
        overrides = list(first_job_overrides(each for each in overrides if each not in MULTIRUN_FLAGS))
    try:
        config = compose_config(verb, *overrides)
    except (HydraException, OmegaConfBaseException):
        refuse_foreign_keys(verb, overrides)  # else a similar key of this script would be suggested
        raise
    for key, folder in output_folders(verb, config).items():
        refuse_unwritable(Path(folder), key)
    if not multirun:
        CHECKS[verb](config)


def first_job_overrides(arguments: Iterator[str]) -> Iterator[str]:
    """Yield the overrides of the first job of a multirun, without those that need the sweeper or glob()."""
    for argument in arguments:
        override = parse_override(argument)
        if override is None or not override.is_sweep_override():
            yield argument
        elif override.is_discrete_sweep() and "glob(" not in argument:
            yield f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def refuse_foreign_keys(verb: str, overrides: Sequence[str]) -> None:
    """Raise InputError for a key that only another entry point has."""
    own = compose_config(verb)
    for override in overrides:
        key, _, value = override.partition("=")
        root = re.split(r"[./@]", key.lstrip("+~"))[0]
        others = [other for other in CHECKS if other != verb and root not in own and root in compose_config(other)]
        if others and (verb, root) == ("evaluate", "drafter"):
            advice = drafter_advice(key, value)
            raise InputError(
                f"{key}= is a key of train.py, and a run is evaluated with the drafter that was trained; {advice}"
            )
        if others:
            theirs, script = " and ".join(SCRIPTS[other] for other in others), SCRIPTS[verb]
            raise InputError(f"{key}= is a key of {theirs}, not of {script}; {script} --cfg job prints all of its own")


def drafter_advice(key: str, value: str) -> str:
    """Return the argument of evaluate.py that replaces drafter=, drafter/GROUP= or drafter.KEY=."""
    if key == "drafter":
        return "name runs, and drafters without weights, as contestants=[RUN,prompt_lookup]"
    if key.startswith("drafter/"):
        return f"to build its token trees in another way: contestants=[RUN@{value}]"
    # drafter.tree.width=3   ->   {tree:{width:3}}
    for part in reversed(key.split(".")[1:]):
        value = f"{{{part}:{value}}}"
    return f"for a drafter without weights give contestants=[{{NAME:{value}}}]; otherwise train another run"


def output_folders(verb: str, config: Any) -> dict[str, Any]:
    """Return the folders that a command will write, by config key."""
    if config.plan_only or (verb == "prepare" and config.show):
        return {}
    if verb != "train":
        return {} if config.out is None else {"out": config.out}
    if config.resume is not None:
        return {"resume": config.resume}
    folders = {"run": config.run}
    # corpus.path= names prompts, or a prepared corpus, which is only read.
    if not any(has_complete_corpus(Path(str(path))) for path in (config.corpus.path, config.prepared)):
        folders["prepared"] = config.prepared
    return folders | ({"hidden_states.path": config.hidden_states.path} if "path" in config.hidden_states else {})


def refuse_wrong_train_config(config: Any) -> None:
    if config.resume is not None:
        if from_environment().is_main:  # the others may be on machines that do not have it
            refuse_missing_run(Path(config.resume))
    elif (Path(config.run) / "config.yaml").exists() and not config.overwrite:
        refuse_existing_run(Path(config.run))
    check_config(config)


def refuse_wrong_evaluate_config(config: Any) -> None:
    check_config(config)
    if find_study(config) is not None:
        return
    run = [] if config.checkpoint is None else [config.checkpoint]
    for contestant in [*run, *as_list(config.contestants, "contestants")]:
        name = str(next(iter(contestant)) if isinstance(contestant, Mapping) else contestant)
        folder = Path(split_reading(name)[0])
        if not any((folder / name).is_file() for name in ("config.yaml", "config.json")):
            drafter_file(name, folder)


def find_study(config: Any) -> str | None:
    """Return the study that a config of evaluate.py belongs to; None for an evaluation."""
    return next((study for key, study in STUDIES.items() if OmegaConf.select(config, key) is not None), None)


def split_reading(name: str) -> tuple[str, str]:
    """Return run directory and tree option of RUN@TREE; the option is empty where none is named."""
    run, at, tree = name.rpartition("@")
    return (run, tree) if at and not Path(name).is_dir() else (name, "")


def drafter_file(name: str, run: Path) -> Path:
    """Return the YAML file of a drafter; raise InputError if there is none. run: the name without @TREE."""
    for file in (DRAFTER_CONFIGS / f"{name}.yaml", OUTSIDE_CONFIGS / f"{name}.yaml", Path(name)):
        if file.suffix == ".yaml" and file.is_file() and not run.is_dir():  # a folder is meant as a run
            return file
    drafters = sorted(file.stem for folder in (DRAFTER_CONFIGS, OUTSIDE_CONFIGS) for file in folder.glob("*.yaml"))
    raise InputError(
        f"contestant {name} is neither a run directory (there is no {run / 'config.yaml'}) nor one of the drafters "
        f"{', '.join(drafters)}"
    )


CHECKS = {"train": refuse_wrong_train_config, "evaluate": refuse_wrong_evaluate_config, "prepare": check_config}
SCRIPTS = {"train": "train.py", "evaluate": "evaluate.py", "prepare": "data/prepare.py"}
