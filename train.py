"""Train a draft head for a base model: `python train.py experiment=demo drafter.frames=8`.

Every part of a run is built from its node of the config. The plan (parameters, tokens, bytes, hours) is printed before
the first step.
"""

from __future__ import annotations

from ctcdraft.config.early_checks import check_before_imports

if __name__ == "__main__":
    check_before_imports("train")  # before the imports below, which take seconds

from contextlib import closing

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from ctcdraft.config import build, drafters
from ctcdraft.config.cli import entry_point, error_sentence, run_hydra_main
from ctcdraft.config.sweep_jobs import track_job
from ctcdraft.config.training_run import TrainingRun, refuse_wrong_training
from ctcdraft.corpus.chat_template import corpus_warnings
from ctcdraft.distributed import Distributed, from_environment, init_distributed
from ctcdraft.planning.training import plan_training, smoke_test
from ctcdraft.training.lora import KLRegularizedObjective
from ctcdraft.training.trainer import Trainer, TrainerSettings
from ctcdraft.training.validation import DecodingValidation


@hydra.main(version_base=None, config_path="configs", config_name="train")
@entry_point
def main(config: DictConfig) -> float:
    with track_job(config, error_sentence):
        run = TrainingRun.of(config) if config.plan_only else None
        if run is not None and plan_without_base(run):  # such a dry run joins no process group
            return 0.0
        distributed = init_distributed(config.device, config.timeout_minutes)
        # On several machines only the first may have the directory.
        run = run or distributed.from_main(lambda: TrainingRun.of(config))
        if (tau := distributed.from_main(run.complete_job)) is not None:  # before the base model is loaded
            return tau
        run.use_device(config.device)
        if plan_without_base(run):  # a resumed run counts by its own config
            return 0.0
        with run.lock():
            return train(run, distributed)


def plan_without_base(run: TrainingRun) -> bool:
    """Print the plan, and return True, if nothing else is asked for and no weights of the base are here."""
    refuse_wrong_training(run.config)
    plan = build.plan_without_base(run.config) if run.config.plan_only else None
    if plan is not None and from_environment().is_main:
        print(plan)
    return plan is not None


def train(run: TrainingRun, distributed: Distributed) -> float:
    """Train a run, or print its plan; return the best mean acceptance length (tau) of its validations."""
    config, settings = run.config, TrainerSettings.from_config(run.config.trainer)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    base = instantiate(config.base)
    # The initial weights depend on the seed alone, not on what was drawn while the base model was loaded.
    torch.manual_seed(config.seed)
    with base.gathered_parameters():  # a drafter may copy weights of the base model
        drafter = drafters.build_drafter(config.drafter, base).train()
    objective, states, decoding = (instantiate(config[part]) for part in ("objective", "hidden_states", "decoding"))
    engine = build.build_engine(config, drafter, distributed)
    adapter = build.build_adapter(config, base, drafter, engine)
    # Incompatible parts fail here, before responses are generated, which takes hours for a large corpus.
    smoke_test(base, drafter, objective, engine, config.trainer.compile)

    corpus = build.load_corpus(config, base, distributed)
    if corpus is None:  # only the plan was asked for, and the responses are not generated yet
        return 0.0
    rows, prompts = build.split_corpus(config, corpus, base, drafter)
    batches = build.build_batches(config, rows, base, states, objective.labels, adapter, distributed)
    if adapter is not None:
        objective = KLRegularizedObjective(objective, adapter)
    steps = (settings.steps, settings.gradient_accumulation_steps, settings.save_total_limit, run.finished_steps)
    plan = plan_training(base, drafter, objective, batches, engine, *steps)
    if distributed.is_main:
        print(*corpus_warnings(corpus.manifest), plan, sep="\n")
    if config.plan_only:
        return 0.0

    validation = DecodingValidation(base, prompts, decoding, distributed)
    with closing(build.build_feed(config, batches)) as feed:  # prefetching runs in a thread
        trainer = Trainer(run.directory, drafter, objective, feed, engine, validation, settings, adapter)
        run.begin(trainer, base, corpus.manifest["hash"])
        tau = trainer.fit(run.loggers(trainer))
    if distributed.is_main:
        print(f"best validation tau {tau:.3f}; the run is {run.directory.path}")
    return tau


if __name__ == "__main__":
    run_hydra_main(main)
