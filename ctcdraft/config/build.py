"""Objects of a training from config nodes: corpus, engine, batches and dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.config.drafters import build_drafter
from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.batches import Batches, PrefetchingBatches, first_fit_packing, one_per_row
from ctcdraft.corpus.hidden_states import compute_hidden_states, refuse_over_limit
from ctcdraft.corpus.token_store import refuse_wrong_masks
from ctcdraft.distributed import Distributed, Shard, from_environment
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec
from ctcdraft.planning.corpus import plan_corpus, plan_corpus_dry_run
from ctcdraft.planning.dry_run import CorpusStats, plan_dry_run
from ctcdraft.planning.workload import least_row_tokens
from ctcdraft.training.engine import OptimizerSettings
from ctcdraft.training.validation import split_held_out

CORPUS_KEYS = ("corpus.", "answers", "data_seed")  # keys that decide prompts and responses


def build_engine(config: Any, drafter: Any, distributed: Any) -> Any:
    """Return the engine of a training config, which takes the optimiser steps of a drafter."""
    settings, parameters = OptimizerSettings.from_config(config.trainer), drafter.trainable_parameters()
    if not parameters:
        name = config.drafter.name
        raise InputError(f"drafter={name} has no weights to train; use it as it is: evaluate.py contestants=[{name}]")
    return instantiate(config.engine)(drafter, parameters, settings, distributed)


def build_adapter(config: Any, base: Any, drafter: Any, engine: Any) -> Any:
    """Return the LoRA adapter of the base model, which the engine then trains too; None with adapt=none.

    Call it after the drafter is built, whose weights may be initialised from the unchanged base model.
    """
    if config.adapt is None:
        return None
    adapter = instantiate(config.adapt)(base, drafter)
    engine.add_param_group(list(adapter.parameters.values()), adapter.learning_rate)
    return adapter


def resolve_corpus_paths(config: DictConfig) -> tuple[Any, Path]:
    """Return where prompts come from, and the folder of the prepared corpus, which may not exist yet.

    corpus.path names a prepared corpus (a folder), or prompts to prepare.
    """
    given, prompts = config.corpus.path, config.prompts.path
    if given == prompts:
        return prompts, Path(config.prepared)
    folder = Path(str(given))
    # Downloaded prompts may contain a manifest.json of their own, but no parts or shards.
    if (folder / "manifest.json").is_file() and (part_files.list_parts(folder) or part_files.list_shards(folder)):
        return prompts, folder
    return given, Path(config.prepared)


def load_corpus(config: DictConfig, base: Any, processes: Distributed) -> prepared.PreparedCorpus | None:
    """Return the corpus of this base model; None with plan_only and no corpus yet.

    Where it is absent, all processes generate it together.
    """
    prompts, folder = resolve_corpus_paths(config)

    def read() -> prepared.PreparedCorpus:
        return prepared.read_corpus(folder, base.fingerprint())

    absent = any(processes.all_gather_object(processes.is_local_main and not prepared.is_complete(folder)))
    if folder != Path(config.prepared) and not absent:
        return processes.main_process_first(read)
    corpus = processes.from_main(lambda: instantiate(config.corpus, path=prompts))
    answers, plan = instantiate(config.answers), None
    # A corpus made otherwise is refused only where the command line sets prompts or responses.
    specified = any(key.lstrip("+").startswith(CORPUS_KEYS) for key in HydraConfig.get().overrides.task)
    if absent:
        share = Shard(1, processes.world_size)
        plan = processes.from_main(lambda: plan_corpus(base, corpus, answers, folder, share))
        if processes.is_main:
            print(plan)
        refuse_large_store(config, base, *least_tokens(config, base, corpus, answers))
        if config.plan_only:
            return None
    elif not specified and (differing := prepared.differing_settings(base, corpus, answers, folder)):
        if processes.is_main:
            print(f"the corpus in {folder} is used as it is; it was made with {', '.join(differing)}")
        return processes.main_process_first(read)
    if config.plan_only:
        processes.main_process_first(read)  # a plan repairs nothing
    # A complete corpus is only checked against these prompts and settings.
    settings = {"corpus": portable_config(config.corpus)}
    prepared.prepare(base, corpus, answers, folder, settings, planned=plan, processes=processes)
    return processes.main_process_first(read)


def planned_processes(config: DictConfig) -> int:
    """Return the number of processes that a plan is made for."""
    return config.plan.get("processes") or from_environment().world_size


def least_tokens(config: DictConfig, base: Any, corpus: Any, answers: Any) -> tuple[int, int]:
    """Return how many tokens a corpus has at least, before it has responses, and its conversations."""
    longest = min(config.trainer.max_length, base.context_length)
    return least_row_tokens(corpus.prompts, base, longest) * answers.samples, len(corpus.prompts) * answers.samples


def refuse_large_store(config: DictConfig, base: Any, tokens: int, rows: int, estimate: str = "at least ") -> None:
    """Raise InputError where the hidden states of a corpus would be more than may be stored."""
    states = config.hidden_states
    if "limit_gb" in states:
        refuse_over_limit(tokens, rows, base, states.precision, states.limit_gb, estimate)


def portable_config(node: Any) -> Any:
    """Return the plain values of a node, with paths inside this repository relative to its root.

    So files that are written into run directories do not depend on where the repository is.
    """

    def portable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: portable(item) for key, item in value.items()}
        if isinstance(value, list):
            return [portable(item) for item in value]
        return value.removeprefix(f"{REPOSITORY}/") if isinstance(value, str) else value

    return portable(OmegaConf.to_container(node, resolve=True))


def split_corpus(config: Any, corpus: Any, base: Any, drafter: Any) -> tuple[Any, Any]:
    """Return the rows to train on and the validation prompts; choose the drafter's draft vocabulary from the rows."""
    refuse_wrong_masks(corpus.rows, base.tokenizer, base.stop_token_ids)
    max_length = min(config.trainer.max_length, base.context_length)
    rows, prompts = split_held_out(corpus.rows, config.trainer.probe_prompts, max_length)
    if config.trainer.probe_prompts and not prompts:
        raise InputError(
            f"validation needs two prompts at least, one of them to train on, and the {len(corpus.rows)} rows of the "
            "corpus are of one; prepare more prompts (corpus.limit=), or give trainer.probe_prompts=0"
        )
    if drafter.has_draft_vocab:
        drafter.set_draft_vocab(rows.token_counts(base.vocabulary), base.stop_token_ids)
    return rows, prompts


