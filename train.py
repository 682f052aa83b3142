"""Config -> objects -> trainer.fit(): `python train.py experiment=demo drafter.frames=8`."""

from __future__ import annotations

import shlex
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.config.allowed import parse_trust, printable, read_resumed_config
from ctcdraft.config.build import build_drafter, meta_base, portable_config
from ctcdraft.config.cli import entry_point, error_sentence, run_hydra_main
from ctcdraft.config.early_checks import check_before_imports
from ctcdraft.config.sweep_jobs import run_directory, run_title, sweep_directory, track_job
from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.answer_mask import refuse_wrong_masks
from ctcdraft.corpus.batches import Batches, TokenSequences, first_fit_packing, one_per_row
from ctcdraft.corpus.chat_template import corpus_warnings
from ctcdraft.corpus.hidden_states import OnlineHiddenStates, compute_hidden_states
from ctcdraft.corpus.prefetch import PrefetchingBatches
from ctcdraft.distributed import Distributed, from_environment, init_distributed, local_batches, main_process_first
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError, check_int
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.meta import MetaBase
from ctcdraft.planning import corpus as corpus_plan
from ctcdraft.planning.dry_run import CorpusStats
from ctcdraft.planning.dry_run import plan_dry_run as paper_plan
from ctcdraft.planning.training import plan_training, smoke_step
from ctcdraft.training.deepspeed import DeepSpeedEngine
from ctcdraft.training.engine import compile_forward
from ctcdraft.training.lock import run_lock
from ctcdraft.training.loggers import JsonlLogger, refuse_absent
from ctcdraft.training.lora import KLRegularizedObjective, LoRAAdapter
from ctcdraft.training.run_directory import RunDirectory
from ctcdraft.training.settings import refuse_impossible
from ctcdraft.training.trainer import CheckpointPolicy, Trainer
from ctcdraft.training.validation import DecodingValidation, split_held_out

if __name__ == "__main__":
    check_before_imports("train")  # above the imports below, which take seconds


@hydra.main(version_base=None, config_path="configs", config_name="train")
@entry_point
def main(config: DictConfig) -> float:
    with track_job(config, error_sentence):
        return train(config)


def train(config: DictConfig) -> float:
    """Train the run of the config, or print its plan; returns the best tau of its probes."""
    run, resuming, sweep = run_directory(config), config.resume is not None, sweep_directory(config)
    if resuming:
        config = resumed_config(run, config)
    elif run.config.exists() and not config.overwrite:
        if sweep is None or run.config.read_text() != OmegaConf.to_yaml(config, resolve=True):
            run.refuse_to_overwrite()
        resuming = True  # the same sweep again: its jobs go on where they stopped
    refuse_before_loading(config)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    paper = meta_base(config.base) if config.plan_only else None
    if paper is not None:
        planned = plan_without_base(config, paper)
        if from_environment().is_main:
            print(planned)
        return 0.0
    with nullcontext() if config.plan_only or not from_environment().is_main else run_lock(run.path):
        return train_exclusively(config, run, resuming, sweep)


