"""Loading of base models: `base` in the config becomes a BaseLM.

A base is loaded by transformers, merged with its adapters, moved and cast, and then checked: it must still compute the
logits that transformers computed (compatibility.py) and read token trees exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ctcdraft.decoding.static_shapes import StaticShapeForward
from ctcdraft.errors import InputError
from ctcdraft.models.adapters import attach_adapter, merge_trained_adapter
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import load_pretrained
from ctcdraft.models.compatibility import ReferenceLogits, refuse_changed_logits, refuse_inexact_tree_attention
from ctcdraft.models.device_map import device_map_options, gather_shared_modules, layer_devices
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
    aux_layers: Sequence[str | int] = ("last",),
    config: Any = None,
    quantization: str | None = None,
    static_shapes: bool = False,
    device_map: Any = None,
    max_memory: Any = None,
    offload_folder: str | None = None,
    adapted: str | None = None,
    zero3: bool = False,
    compiled: bool = False,
) -> BaseLM:
    """Load a base from a folder or a hub id; the parameters are the keys of configs/base/local.yaml.

    Args:
        adapter: a peft LoRA folder that is merged before freezing.
        aux_layers: "last", then the auxiliary layers whose hidden states drafters read (0: the embeddings, k: layer k).
        config: ignored here; meta.py reads it for plans without weights.
        quantization: a key of values.QUANTIZATION_PACKAGES.
        static_shapes: pad trees to a few static shapes, each of which a GPU captures as a CUDA graph.
        compiled: compile each static shape with torch.compile.
        device_map, max_memory, offload_folder: distribute the layers (device_map.py); hidden states and logits are on
            `device` all the same.
        adapted: the adapter that a run trained together with its draft head (RUN/adapter). The merged base generates
            other text, which its name and its fingerprint state.
        zero3: shard the weights over the processes of torchrun (zero3.py).
    """
    import transformers

    refuse_unknown_dtype(dtype)
    refuse_absent_device(device)
    padded = StaticShapeForward.of(static_shapes, compiled)
    transformers.utils.logging.disable_progress_bar()
    single_device = {"static_shapes": static_shapes, "adapter": adapter, "adapted": adapted}
    refuse_unsupported_combination(device_map is not None, zero3, bool(quantization), single_device)
    if looks_like_folder(path) and not (Path(path) / "config.json").is_file():
        raise InputError(f"no base LLM at {path}: there is no config.json; give a Hugging Face folder as base.path=")
    identity: dict[str, Any] = {
        "name": name or Path(path).name,
        "revision": revision,
        "context_length": context_length,
        "chat_template": read_chat_template(chat_template_file) if chat_template_file else None,
        "aux_layers": aux_layers,
    }
    if zero3:
        from ctcdraft.models.zero3 import load_sharded

        return load_sharded(path, dtype, device, attention, identity)
    map_options = None if device_map is None else device_map_options(dtype, device_map, max_memory, offload_folder)
    lm, tokenizer = load_pretrained(path, revision, attention, weight_options(dtype, device, quantization, map_options))
    if adapter is not None:
        lm = attach_adapter(lm, adapter)
    reference = ReferenceLogits.of(lm, path)
    if adapter is not None:
        lm = lm.merge_and_unload()
    if device_map is not None:
        gather_shared_modules(lm, device)
    base = BaseLM(lm, tokenizer, **identity, quantization=quantization)
    if device_map is not None:
        devices = layer_devices(lm, base.device)
        base.layer_devices = devices if len(set(devices)) > 1 else None
    elif quantization is None:  # quantised weights were loaded on their device and keep their dtype
        base = base.to(device, getattr(torch, dtype))
    refuse_changed_logits(base, reference)
    if adapted is not None:
        merge_trained_adapter(base, Path(adapted))
    base.static_shapes = padded
    refuse_inexact_tree_attention(base)
    return base


def refuse_unsupported_combination(
    device_map: bool, zero3: bool, quantized: bool, single_device: Mapping[str, Any]
) -> None:
    """Raise InputError where a distributed base has other options that it does not support.

    Args:
        single_device: values of the keys that only a base on one device supports.
    """
    given = [key for key, value in single_device.items() if value]
    if device_map and given:
        raise InputError(f"base.{given[0]}= needs a base on one device; leave out base.{given[0]} or base.device_map")
    if zero3 and (device_map or quantized or given):
        raise InputError(
            "base.zero3=true supports no device_map, quantization, static_shapes or adapter; leave them out"
        )


def without_generation_config(lm: Any) -> Any:
    """Return a shallow copy of the model, sharing its weights, with an empty generation config.

    `generate` takes parameters that the caller leaves out, such as top_p or a repetition penalty, from the model's
    generation config, and would then generate other tokens than the logits alone determine.
    """
    copied = copy.copy(lm)
    copied.generation_config = type(lm.generation_config)()
    return copied