def build_batches(config: Any, rows: Any, base: Any, states: Any, labels: int, adapter: Any, distributed: Any) -> Any:
    """Return the training batches of the rows of a corpus; raise InputError where there are too few rows."""
    settings = config.trainer
    if not rows:
        key = "trainer.max_length" if settings.max_length <= base.context_length else "base.context_length"
        length = min(settings.max_length, base.context_length)
        raise InputError(f"no response of the corpus begins within {length} tokens; raise {key}")
    per_step = settings.gradient_accumulation_steps
    if settings.batch_size * per_step > len(rows):
        times = f" x trainer.gradient_accumulation_steps={per_step}" if per_step > 1 else ""
        raise InputError(
            f"trainer.batch_size={settings.batch_size}{times} is more than the {len(rows)} rows to train on; "
            "lower it, or prepare more prompts (corpus.limit=)"
        )
    packing = first_fit_packing(settings.pack_length) if settings.pack_length is not None else one_per_row
    # The adapter's hidden states carry a gradient; the base's own do not.
    reading = compute_hidden_states if adapter is None else adapter.read
    size, anchors = settings.batch_size * per_step, settings.anchors_per_sequence
    return Batches(rows, base, size, anchors, labels, config.seed, states, packing, reading, per_step, distributed)


def build_feed(config: Any, batches: Any) -> Any:
    """Return the batches themselves, or with trainer.prefetch their prefetching by a thread; close it after use."""
    total = config.trainer.steps * config.trainer.gradient_accumulation_steps
    return PrefetchingBatches(batches, total) if config.trainer.prefetch else batches


def meta_base(config: Any) -> Any:
    """Return the base of a `base` node on the meta device if it cannot be loaded on this machine, else None."""
    values: Any = OmegaConf.to_container(config, resolve=True)
    if values["_target_"] != "ctcdraft.models.loading.load_base":
        return None  # the other bases have random weights and can always be made
    return instantiate({**values, "_target_": "ctcdraft.models.meta.meta_base_if_absent", "_convert_": "all"})


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
    hardware, processes = HardwareSpec.of(config.plan), planned_processes(config)
    prompts, folder = resolve_corpus_paths(config)
    if prepared.is_complete(folder):
        manifest = part_files.read_manifest(folder) or {}
        corpus_plan, stats = str(meta), CorpusStats.from_manifest(manifest, meta.base.context_length)
        tokens = min(stats.tokens, stats.rows * config.trainer.max_length)  # without knowing which rows are cut
        refuse_large_store(config, meta.base, tokens, stats.rows, "about ")
    else:
        corpus, answers = instantiate(config.corpus, path=prompts), instantiate(config.answers)
        plan = plan_corpus_dry_run(meta, corpus, answers, hardware, Shard(1, processes))
        refuse_large_store(config, meta.base, *least_tokens(config, meta.base, corpus, answers))
        corpus_plan, stats = str(plan), CorpusStats.from_work(plan.work)
    objective = instantiate(config.objective)
    training_plan = plan_dry_run(meta.base, drafter, objective, stats, config.trainer, hardware, processes)
    parts = {
        "products of engine=muon": config.engine._target_.endswith("MuonEngine"),
        "shards of base.zero3=true": config.base.get("zero3"),
        "base.quantization": config.base.get("quantization"),
    }
    uncounted = ", ".join(name for name, given in parts.items() if given)
    return f"{corpus_plan}\n{training_plan}" + (f"\nnot counted {uncounted}" if uncounted else "")