def train_exclusively(config: DictConfig, run: RunDirectory, resuming: bool, sweep: Path | None) -> float:
    """Train in a directory that no other process uses."""
    peers = init_distributed(config.device)
    base, drafter, objective, states, decoding, engine, adapter = assemble(config, peers)
    corpus = main_process_first(peers, lambda: load_corpus(config, base))
    if corpus is None:
        return 0.0
    refuse_wrong_masks(corpus.rows, base.tokenizer, base.stop_token_ids)
    max_length = min(config.trainer.max_length, base.context_length)
    rows, held_out = split_held_out(corpus.rows, config.trainer.probe_prompts, max_length)
    if drafter.has_draft_vocab:
        drafter.set_draft_vocab(rows.token_counts(base.vocabulary), base.stop_token_ids)
    reading = compute_hidden_states if adapter is None else adapter.read
    batches = make_batches(config, rows, base, objective.labels, states, reading)
    probe = DecodingValidation(base, held_out, decoding)
    stride = peers.world_size  # from one batch of this process to its next
    total = config.trainer.steps * config.trainer.accumulate
    feed = PrefetchingBatches(batches, total, stride) if config.trainer.prefetch else batches
    objective = objective if adapter is None else KLRegularizedObjective(objective, adapter)
    trainer = make_trainer(config.trainer, run, drafter, objective, feed, engine, probe, adapter)
    done = run.last_step if resuming else 0
    costs = plan_training(
        base, drafter, objective, batches, engine, config.trainer.steps, config.trainer.accumulate, done
    )
    if peers.is_main:
        print(*corpus_warnings(corpus.manifest), costs, sep="\n")
    if config.plan_only:
        return 0.0
    config_text = OmegaConf.to_yaml(config, resolve=True)
    if resuming:
        run.refuse_other_corpus(corpus.manifest["hash"])
        trainer.restore()
        if trainer.step >= config.trainer.steps:
            print(f"{run.path} has its {trainer.step:,} steps already; trainer.steps= may be raised")
    peers.barrier()  # until all have found the directory as it was
    if peers.is_main and resuming:
        run.write_config(config_text)  # steps may have been raised
    elif peers.is_main:
        run.create(config_text, base.fingerprint() | {"corpus": corpus.manifest["hash"]}, config.overwrite)
        run.write_command(rerun_command(run))
    with closing(feed):
        tau = trainer.fit(make_loggers(config, run, trainer.step, run_title(run.path, sweep)) if peers.is_main else [])
    if peers.is_main:
        print(f"best probe tau {tau:.3f}; the run is {run.path}")
    return tau


def refuse_before_loading(config: DictConfig) -> None:
    """What is wrong with the config alone."""
    refuse_impossible(config.trainer, config.seed)
    local_batches(config.trainer.accumulate, from_environment())
    refuse_untrainable(config.drafter)
    refuse_missing_objective(config)
    refuse_unadaptable(config)
    refuse_unsupported_zero3(config)
    refuse_absent(get_class(part._target_) for part in config.logger.values() if part is not None)


def assemble(config: DictConfig, peers: Distributed) -> tuple[Any, ...]:
    """Base, drafter, objective, states, decoding, engine and the base's adapter (None without one), tried out together:
    an hour of answers later would be too late to be told."""
    base = instantiate(config.base)
    torch.manual_seed(config.seed)
    with base.gathered_parameters():
        drafter = build_drafter(config.drafter, base).train()
    objective, states, decoding = (instantiate(config[part]) for part in ("objective", "states", "decoding"))
    engine = make_engine(config, drafter, peers)
    adapter = make_adapter(config, base, drafter, engine)
    smoke_test(config, base, drafter, objective, engine)
    return base, drafter, objective, states, decoding, engine, adapter


def make_trainer(settings: DictConfig, run: RunDirectory, *parts: Any) -> Trainer:
    care = CheckpointPolicy(settings.checkpoint_every, settings.checkpoint_minutes, settings.keep, settings.patience)
    drafter, objective, batches, engine, probe, adapter = parts
    rhythm = (settings.steps, settings.accumulate, settings.probe_every)
    return Trainer(run, drafter, objective, batches, engine, probe, *rhythm, care, adapter)


def refuse_untrainable(drafter: DictConfig) -> None:
    if not issubclass(get_class(drafter._target_), DraftHead):
        raise InputError(
            f"drafter={drafter.name} has no weights to train; name it among the contestants of evaluate.py"
        )


def refuse_unadaptable(config: DictConfig) -> None:
    """Raise InputError where the base is to learn and something needs it as it was."""
    if config.adapt is None:
        return
    if config.base.get("zero3"):
        raise InputError("adapt=lora needs a base whole on one device; leave out base.zero3=")
    if get_object(config.states._target_) is not OnlineHiddenStates:
        raise InputError("adapt=lora changes the base's states at every step, and those stored are old: states=live")
    if config.base.get("quantised") or config.base.get("device_map"):
        raise InputError("adapt=lora needs a base whole on one device; leave out base.quantised= and base.device_map=")
    if issubclass(get_class(config.engine._target_), DeepSpeedEngine):
        raise InputError("adapt=lora is for engine=torch and muon: engine=deepspeed holds the state of the head alone")


