"""The corpus of a training run: where it is, prepared if it is absent, planned where the base model is absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig

from ctcdraft.config.build import build_drafter, meta_base, portable_config
from ctcdraft.corpus import part_files, prepared
from ctcdraft.distributed import from_environment
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec
from ctcdraft.planning.corpus import plan_corpus, plan_corpus_dry_run
from ctcdraft.planning.dry_run import CorpusStats, plan_dry_run

CORPUS_KEYS = ("corpus.", "answers", "data_seed")  # keys that decide prompts and responses


def resolve_corpus_paths(config: DictConfig) -> tuple[Any, Path]:
    """Return where prompts come from, and the folder of the prepared corpus, which may not exist yet.

    corpus.path names a prepared corpus (a folder), or prompts to prepare.
    """
    given, prompts = config.corpus.path, config.prompts.path
    if given == prompts:
        return prompts, Path(config.prepared)
    folder = Path(str(given))
    # Downloaded prompts may contain a manifest.json of their own, but no parts.
    if (folder / "manifest.json").is_file() and part_files.list_parts(folder):
        return prompts, folder
    return given, Path(config.prepared)


def load_corpus(config: DictConfig, base: Any) -> prepared.PreparedCorpus | None:
    """Return the corpus of this base model, prepared now where it is absent; None with plan_only and no corpus yet."""
    prompts, folder = resolve_corpus_paths(config)
    if folder != Path(config.prepared) and prepared.is_complete(folder):
        return prepared.read_corpus(folder, base.fingerprint())
    corpus, answers = instantiate(config.corpus, path=prompts), instantiate(config.answers)
    plan = None
    if not prepared.is_complete(folder):
        plan = plan_corpus(base, corpus, answers, folder, prepared.SINGLE_SHARD)
        print(plan)
        if config.plan_only:
            return None
    elif not is_corpus_specified():
        differing = prepared.differing_settings(base, corpus, answers, folder)
        if differing:
            print(f"the corpus in {folder} is used as it is; it was made with {', '.join(differing)}")
            return prepared.read_corpus(folder, base.fingerprint())
    # A complete corpus is only checked against these prompts and settings.
    prepared.prepare(base, corpus, answers, folder, {"corpus": portable_config(config.corpus)}, planned=plan)
    return prepared.read_corpus(folder, base.fingerprint())


def is_corpus_specified() -> bool:
    """Return whether the command line sets prompts or responses, so that a corpus made otherwise must be refused."""
    return any(override.lstrip("+").startswith(CORPUS_KEYS) for override in HydraConfig.get().overrides.task)


def plan_without_base(config: DictConfig) -> str | None:
    """Return the plan of a run on the meta device, its corpus included; None where the base model can be loaded."""
    meta = meta_base(config.base)
    if meta is None:
        return None
    drafter_class: Any = get_class(config.drafter._target_)
    if drafter_class.usable_untrained:
        raise InputError(
            f"drafter={config.drafter.name} brings weights of its own, which a dry run does not have; plan it where "
            f"{meta.base.name} can be loaded"
        )
    if config.adapt is not None:
        raise InputError(f"a dry run cannot plan adapt=lora; give adapt=none, or plan where {meta.base.name} is")
    with torch.device("meta"):
        drafter = build_drafter(config.drafter, meta.base).eval()  # training noise would be drawn from values
    hardware = HardwareSpec.of(config.plan)
    prompts, folder = resolve_corpus_paths(config)
    if prepared.is_complete(folder):
        manifest = part_files.read_manifest(folder) or {}
        corpus_plan, stats = str(meta), CorpusStats.from_manifest(manifest, meta.base.context_length)
    else:
        corpus, answers = instantiate(config.corpus, path=prompts), instantiate(config.answers)
        plan = plan_corpus_dry_run(meta, corpus, answers, hardware, prepared.SINGLE_SHARD)
        corpus_plan, stats = str(plan), CorpusStats.from_work(plan.work)
    objective, processes = instantiate(config.objective), from_environment().world_size
    training_plan = plan_dry_run(meta.base, drafter, objective, stats, config.trainer, hardware, processes)
    return f"{corpus_plan}\n{training_plan}"
