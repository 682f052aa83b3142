"""Config -> objects -> trainer.fit(): `python train.py experiment=demo drafter.frames=8`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.corpus import prepared
from ctcdraft.corpus.batches import Batches, Rows
from ctcdraft.errors import InputError
from ctcdraft.front_door import build_drafter, entry_point
from ctcdraft.training.checkpoint import RunDirectory
from ctcdraft.training.logger import JsonlLogger
from ctcdraft.training.plan import plan
from ctcdraft.training.probe import Probe, hold_out
from ctcdraft.training.trainer import Trainer


@hydra.main(version_base=None, config_path="configs", config_name="train")
@entry_point
def main(config: DictConfig) -> float:
    resuming = config.resume is not None
    run = run_directory(config)
    if resuming:
        config = config_to_resume(run, config)
    elif run.config.exists() and not config.overwrite:
        run.refuse_to_overwrite()
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    base = instantiate(config.base)
    rows, prompts, corpus_hash = held_corpus(config, base)

    torch.manual_seed(config.seed)
    drafter = build_drafter(config.drafter, base).train()
    objective = instantiate(config.objective)
    batches = Batches(rows, base, config.trainer.rows, config.trainer.anchors, objective.labels, config.seed)
    print(plan(drafter, objective, batches, config.trainer.steps))
    if config.plan_only:
        return 0.0
    if not resuming:
        run.begin(
            OmegaConf.to_yaml(config, resolve=True), base.fingerprint() | {"corpus": corpus_hash}, config.overwrite
        )
    trainer = make_trainer(config, run, base, drafter, objective, batches, prompts)
    if resuming:
        trainer.restore()
    loggers = make_loggers(config, run, trainer.step)
    tau = trainer.fit(loggers)
    print(f"best probe tau {tau:.3f}; the run is {run.path}")
    return tau


def run_directory(config: DictConfig) -> RunDirectory:
    """`run=DIR`, or `<run>/<job number>` in a multirun, or the run that is resumed."""
    if config.resume is not None:
        directory = RunDirectory(Path(config.resume))
        directory.require()
        return directory
    hydra_config = HydraConfig.get()
    job = str(hydra_config.job.num) if hydra_config.mode.name == "MULTIRUN" else ""
    return RunDirectory(Path(config.run) / job)


def config_to_resume(run: RunDirectory, config: DictConfig) -> DictConfig:
    """The run's own config; of the command line only resume= and a raised trainer.steps count."""
    typed = HydraConfig.get().overrides.task
    others = [word for word in typed if not word.startswith(("resume=", "trainer.steps="))]
    if others:
        raise InputError(
            f"resume={run.path} takes that run's own config, but {', '.join(others)} was given too; "
            "only trainer.steps= may be raised"
        )
    own = OmegaConf.load(run.config)
    if any(word.startswith("trainer.steps=") for word in typed):
        if config.trainer.steps < own.trainer.steps:
            raise InputError(
                f"trainer.steps={config.trainer.steps} is less than the {own.trainer.steps} of {run.path}; "
                "it may only be raised"
            )
        own.trainer.steps = config.trainer.steps
        run.config.write_text(OmegaConf.to_yaml(own))
    return own


def held_corpus(config: DictConfig, base: Any) -> tuple[Rows, list[torch.Tensor], str]:
    """Rows to train on, prompts for the probe, the corpus's hash. What is not prepared yet is prepared now."""
    source = Path(str(config.corpus.path))
    given = (source / "manifest.json").is_file()
    path = source if given else Path(config.prepared)
    if not given and not prepared.is_complete(path):
        prompts, answers = instantiate(config.corpus), instantiate(config.answers)
        print(prepared.plan(base, prompts, answers, path))
        settings = OmegaConf.to_container(config.corpus, resolve=True)
        prepared.prepare(base, prompts, answers, path, {"corpus": settings})
    corpus = prepared.read(path, base.fingerprint())
    max_length = min(config.trainer.max_length, base.context_length)
    rows, held = hold_out(corpus.rows, config.trainer.probe_prompts, max_length)
    return rows, held, corpus.manifest["hash"]


def make_trainer(
    config: DictConfig, run: RunDirectory, base: Any, drafter: Any, objective: Any, batches: Batches, prompts: Any
) -> Trainer:
    settings = config.trainer
    engine = instantiate(config.engine)(
        drafter,
        drafter.own_parameters(),
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        final_share=settings.final_share,
        betas=tuple(settings.betas),
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        clip_value=settings.clip_value,
        autocast=settings.autocast,
    )
    probe = Probe(base, prompts, instantiate(config.decoding))
    return Trainer(
        run,
        drafter,
        objective,
        batches,
        engine,
        probe,
        steps=settings.steps,
        checkpoint_every=settings.checkpoint_every,
        probe_every=settings.probe_every,
    )


def make_loggers(config: DictConfig, run: RunDirectory, first_step: int) -> list[Any]:
    loggers: list[Any] = [JsonlLogger(run.metrics, first_step)]
    if config.logger.wandb is not None:
        values = OmegaConf.to_container(config, resolve=True)
        loggers.append(instantiate(config.logger.wandb)(run.path, name=run.path.name, config=values))
    return loggers


if __name__ == "__main__":
    main()