def refuse_unsupported_zero3(config: DictConfig) -> None:
    """Raise InputError where one process would read a base that all of them must read together."""
    if not config.base.get("zero3"):
        return
    if config.trainer.probe_prompts != 0:
        raise InputError(
            "base.zero3=true is read by all processes at once, and one alone probes; trainer.probe_prompts=0"
        )
    if get_object(config.states._target_) is not OnlineHiddenStates:
        raise InputError("base.zero3=true is read by all processes at once, and one alone stores states; states=live")
    if not prepared.is_complete(resolve_corpus_paths(config)[1]):
        raise InputError(
            f"base.zero3=true answers no prompts, and there is no corpus in {resolve_corpus_paths(config)[1]}; "
            "prepare it "
            "with data/prepare.py, base.device_map= or answers=openai"
        )


def refuse_missing_objective(config: DictConfig) -> None:
    if "objective" not in config:
        raise InputError(
            f"drafter={config.drafter.name} has no objective of its own (configs/objective/of_*.yaml); give objective="
        )


def rerun_command(run: RunDirectory) -> str:
    """What to type to have this run once more, beside it; of a sweep's job, this job alone."""
    places = ("run=", "overwrite=")
    typed = [word for word in HydraConfig.get().overrides.task if not word.startswith(places)]
    return shlex.join(["python", "train.py", *typed, f"run={run.path}-again"])


def resumed_config(run: RunDirectory, config: DictConfig) -> Any:
    """The run's own config; of the command line only resume=, trust= and a raised trainer.steps count."""
    typed = HydraConfig.get().overrides.task
    others = [word for word in typed if not word.startswith(("resume=", "trainer.steps=", "trust="))]
    if others:
        raise InputError(
            f"resume={run.path} takes that run's own config, but {', '.join(others)} was given too; "
            "only trainer.steps= may be raised"
        )
    # Keys that came later than the run have their defaults.
    own: Any = read_resumed_config(run.config, parse_trust(config.trust))
    own.trainer = OmegaConf.merge(config.trainer, own.trainer)
    own.adapt = own.get("adapt")
    refuse_server(own, run)
    if any(word.startswith("trainer.steps=") for word in typed):
        if check_int(config.trainer.steps, "trainer.steps") < own.trainer.steps:
            raise InputError(
                f"trainer.steps={config.trainer.steps} is less than the {own.trainer.steps} of {run.path}; "
                "it may only be raised"
            )
        own.trainer.steps = config.trainer.steps
    return own


def refuse_server(own: Any, run: RunDirectory) -> None:
    """Raise InputError where a run that goes on would ask a server: its config may name any address, any prompts and
    any variable of the environment as the key to send there. A run has had its whole corpus when it began."""
    url = (own.get("answers") or {}).get("url")
    if url is not None and not prepared.is_complete(place := resolve_corpus_paths(own)[1]):
        raise InputError(
            f"{run.config} asks the server at {printable(url)} for answers, and there is no complete corpus in "
            f"{place}; "
            "bring that corpus back, or prepare it with data/prepare.py, where you name the server yourself"
        )


def load_corpus(config: DictConfig, base: Any) -> prepared.PreparedCorpus | None:
    """The corpus of this base, prepared now where it is not there yet; None if only the plan was wanted."""
    source, path = resolve_corpus_paths(config)
    if path == Path(config.prepared) or not prepared.is_complete(path):
        corpus, answers = instantiate(config.corpus, path=source), instantiate(config.answers)
        settings, planned = {"corpus": portable_config(config.corpus)}, None
        if prepared.is_complete(path):
            otherwise = prepared.differing_settings(base, corpus, answers, path)
            if otherwise and not is_corpus_specified():
                print(f"the corpus in {path} is taken as it is, made with {', '.join(otherwise)}")
                return prepared.read_corpus(path, base.fingerprint())
        else:
            planned = corpus_plan.plan_corpus(base, corpus, answers, path, prepared.SINGLE_SHARD)
            print(planned)
            if config.plan_only:
                return None
        # A corpus that is there already is checked against these prompts and settings, and left as it is.
        prepared.prepare(base, corpus, answers, path, settings, planned=planned)
    return prepared.read_corpus(path, base.fingerprint())


def is_corpus_specified() -> bool:
    """Whether the command line says how prompts or answers are to be: a corpus made otherwise then will not do."""
    ours = ("corpus.", "answers", "data_seed")
    return any(word.lstrip("+").startswith(ours) for word in HydraConfig.get().overrides.task)


