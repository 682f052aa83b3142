"""Jobs of a Hydra sweep of train.py: what each is called, why one failed, and the minutes the others will take.

Hydra runs the jobs of `train.py -m` one after another in this process and tells a job its number alone. How many there
are is read from the command line with Hydra's own parser; a sweeper or launcher of another kind has no estimate.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.errors import first_line
from ctcdraft.renamed import current
from ctcdraft.training.lock import InUseError
from ctcdraft.training.progress import RemainingTime
from ctcdraft.training.sweep import LOCATION_KEYS, flatten_config, forget_failure, write_failure, write_table

if TYPE_CHECKING:
    from ctcdraft.training.run_directory import RunDirectory

BASIC_PLUGINS = tuple(f"hydra._internal.core_plugins.basic_{kind}" for kind in ("sweeper", "launcher"))
_remaining_by_sweep: dict[Path, RemainingTime] = {}  # of the sweep that runs in this process


def job_number() -> int | None:
    """Return the number of this job in a sweep (-m); None for a single run."""
    sweeps = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return HydraConfig.get().job.num if sweeps else None


def sweep_directory(config: DictConfig) -> Path | None:
    """Return where the jobs of a sweep are beside one another; None for a single run."""
    return Path(config.run) if job_number() is not None and config.resume is None else None


def run_directory(config: DictConfig) -> RunDirectory:
    """Return `run=DIR`, or `<run>/<job number>` in a multirun, or the run that is resumed."""
    from ctcdraft.training.run_directory import RunDirectory  # torch, for which no refusal is to wait

    if config.resume is not None:
        directory = RunDirectory(Path(config.resume))
        directory.require()
        return directory
    sweep = sweep_directory(config)
    return RunDirectory(Path(config.run) if sweep is None else sweep / str(job_number()))


def run_title(run: Path, sweep: Path | None) -> tuple[str, str | None]:
    """Return what a run is called beside others, and the group it belongs to.

    runs/mine -> mine, None    job 1 of runs/sweep -> "sweep/1 drafter.frames=8", sweep
    """
    if sweep is None:
        return run.name, None
    swept = {override.get_key_element() for override in typed_overrides() if override.is_sweep_override()}
    chosen = [word for word in HydraConfig.get().overrides.task if word.partition("=")[0] in swept]
    return " ".join([f"{sweep.name}/{run.name}", *chosen]), sweep.name


@contextlib.contextmanager
def track_job(
    config: DictConfig, sentence_of: Callable[[Exception], str | None], clock: Callable[[], float] = monotonic
) -> Iterator[None]:
    """Around the work of one job: write down why it failed, the table anew, and the minutes left. Around a single run
    this does nothing. sentence_of: an error of the input in words; None for a bug."""
    from ctcdraft.distributed import from_environment  # torch, as above

    sweep = sweep_directory(config)
    if sweep is None or config.plan_only or not from_environment().is_main:
        yield
        return
    run, remaining = run_directory(config), sweep_remaining(sweep)
    began, before = clock(), logged_bytes(run)
    seconds = None
    try:
        yield
        forget_failure(run.path)
        if logged_bytes(run) != before:
            seconds = clock() - began  # not of one that had all its steps
    except Exception as error:
        if not isinstance(error, InUseError) and not holds_other_run(run, config):
            reason = sentence_of(error) or f"{type(error).__name__}: {first_line(error)}"
            write_failure(run.path, flat_values(config), reason)
        raise
    finally:
        write_table(sweep)  # anew after every job
        if remaining is not None:
            print(f"sweep {sweep}: {remaining.run_ended(seconds)}", flush=True)


def sweep_remaining(sweep: Path) -> RemainingTime | None:
    """Return the estimate of the sweep that this job belongs to; the first job begins it."""
    if job_number() == 0 or sweep not in _remaining_by_sweep:
        jobs = count_jobs()
        if jobs is None:
            return None
        _remaining_by_sweep[sweep] = RemainingTime(jobs)
    return _remaining_by_sweep[sweep]


def count_jobs() -> int | None:
    """Return how many jobs the command line asks for; None where another sweeper or launcher decides."""
    chosen = HydraConfig.get()
    if not (chosen.sweeper._target_.startswith(BASIC_PLUGINS) and chosen.launcher._target_.startswith(BASIC_PLUGINS)):
        return None
    return len(BasicSweeper.split_arguments(typed_overrides(), None)[0])


def typed_overrides() -> list[Override]:
    """Return the words of the command line, and those of hydra.sweeper.params, as Hydra's sweeper reads them."""
    words = [f"{key}={value}" for key, value in (HydraConfig.get().sweeper.get("params") or {}).items()]
    words += [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    hydra = GlobalHydra.instance()
    parser = OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None)
    return parser.parse_overrides(words)


def logged_bytes(run: RunDirectory) -> int:
    """Return the size of what is logged of the run, which every step changes."""
    return run.metrics.stat().st_size if run.metrics.is_file() else 0


def holds_other_run(run: RunDirectory, config: DictConfig) -> bool:
    """Return whether the directory holds a run of other values, which did not fail with this job."""
    if not run.config.is_file():
        return False
    there, here = flatten_config(current(yaml.safe_load(run.config.read_text()))), flat_values(config)
    return any(there.get(key) != here.get(key) for key in {**there, **here} if key not in LOCATION_KEYS)


def flat_values(config: DictConfig) -> dict[str, object]:
    """Return the whole config, flat, as a finished run's is read."""
    try:
        text = OmegaConf.to_yaml(config, resolve=True)
    except OmegaConfBaseException:  # which may be why the job failed
        text = OmegaConf.to_yaml(config)
    return flatten_config(yaml.safe_load(text))
