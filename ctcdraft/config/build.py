"""Objects from config nodes: the base of a dry run, and untrained or trained drafters."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError


def meta_base(config: Any) -> Any:
    """Return the base of a `base` node on the meta device if it cannot be loaded on this machine, else None.

    Only bases that `load_base` loads can be planned for without weights.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    if values["_target_"] != "ctcdraft.models.loading.load_base":
        return None
    return instantiate({**values, "_target_": "ctcdraft.models.meta.meta_base_if_absent", "_convert_": "all"})


def portable_config(node: Any) -> Any:
    """Return the plain values of a node, with paths inside this repository relative to its root.

    So files that are written into run directories do not depend on where the repository is.
    """
    from omegaconf import OmegaConf

    def portable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: portable(item) for key, item in value.items()}
        if isinstance(value, list):
            return [portable(item) for item in value]
        return value.removeprefix(f"{REPOSITORY}/") if isinstance(value, str) else value

    return portable(OmegaConf.to_container(node, resolve=True))


def build_drafter(config: Any, base: Any, **parts: Any) -> Any:
    """Return the drafter of a `drafter` node for this base.

    Args:
        parts: the drafters that a composite drafter combines, by role.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    values.pop("name", None)  # names report rows and files; no constructor takes it
    return instantiate(values, base=base, **parts)


def load_drafter(run: Path, base: Any, tree: Any | None, trust: Collection[str] = ()) -> Any:
    """Return the trained drafter of a run.

    Args:
        tree: config of another tree builder; None for the run's own.
        trust: further classes that the run's config may call (allowed.py).
    """
    from hydra.errors import InstantiationException

    from ctcdraft.config.allowed import read_run_config
    from ctcdraft.training.run_directory import RunDirectory

    directory = RunDirectory(run)
    directory.require()
    directory.refuse_other_base(base.fingerprint())
    config = read_run_config(directory.config, trust).drafter
    if tree is not None:
        config.tree = tree
    try:
        drafter = build_drafter(config, base)
    except InstantiationException as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise InputError(
                f"{directory.config} names {unknown[1]}, which no part of a drafter has in this version; read the run "
                "with the version that trained it, or train it again"
            ) from error
        raise
    directory.load_head(drafter)
    return drafter.for_inference(base)


def build_engine(config: Any, drafter: Any, distributed: Any) -> Any:
    """Return the engine of a training config, which takes the optimiser steps of a drafter."""
    from hydra.utils import instantiate

    from ctcdraft.training.engine import OptimizerSettings

    settings = OptimizerSettings.from_config(config.trainer)
    return instantiate(config.engine)(drafter, drafter.trainable_parameters(), settings, distributed)


def build_adapter(config: Any, base: Any, drafter: Any, engine: Any) -> Any:
    """Return the LoRA adapter of the base model, which the engine then trains too; None with adapt=none.

    Call it after the drafter is built, whose weights may be initialised from the unchanged base model.
    """
    from hydra.utils import instantiate

    if config.adapt is None:
        return None
    adapter = instantiate(config.adapt)(base, drafter)
    engine.add_param_group(list(adapter.parameters.values()), adapter.learning_rate)
    return adapter


def split_corpus(config: Any, corpus: Any, base: Any, drafter: Any) -> tuple[Any, Any]:
    """Return the rows to train on and the validation prompts; choose the drafter's draft vocabulary from the rows."""
    from ctcdraft.corpus.token_store import refuse_wrong_masks
    from ctcdraft.training.validation import split_held_out

    refuse_wrong_masks(corpus.rows, base.tokenizer, base.stop_token_ids)
    max_length = min(config.trainer.max_length, base.context_length)
    rows, prompts = split_held_out(corpus.rows, config.trainer.probe_prompts, max_length)
    if drafter.has_draft_vocab:
        drafter.set_draft_vocab(rows.token_counts(base.vocabulary), base.stop_token_ids)
    return rows, prompts


def build_batches(config: Any, rows: Any, base: Any, states: Any, labels: int, adapter: Any) -> Any:
    """Return the training batches of the rows of a corpus; raise InputError where there are too few rows."""
    from ctcdraft.corpus.batches import Batches, first_fit_packing, one_per_row
    from ctcdraft.corpus.hidden_states import compute_hidden_states

    settings = config.trainer
    if not rows:
        key = "trainer.max_length" if settings.max_length <= base.context_length else "base.context_length"
        length = min(settings.max_length, base.context_length)
        raise InputError(f"no response of the corpus begins within {length} tokens; raise {key}")
    if settings.rows > len(rows):
        raise InputError(
            f"trainer.rows={settings.rows} is more than the {len(rows)} responses to train on; lower it, or prepare "
            "more prompts (corpus.limit=)"
        )
    packing = first_fit_packing(settings.pack) if settings.pack is not None else one_per_row
    reading = compute_hidden_states if adapter is None else adapter.read
    return Batches(rows, base, settings.rows, settings.anchors, labels, config.seed, states, packing, reading)


def build_feed(config: Any, batches: Any, distributed: Any) -> Any:
    """Return the batches themselves, or with trainer.prefetch their prefetching by a thread; close it after use."""
    from ctcdraft.corpus.batches import PrefetchingBatches

    total = config.trainer.steps * config.trainer.accumulate
    return PrefetchingBatches(batches, total, distributed.world_size) if config.trainer.prefetch else batches
