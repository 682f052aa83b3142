"""A run directory as train.py uses it (new, resumed, or one job of a sweep that goes on), and checks of its config."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.config.allowed import parse_trust, printable, read_run_config, read_yaml
from ctcdraft.config.build import resolve_corpus_paths
from ctcdraft.config.schema import check_config
from ctcdraft.config.sweep_jobs import run_directory, run_title, sweep_directory
from ctcdraft.corpus import prepared
from ctcdraft.corpus.hidden_states import OnlineHiddenStates
from ctcdraft.distributed import from_environment
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError, check_int
from ctcdraft.io import refuse_existing_run, write_text
from ctcdraft.models.base_model import BaseLM
from ctcdraft.renamed import current
from ctcdraft.training.deepspeed import DeepSpeedEngine
from ctcdraft.training.loggers import JsonlLogger, Logger, refuse_absent, refuse_missing_key
from ctcdraft.training.run_directory import RunDirectory
from ctcdraft.training.run_lock import run_lock
from ctcdraft.training.sweep import read_job
from ctcdraft.training.trainer import Trainer


@dataclass(frozen=True)
class TrainingRun:
    """Directory and config of a run."""

    directory: RunDirectory
    config: DictConfig  # of the command line, or the run's own where it is resumed
    resuming: bool
    sweep: Path | None  # directory of the sweep whose job this is

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Return the run that a command line asks for; raise InputError where its directory holds another one."""
        directory, sweep = run_directory(config), sweep_directory(config)
        if config.resume is not None:
            return cls(directory, resumed_config(directory, config), True, sweep)
        if not directory.config.exists() or config.overwrite:
            return cls(directory, config, False, sweep)
        own = OmegaConf.create(OmegaConf.to_yaml(config, resolve=True))  # from text, as the file is read
        # By present names: the run may be older than a renaming.
        if sweep is None or read_yaml(directory.config)[1] != current(OmegaConf.to_container(own)):
            refuse_existing_run(directory.path)
        return cls(directory, config, True, sweep)  # the same sweep again: its jobs go on where they stopped

    @property
    def finished_steps(self) -> int:
        return self.directory.last_step if self.resuming else 0

    def complete_job(self) -> float | None:
        """Return the best tau of a job of a sweep that has all its steps already, which is not run again; else None."""
        if self.sweep is None or not self.resuming or self.finished_steps < self.config.trainer.steps:
            return None
        job = read_job(self.directory.path)
        if job is None or not self.directory.head.is_file():
            return None
        print(f"{self.directory.path} already has its {self.finished_steps:,} steps, tau {job.tau:.3f}", flush=True)
        return job.tau

    def use_device(self, device: str) -> None:
        """Move a run of several processes to the device of this one: a resumed run's config has that of process 0."""
        for node in (self.config, self.config.base):
            if from_environment().world_size > 1 and str(node.get("device")).startswith("cuda"):
                node.device = device

    def lock(self) -> AbstractContextManager[None]:
        """Return the lock on the directory, held by rank 0; a plan writes nothing and needs none."""
        if self.config.plan_only or not from_environment().is_main:
            return nullcontext()
        return run_lock(self.directory.path)

    def begin(self, trainer: Trainer, base: BaseLM, corpus_hash: str) -> None:
        """Create the directory, or restore the trainer from its newest checkpoint."""
        config_text = OmegaConf.to_yaml(self.config, resolve=True)
        if self.resuming:
            trainer.distributed.from_main(lambda: self.directory.refuse_other_corpus(corpus_hash))
            trainer.restore()
            if trainer.step >= trainer.settings.steps and trainer.distributed.is_main:
                print(f"{self.directory.path} already has its {trainer.step:,} steps; trainer.steps= may be raised")
        if trainer.distributed.is_main and self.resuming:
            write_text(self.directory.config, config_text)  # trainer.steps may have been raised
        elif trainer.distributed.is_main:
            fingerprint = base.fingerprint() | {"corpus": corpus_hash}
            self.directory.create(config_text, fingerprint, self.config.overwrite)
            write_text(self.directory.command, self.rerun_command() + "\n")

    def rerun_command(self) -> str:
        """Return the command that repeats this run, or this job of a sweep, in a directory beside it."""
        overrides = [text for text in HydraConfig.get().overrides.task if not text.startswith(("run=", "overwrite="))]
        return shlex.join(["python", "train.py", *overrides, f"run={self.directory.path}-again"])

    def loggers(self, trainer: Trainer) -> list[Logger]:
        """Return metrics.jsonl and the configured loggers, for rank 0; no logger for other ranks."""
        if not trainer.distributed.is_main:
            return []
        values = OmegaConf.to_container(self.config, resolve=True)
        name, group = run_title(self.directory.path, self.sweep)
        others = [instantiate(part) for part in self.config.logger.values() if part is not None]
        return [
            JsonlLogger(self.directory.metrics, trainer.step),
            *(other(self.directory.path, name=name, config=values, group=group) for other in others),
        ]


