"""The base LLM: tokens in, states and logits out. Frozen, never patched; it knows nothing of drafts or text tasks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ctcdraft.decoding.static_shapes import StaticShapeForward
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.adapters import attach_adapter, refuse_import
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import load_pretrained
from ctcdraft.models.compatibility import ReferenceLogits, refuse_changed_logits, refuse_inexact_tree_attention
from ctcdraft.models.device_map import DeviceMapOptions, gather_shared_modules, layer_devices
from ctcdraft.models.fingerprint import tensors_hash
from ctcdraft.models.values import (
    looks_like_folder,
    read_chat_template,
    refuse_absent_device,
    refuse_unknown_dtype,
    weight_options,
)


def load_base(
    path: str,
    dtype: str,
    device: str,
    name: str | None = None,
    revision: str | None = None,
    attention: str = "sdpa",
    context_length: int | None = None,
    chat_template_file: str | None = None,
    adapter: str | None = None,
    taps: Sequence[str | int] = ("last",),
    config: Any = None,
    quantised: str | None = None,
    fixed: bool = False,
    device_map: Any = None,
    max_memory: Any = None,
    offload_folder: str | None = None,
    adapted: str | None = None,
    zero3: bool = False,
    compiled: bool = False,
) -> BaseLM:
    """Load a base from a folder or a hub id; `adapter` is a peft LoRA folder that is merged before freezing.

    taps: "last", then the layers whose states drafters see too (0: the embeddings, k: what layer k gives out).
    config: for plans without the weights (paper.py); what is loaded brings its own.
    quantised: one of QUANTISED, which needs its package. fixed: trees
    are padded to few shapes, and on a GPU each of these is captured as a graph. compiled: by torch, once a shape.
    device_map and what follows it: the layers lie over several devices (placing.py); states and logits are on `device`
    all the same. adapted: the folder of what a run has trained along with its head (RUN/adapter), merged like
    `adapter`; with it the base is another one, and says so. zero3: in shards over the processes of torchrun
    (sharding.py).
    """
    import transformers

    refuse_unknown_dtype(dtype)
    refuse_absent_device(device)
    reads = StaticShapeForward.of(fixed, compiled)
    transformers.utils.logging.disable_progress_bar()
    placing = DeviceMapOptions(device_map, max_memory, offload_folder) if device_map is not None else None
    changes = {"fixed": fixed, "adapter": adapter, "adapted": adapted}
    refuse_spread(placing is not None, zero3, bool(quantised), changes)
    if looks_like_folder(path) and not (Path(path) / "config.json").is_file():
        raise InputError(f"no base LLM at {path}: there is no config.json; give a Hugging Face folder as base.path=")
    if zero3:
        from ctcdraft.models.zero3 import load_sharded

        named = name or Path(path).name
        return load_sharded(path, dtype, device, named, revision, attention, context_length, chat_template_file, taps)
    lm, tokenizer = load_pretrained(path, revision, attention, weight_options(dtype, device, quantised, placing))
    if adapter is not None:
        lm = attach_adapter(lm, adapter)
    reference = ReferenceLogits.of(lm, path)
    if adapter is not None:
        lm = lm.merge_and_unload()
    if placing is not None:
        gather_shared_modules(lm, device)
    template = read_chat_template(chat_template_file) if chat_template_file else None
    base = BaseLM(lm, tokenizer, name or Path(path).name, revision, context_length, template, taps, quantised)
    if placing is not None:
        devices = layer_devices(lm, base.device)
        base.layer_devices = devices if len(set(devices)) > 1 else None
    elif quantised is None:  # what is quantised was loaded where it stays, and has a type of its own
        base = base.to(device, getattr(torch, dtype))
    refuse_changed_logits(base, reference)
    if adapted is not None:
        merge_trained_adapter(base, Path(adapted))
    base.fixed = reads
    refuse_inexact_tree_attention(base)
    return base


def refuse_spread(placed: bool, sharded: bool, quantised: bool, changes: Mapping[str, Any]) -> None:
    """Raise InputError where a base over several devices or processes is to be changed, too, by values of `changes`."""
    changed = [key for key, value in changes.items() if value]
    if placed and changed:
        raise InputError(f"base.{changed[0]}= is for a base on one device; leave it out, or base.device_map=")
    if sharded and (placed or quantised or changed):
        raise InputError("base.zero3=true takes the base as it is; leave out its device_map, quantised, fixed, adapter")


def merge_trained_adapter(base: BaseLM, folder: Path) -> None:
    """Merge what a run has trained along with its head into the base that it began with."""
    import peft
    from safetensors.torch import load_file

    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise InputError(f"there is no {weights}; give the adapter/ of a run of adapt=lora as base.adapted=")
    try:
        base.adapted = tensors_hash(load_file(weights))
        refuse_import(peft.PeftConfig.from_pretrained(str(folder)), str(folder))
        peft.PeftModel.from_pretrained(base.lm, str(folder)).merge_and_unload()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"cannot merge {folder} into {base.name}: {first_line(error)}; check base.adapted=") from error
    base.lm.eval().requires_grad_(False)
    base.name += ", changed by LoRA"


def without_generation_config(lm: Any) -> Any:
    """A second handle on the same weights with an empty generation config: `generate` fills what it is not told from
    the model's own, such as top_p or a repetition penalty, and would then say other words than its logits do."""
    handle = copy.copy(lm)
    handle.generation_config = type(lm.generation_config)()
    return handle
