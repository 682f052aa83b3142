"""Jobs of a Hydra sweep (`train.py -m`): their run directories, titles and GPUs, recorded failures, the remaining time.

Hydra's basic launcher runs the jobs one after another in this process, and a job knows only its number. The number of
jobs is computed from the command line with Hydra's parser; with another sweeper or launcher there is no estimate.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.config.allowed import read_yaml
from ctcdraft.devices import keep_device
from ctcdraft.distributed import from_environment
from ctcdraft.errors import first_line
from ctcdraft.progress import RemainingTime
from ctcdraft.training.run_lock import InUseError
from ctcdraft.training.sweep import (
    LOCATION_KEYS,
    describe_unfinished,
    flatten_config,
    forget_failure,
    write_failure,
    write_table,
)

if TYPE_CHECKING:
    from ctcdraft.training.run_directory import RunDirectory

BASIC_PLUGINS = tuple(f"hydra._internal.core_plugins.basic_{kind}" for kind in ("sweeper", "launcher"))
_remaining_by_sweep: dict[Path, RemainingTime] = {}  # of the sweep in this process
_begun: list[Path] = []  # folders of sweeps whose jobs this process launches


class SweepCallback(Callback):
    """What Hydra calls in the process that launches a sweep, and in those of its jobs, to which it is pickled."""

    def on_multirun_start(self, config: DictConfig, **others: Any) -> None:
        self.command = list(sys.argv)
        if "run" in config and config.get("resume") is None and not config.plan_only:
            _begun.append(Path(config.run))

    def on_job_start(self, config: DictConfig, **others: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        sys.argv[:] = self.command  # submitit's processes have another
        # With device= or base.device_map= the user chooses; torchrun gives each process the device of its rank.
        given: Any = OmegaConf.to_container(config, resolve=False)
        automatic = "auto_device" in str(given["device"])
        if automatic and "LOCAL_RANK" not in os.environ and not config.base.get("device_map") and launches_processes():
            keep_device()


def launches_processes() -> bool:
    """Return whether the jobs of this sweep run in other processes, several at a time, as with joblib and submitit."""
    return not HydraConfig.get().launcher._target_.startswith(BASIC_PLUGINS)


@contextlib.contextmanager
def reported_sweep() -> Iterator[None]:
    """Rewrite the table of the sweep that is launched within, and print which of its jobs are unfinished and why."""
    try:
        yield
    finally:
        while _begun:
            sweep = _begun.pop()
            write_table(sweep)  # jobs that end together overwrite each other's, and one that is killed writes none
            for line in describe_unfinished(sweep):
                print(f"sweep {sweep}: {line}", flush=True)


def job_number() -> int | None:
    """Return the number of this job in a sweep (-m); None for a single run."""
    sweeps = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return HydraConfig.get().job.num if sweeps else None


def sweep_directory(config: DictConfig) -> Path | None:
    """Return the parent folder of the run directories of a sweep; None for a single run."""
    return Path(config.run) if job_number() is not None and config.resume is None else None


def run_directory(config: DictConfig) -> RunDirectory:
    """Return `run=DIR`, or `<run>/<job number>` in a multirun, or the run that is resumed."""
    # Imports torch, and an error before the heavy imports is reported with the job number from this module.
    from ctcdraft.training.run_directory import RunDirectory

    if config.resume is not None:
        directory = RunDirectory(Path(config.resume))
        directory.require()
        return directory
    sweep = sweep_directory(config)
    return RunDirectory(Path(config.run) if sweep is None else sweep / str(job_number()))


def run_title(run: Path, sweep: Path | None) -> tuple[str, str | None]:
    """Return the name of a run for loggers, and the group it belongs to.

    runs/mine -> mine, None    job 1 of runs/sweep -> "sweep/1 drafter.frames=8", sweep
    """
    if sweep is None:
        return run.name, None
    swept = {override.get_key_element() for override in typed_overrides() if override.is_sweep_override()}
    chosen = [override for override in HydraConfig.get().overrides.task if override.partition("=")[0] in swept]
    return " ".join([f"{sweep.name}/{run.name}", *chosen]), sweep.name


@contextlib.contextmanager
def track_job(
    config: DictConfig, sentence_of: Callable[[Exception], str | None], clock: Callable[[], float] = monotonic
) -> Iterator[None]:
    """Record a failure of a job of a sweep, rewrite the sweep's table and print the remaining time.

    For a single run this does nothing.

    Args:
        sentence_of: returns the sentence of an input error, None for a bug.
    """
    sweep = sweep_directory(config)
    if sweep is None or config.plan_only or not from_environment().is_main:
        yield
        return
    run, remaining = run_directory(config), sweep_remaining(sweep)
    start, logged_before = clock(), logged_bytes(run)
    seconds = None
    try:
        yield
        forget_failure(run.path)
        if logged_bytes(run) != logged_before:  # a run that was complete already takes no time
            seconds = clock() - start
    except Exception as error:
        if not isinstance(error, InUseError) and not holds_other_run(run, config):
            reason = sentence_of(error) or f"{type(error).__name__}: {first_line(error)}"
            write_failure(run.path, flat_values(config), reason)
        raise
    finally:  # after a failure too, which is a row of the table
        write_table(sweep)
        if remaining is not None:
            print(f"sweep {sweep}: {remaining.run_ended(seconds)}", flush=True)


def sweep_remaining(sweep: Path) -> RemainingTime | None:
    """Return the estimate of the sweep that this job belongs to; None with another sweeper or launcher."""
    if job_number() == 0 or sweep not in _remaining_by_sweep:
        hydra = HydraConfig.get()
        if not all(plugin._target_.startswith(BASIC_PLUGINS) for plugin in (hydra.sweeper, hydra.launcher)):
            return None
        _remaining_by_sweep[sweep] = RemainingTime(len(BasicSweeper.split_arguments(typed_overrides(), None)[0]))
    return _remaining_by_sweep[sweep]


def typed_overrides() -> list[Override]:
    """Return the overrides of the command line and of hydra.sweeper.params, parsed as Hydra's sweeper does."""
    arguments = [f"{key}={value}" for key, value in (HydraConfig.get().sweeper.get("params") or {}).items()]
    arguments += [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    hydra = GlobalHydra.instance()
    # glob(..) needs the config loader, which lists the options of a group.
    return OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None).parse_overrides(arguments)


def logged_bytes(run: RunDirectory) -> int:
    """Return the size of metrics.jsonl, to which every step appends."""
    return run.metrics.stat().st_size if run.metrics.is_file() else 0


def holds_other_run(run: RunDirectory, config: DictConfig) -> bool:
    """Return whether the directory holds a run with another config, which this job's failure does not concern."""
    if not run.config.is_file():
        return False
    existing, own = flatten_config(read_yaml(run.config)[1]), flat_values(config)
    return any(existing.get(key) != own.get(key) for key in {**existing, **own} if key not in LOCATION_KEYS)


def flat_values(config: DictConfig) -> dict[str, object]:
    """Return the whole config with dotted keys, as that of a finished run is read."""
    try:
        text = OmegaConf.to_yaml(config, resolve=True)
    except OmegaConfBaseException:  # an interpolation that cannot be resolved may be why the job failed
        text = OmegaConf.to_yaml(config)
    return flatten_config(yaml.safe_load(text))
