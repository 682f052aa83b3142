"""Loading of base models: `base` in the config becomes a BaseLM.

A base is loaded by transformers, merged with its adapters, moved and cast, and then checked: it must still compute the
logits that transformers computed (compatibility.py) and read token trees exactly.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.errors import InputError, first_line, unsafe_pickle_error
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import load_pretrained, weight_options
from ctcdraft.models.compatibility import ReferenceLogits, refuse_changed_logits, refuse_inexact_tree_attention
from ctcdraft.models.deepspeed import install_gathering, load_deepspeed, sharded_loading
from ctcdraft.models.device_map import device_map_options, gather_shared_modules, layer_devices
from ctcdraft.models.fingerprint import tensors_hash

TEMPLATE_FOLDER = Path(__file__).parents[1] / "corpus" / "templates"


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
    aux_layers: Sequence[str | int | float] = ("last",),
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
        adapter: a peft LoRA folder or hub id that is merged before freezing.
        aux_layers: "last", then the auxiliary layers whose hidden states drafters read (0: the embeddings, k: layer k,
            a fraction: that share of all layers).
        config: ignored here; meta.py reads it for plans without weights.
        quantization: a key of checkpoints.QUANTIZATION_PACKAGES.
        static_shapes: pad trees to a few static shapes, each of which a GPU captures as a CUDA graph.
        compiled: compile each of these shapes.
        device_map: distributes the layers; hidden states and logits are on `device` all the same.
        adapted: RUN/adapter, which a run trained together with its draft head.
    """
    # What can fail without the weights fails before they are read, which takes minutes for a large base.
    refuse_unknown_dtype(dtype)
    refuse_absent_device(device)
    padded = StaticShapes.of(static_shapes, compiled)
    single_device = {"static_shapes": static_shapes, "adapter": adapter, "adapted": adapted}
    refuse_unsupported_combination(device_map is not None, zero3, bool(quantization), single_device)
    if looks_like_folder(path) and not (Path(path) / "config.json").is_file():
        raise InputError(f"no base LLM at {path}: there is no config.json; give a Hugging Face folder as base.path=")
    template = read_chat_template(chat_template_file) if chat_template_file else None
    name = name or Path(path).name
    identity = {"name": name, "context_length": context_length, "chat_template": template, "aux_layers": aux_layers}
    if zero3:
        base = load_sharded(path, dtype, device, revision, attention, identity)
    else:
        map_options = None if device_map is None else device_map_options(dtype, device_map, max_memory, offload_folder)
        base = load_whole(path, dtype, device, revision, attention, adapter, quantization, map_options, identity)
    if adapted is not None:
        merge_trained_adapter(base, Path(adapted))
    base.static_shapes = padded
    refuse_inexact_tree_attention(base)
    return base


def load_whole(
    path: str,
    dtype: str,
    device: str,
    revision: str | None,
    attention: str,
    adapter: str | None,
    quantization: str | None,
    map_options: dict[str, Any] | None,
    identity: Mapping[str, Any],
) -> BaseLM:
    """Load a base all of whose weights this process holds, on one device or distributed by `map_options`."""
    options = weight_options(dtype, device, quantization, map_options)
    lm, tokenizer = load_pretrained(path, revision, attention, options)
    if adapter is not None:
        lm = attach_adapter(lm, adapter)
    # Taken before merging, moving and casting, each of which may change what the weights compute without an error.
    reference = ReferenceLogits.of(lm, path)
    if adapter is not None:
        lm = lm.merge_and_unload()
    if map_options is not None:
        gather_shared_modules(lm, device)
    base = BaseLM(lm, tokenizer, revision=revision, quantization=quantization, **identity)
    if map_options is not None:
        devices = layer_devices(lm, base.device)
        base.layer_devices = devices if len(set(devices)) > 1 else None
    elif quantization is None:  # quantised weights were loaded on their device and keep their dtype
        base = base.to(device, getattr(torch, dtype))
    refuse_changed_logits(base, reference)
    return base