def plan_without_base(config: DictConfig, paper: MetaBase) -> str:
    """What this run would cost with a base that is not here, the making of its corpus included."""
    kind: Any = get_class(config.drafter._target_)
    if kind.usable_untrained:
        raise InputError(
            f"drafter={config.drafter.name} brings weights of its own, so it is not planned on paper; plan it where "
            f"{paper.base.name} can be loaded"
        )
    if config.adapt is not None:
        raise InputError("a base that learns too (adapt=lora) is not planned on paper; plan it with adapt=none")
    with torch.device("meta"):
        drafter = build_drafter(config.drafter, paper.base).eval()  # noise in training would be drawn from values
    objective, rate = instantiate(config.objective), HardwareSpec.of(config.plan)
    source, path = resolve_corpus_paths(config)
    if prepared.is_complete(path):
        corpus_plan_text, corpus_stats = (
            str(paper),
            CorpusStats.from_manifest(part_files.read_manifest(path) or {}, paper.base.context_length),
        )
    else:
        corpus, answers = instantiate(config.corpus, path=source), instantiate(config.answers)
        planned = corpus_plan.plan_corpus_dry_run(paper, corpus, answers, rate, prepared.SINGLE_SHARD)
        corpus_plan_text, corpus_stats = str(planned), CorpusStats.from_work(planned.work)
    return f"{corpus_plan_text}\n" + paper_plan(
        paper.base, drafter, objective, corpus_stats, config.trainer, rate, from_environment().world_size
    )


def resolve_corpus_paths(config: DictConfig) -> tuple[Any, Path]:
    """Where prompts come from, and where the prepared corpus is or will be.

    corpus.path names a prepared corpus (a folder), or prompts to prepare.
    """
    given, source = config.corpus.path, config.prompts.path
    if given == source:
        return source, Path(config.prepared)
    folder = Path(str(given))
    # Downloaded prompts may bring a manifest.json of their own.
    if (folder / "manifest.json").is_file() and part_files.list_parts(folder):
        return source, folder
    return given, Path(config.prepared)


def make_batches(
    config: DictConfig, rows: TokenSequences, base: Any, labels: int, states: Any, reading: Any
) -> Batches:
    settings = config.trainer
    if not rows:  # hold_out leaves out what would have nothing to learn from
        key = "trainer.max_length" if settings.max_length <= base.context_length else "base.context_length"
        length = min(settings.max_length, base.context_length)
        raise InputError(f"no answer of the corpus begins within {length} tokens; raise {key}")
    if settings.rows > len(rows):
        raise InputError(
            f"trainer.rows={settings.rows} is more than the {len(rows)} answers there are to train on; lower it, or "
            "prepare more prompts (corpus.limit=)"
        )
    filling = first_fit_packing(settings.pack) if settings.pack is not None else one_per_row
    return Batches(rows, base, settings.rows, settings.anchors, labels, config.seed, states, filling, reading)


def make_engine(config: DictConfig, drafter: DraftHead, peers: Distributed) -> Any:
    settings = config.trainer
    return instantiate(config.engine)(
        drafter,
        drafter.trainable_parameters(),
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        final_share=settings.final_share,
        betas=tuple(settings.betas),
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        clip_value=settings.clip_value,
        autocast=settings.autocast,
        peers=peers,
    )


def make_adapter(config: DictConfig, base: Any, drafter: DraftHead, engine: Any) -> LoRAAdapter | None:
    """What of the base learns too, if anything does. After the drafter, which may begin with the base's weights."""
    if config.adapt is None:
        return None
    adapter = instantiate(config.adapt)(base, drafter)
    engine.add_param_group(list(adapter.parameters.values()), adapter.learning_rate)
    return adapter


def smoke_test(config: DictConfig, base: Any, drafter: DraftHead, objective: Any, engine: Any) -> None:
    smoke_step(base, drafter, objective, engine)
    if config.trainer.compile is not None:
        compile_forward(drafter, config.trainer.compile, lambda: smoke_step(base, drafter, objective, engine))


def make_loggers(config: DictConfig, run: RunDirectory, first_step: int, called: tuple[str, str | None]) -> list[Any]:
    loggers: list[Any] = [JsonlLogger(run.metrics, first_step)]
    values = OmegaConf.to_container(config, resolve=True)
    others = [instantiate(part) for part in config.logger.values() if part is not None]
    loggers += [other(run.path, name=called[0], config=values, group=called[1]) for other in others]
    return loggers


if __name__ == "__main__":
    run_hydra_main(main)