def resumed_config(run: RunDirectory, config: DictConfig) -> Any:
    """Return the run's own config; of the command line resume=, trust=, device= and a raised trainer.steps= count."""
    overrides = HydraConfig.get().overrides.task
    free = ("resume=", "trainer.steps=", "trust=", "timeout_minutes=", "device=")
    others = [text for text in overrides if not text.startswith(free)]
    if others:
        raise InputError(
            f"resume={run.path} uses that run's own config, and only trainer.steps= may be raised and device= changed; "
            f"leave out {', '.join(others)}"
        )
    own: Any = read_run_config(run.config, parse_trust(config.trust), nodes=None)  # every node is instantiated
    # Keys that are newer than the run get their defaults.
    own.trainer = OmegaConf.merge(config.trainer, own.trainer)
    own.adapt = own.get("adapt")
    refuse_server(own, run)
    if any(text.startswith("device=") for text in overrides):  # its own may be absent here
        own.device = own.base.device = config.device
    if any(text.startswith("trainer.steps=") for text in overrides):
        if check_int(config.trainer.steps, "trainer.steps") < own.trainer.steps:
            raise InputError(
                f"trainer.steps must be >= the {own.trainer.steps} of {run.path}, got {config.trainer.steps}"
            )
        own.trainer.steps = config.trainer.steps
    return own


def refuse_server(own: Any, run: RunDirectory) -> None:
    """Raise InputError where a resumed run would send requests to a server."""
    # Its config may come from elsewhere and may name any address, any prompts, and any environment variable as the key
    # to send there. A run has had its whole corpus when it began, so it needs no server.
    url = (own.get("answers") or {}).get("url")
    if url is not None and not prepared.is_complete(folder := resolve_corpus_paths(own)[1]):
        raise InputError(
            f"{run.config} would request responses from the server at {printable(url)}, and there is no complete "
            f"corpus in {folder}; bring that corpus back, or prepare it with data/prepare.py, where you name the "
            "server yourself"
        )


def refuse_wrong_training(config: DictConfig) -> None:
    """Raise InputError for what the config alone shows to be wrong, before anything is loaded."""
    check_config(config)
    rows, processes = config.trainer.batch_size, from_environment().world_size
    if rows < processes:
        raise InputError(
            f"trainer.batch_size={rows} sequences cannot be shared by {processes} processes; raise it, or start fewer"
        )
    if not issubclass(get_class(config.drafter._target_), DraftHead):
        raise InputError(
            f"drafter={config.drafter.name} has no weights to train; give it as one of contestants= of evaluate.py"
        )
    if "objective" not in config:
        raise InputError(
            f"drafter={config.drafter.name} has no default objective (configs/objective/of_*.yaml); give objective="
        )
    if config.adapt is not None:
        refuse_unadaptable(config)
    if config.base.get("zero3"):
        refuse_unsupported_zero3(config)
    refuse_absent(get_class(part._target_) for part in config.logger.values() if part is not None)
    if config.logger.get("wandb") is not None and not config.plan_only:
        refuse_missing_key(config.logger.wandb.mode)


def refuse_unadaptable(config: DictConfig) -> None:
    """Raise InputError where adapt=lora would change a base model that another part needs unchanged."""
    for key in ("zero3", "quantization", "device_map"):
        if config.base.get(key):
            raise InputError(f"adapt=lora needs the whole base model on one device; leave out base.{key}=")
    if get_object(config.hidden_states._target_) is not OnlineHiddenStates:
        raise InputError(
            "adapt=lora changes the hidden states at every step, so they cannot be stored; give hidden_states=online"
        )
    if issubclass(get_class(config.engine._target_), DeepSpeedEngine):
        raise InputError("adapt=lora needs engine=torch or muon: engine=deepspeed trains the draft head alone")


def refuse_unsupported_zero3(config: DictConfig) -> None:
    """Raise InputError where one process alone would run a base model that all processes must run together."""
    together = "base.zero3=true runs the base model in all processes together"
    if config.trainer.probe_prompts != 0:
        raise InputError(f"{together}, and validation runs in one; give trainer.probe_prompts=0")
    if get_object(config.hidden_states._target_) is not OnlineHiddenStates:
        raise InputError(f"{together}, and each process stores its own hidden states; give hidden_states=online")
    folder = resolve_corpus_paths(config)[1]
    if not prepared.is_complete(folder):
        raise InputError(
            f"{together}, so it generates no responses, and there is no corpus in {folder}; prepare it with "
            "data/prepare.py, base.device_map= or answers=openai"
        )