def load_sharded(
    path: str, dtype: str, device: str, revision: str | None, attention: str, identity: Mapping[str, Any]
) -> BaseLM:
    """Load a base of which each process of torchrun holds a shard (deepspeed.py)."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        raise InputError(
            "base.zero3=true needs several processes of torchrun, and this is one; use base.device_map=auto"
        )
    deepspeed = load_deepspeed(device.partition(":")[0])
    with sharded_loading():
        options = {"dtype": getattr(torch, dtype)}  # shards are not cast later, so there are no logits to compare
        lm, tokenizer = load_pretrained(path, revision, attention, options, dequantises=False)
    embedding = install_gathering(lm, deepspeed)
    base = BaseLM(lm, tokenizer, revision=revision, **identity)
    base.embedding = embedding
    return base


def attach_adapter(lm: Any, adapter: str, key: str = "base.adapter") -> Any:
    """Return the peft model of `lm` with the adapter of a folder or a hub id, not yet merged into the weights.

    Raises InputError, which names the config key, for a damaged adapter and for one that would execute code.
    """
    import peft

    try:
        # For such a config peft imports the module that it names as megatron_core.
        if getattr(peft.PeftConfig.from_pretrained(adapter), "megatron_config", None):
            cause = "has a megatron_config, for which peft imports code"
            raise InputError(f"the adapter {adapter} {cause}; give another one as {key}=")
        # peft reads adapter_model.safetensors, and only in its absence adapter_model.bin, with weights_only=True.
        return peft.PeftModel.from_pretrained(lm, adapter)
    except InputError:
        raise
    except UnpicklingError as error:
        raise unsafe_pickle_error(adapter, key) from error
    except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise InputError(
            f"cannot load the adapter {adapter} for its base: {first_line(error)}; check {key}="
        ) from error


def merge_trained_adapter(base: BaseLM, folder: Path) -> None:
    """Merge the adapter that a run trained together with its draft head into the base it started from.

    The base then generates other text, which its name and its fingerprint state.
    """
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise InputError(f"there is no {weights}; give the adapter/ of a run of adapt=lora as base.adapted=")
    try:
        attach_adapter(base.lm, str(folder), "base.adapted").merge_and_unload()
        base.adapted = tensors_hash(load_file(weights))
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # such as weights that no LoRA merges into
        raise InputError(f"cannot merge {folder} into {base.name}: {first_line(error)}; check base.adapted=") from error
    base.lm.eval().requires_grad_(False)
    base.name += ", changed by LoRA"


def refuse_unsupported_combination(
    device_map: bool, zero3: bool, quantized: bool, single_device: Mapping[str, Any]
) -> None:
    """Raise InputError where a distributed base is given a key that only a base on one device supports."""
    given = [key for key, value in single_device.items() if value]
    if device_map and given:
        raise InputError(f"base.{given[0]}= needs a base on one device; leave out base.{given[0]} or base.device_map")
    if zero3 and (device_map or quantized or given):
        raise InputError(
            "base.zero3=true supports no device_map, quantization, static_shapes or adapter; leave them out"
        )


def looks_like_folder(path: str) -> bool:
    """Return whether `path` is a folder and not a hub id, which has the form owner/name."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()


def refuse_unknown_dtype(dtype: str) -> None:
    value = getattr(torch, dtype, None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InputError(f"dtype must be a floating-point type of torch (float32, bfloat16, float16), got {dtype}")


def refuse_absent_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device must be a device of torch (cpu, cuda, cuda:1), got {device}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={device} needs a CUDA device, and torch finds none; use device=cpu")


def read_chat_template(name: str) -> str:
    """Return the Jinja template in a file, or a shipped one by name: vicuna_v1_1, llama2_chat, chatml."""
    shipped = {file.stem: file for file in TEMPLATE_FOLDER.glob("*.jinja")}
    file = shipped.get(name, Path(name).expanduser())
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the chat template {name} ({first_line(error)}); give a file, or one of "
            f"{', '.join(sorted(shipped))}, as base.chat_template_file="
        ) from error


def without_generation_config(lm: Any) -> Any:
    """Return a shallow copy of the model, sharing its weights, with an empty generation config."""
    # `generate` takes parameters that the caller leaves out, such as top_p or a repetition penalty, from the model's
    # generation config, and would then generate other tokens than the logits alone determine.
    copied = copy.copy(lm)
    copied.generation_config = type(lm.generation_config)()
    return copied
