"""Base models without their trained weights: on the meta device for dry runs, or random for latency measurements.

A tensor on torch's meta device has a shape and no values, which is all that a plan of memory and time needs. So a base
that is not on this machine, or does not fit into its memory, can be planned for without downloading weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.errors import InputError, first_line
from ctcdraft.hardware import device_memory_bytes, format_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import dequantized_config
from ctcdraft.models.loading import looks_like_folder, read_chat_template, refuse_absent_device, refuse_unknown_dtype
from ctcdraft.models.stats import ModelStats


@dataclass(frozen=True)
class MetaBase:
    """A base with all tensors on the meta device; its tokenizer is None where none is on this machine."""

    base: BaseLM
    reason: str  # why the weights are not loaded, for the printed plan

    def __str__(self) -> str:
        size, config, dtype = ModelStats.of(self.base), self.base.lm.config, str(self.base.dtype).removeprefix("torch.")
        others = {torch.float32, torch.bfloat16} - {self.base.dtype}
        alternatives = ", ".join(f"{format_bytes(size.parameters * one.itemsize)} as {str(one)[6:]}" for one in others)
        return (
            f"DRY RUN: {self.base.name} is not loaded, because {self.reason}; its config gives all numbers\n"
            f"base      {size.parameters / 1e9:,.2f} B parameters, "
            f"{format_bytes(size.weight_bytes)} as {dtype} ({alternatives}); "
            f"{size.layers} layers of width {size.width:,}, MLP {size.inner:,}, {config.num_attention_heads} heads, "
            f"vocabulary {self.base.vocabulary:,}, context {self.base.context_length:,}\n"
            f"cache     {format_bytes(size.kv_bytes)} of keys and values per token as {dtype}"
        )


def meta_base_if_absent(
    path: str, dtype: str, device: str, device_map: Any = None, zero3: bool = False, **values: Any
) -> MetaBase | None:
    """Return the base on the meta device if it cannot be loaded here, or None if its weights are present and fit.

    The arguments are those of `load_base`.
    """
    base = build_meta_base(path, dtype, **values)
    if not has_local_weights(path, values.get("revision")):
        return MetaBase(base, f"no weights of {path} are on this machine")
    if device_map is not None or zero3:
        return None  # a base that is larger than one device may fit on several
    shortage = describe_shortage(ModelStats.of(base).weight_bytes, dtype, device)
    return MetaBase(base, f"its weights {shortage}") if shortage else None


def describe_shortage(needed: int, dtype: str, device: str) -> str:
    available = device_memory_bytes(device)
    if available is None or needed <= available:
        return ""
    return f"take {format_bytes(needed)} as {dtype}, and {device} has {format_bytes(available)}"


def build_meta_base(
    path: str,
    dtype: str,
    name: str | None = None,
    revision: str | None = None,
    attention: str = "sdpa",
    context_length: int | None = None,
    chat_template_file: str | None = None,
    aux_layers: Sequence[str | int | float] = ("last",),
    config: Any = None,
    **irrelevant_to_size: Any,
) -> BaseLM:
    """Return the base of a `base` config with all tensors on the meta device.

    Args:
        config: sizes as in a config.json of transformers, or the path of one; None for the config of `path`.
    """
    import transformers

    refuse_unknown_dtype(dtype)
    loaded_config = dequantized_config(model_config(path, revision, config), path)
    try:
        with torch.device("meta"):
            lm = transformers.AutoModelForCausalLM.from_config(
                loaded_config, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, ImportError, TypeError) as error:
        raise InputError(f"no base can be made from the config of {path} ({first_line(error)})") from error
    template = read_chat_template(chat_template_file) if chat_template_file else None
    tokenizer = local_tokenizer(path, revision)
    base = BaseLM(lm, tokenizer, name or Path(path).name, revision, context_length, template, aux_layers)
    return base.to(getattr(torch, dtype))


def model_config(path: str, revision: str | None, given: Any) -> Any:
    """Return the config of the file given, else of the base's folder, else of the sizes given, else of the hub."""
    import transformers

    folder = looks_like_folder(path) and (Path(path) / "config.json").is_file()
    if isinstance(given, dict) and not folder:
        try:
            return transformers.AutoConfig.for_model(**given)
        except (TypeError, ValueError) as error:
            sentence = f"base.config is no config ({first_line(error)}); it needs model_type and sizes"
            raise InputError(sentence) from error
    source = given if isinstance(given, str) else path
    if looks_like_folder(source) and not (Path(source) / "config.json").is_file() and not Path(source).is_file():
        raise InputError(
            f"no base LLM at {source}: there is no config.json; give a Hugging Face folder as base.path=, or a "
            "config.json as base.config= for a dry run"
        )
    try:
        return transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the config of the base {source}: {first_line(error)}; check base.path=, or give a "
            "config.json as base.config="
        ) from error


def local_tokenizer(path: str, revision: str | None) -> Any:
    import transformers

    options = {"revision": revision, "local_files_only": True, "trust_remote_code": False}
    try:
        return transformers.AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError, TypeError):  # missing files raise differently for each tokenizer class
        return None  # a plan then counts tokens by characters


def has_local_weights(path: str, revision: str | None) -> bool:
    """Return whether a folder, or the local hub cache of a hub id, contains weight files."""
    folder = Path(path)
    if not looks_like_folder(path):
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(path, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            return False
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))


class NullTokenizer:
    """The tokenizer of a base with random weights: no tokens, no chat template, no EOS."""

    chat_template: str | None = None
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def random_weights_base(
    of: Mapping[str, Any],
    name: str,
    dtype: str,
    device: str,
    attention: str = "sdpa",
    static_shapes: bool = False,
    compiled: bool = False,
    aux_layers: Sequence[str | int | float] = ("last",),
) -> BaseLM:
    """Return a base with random weights, for measuring latency only: the text that it generates is meaningless.

    Args:
        of: values of a transformers config; `model_type` selects the architecture.
    """
    import transformers

    refuse_absent_device(device)
    refuse_unknown_dtype(dtype)
    padded = StaticShapes.of(static_shapes, compiled)
    try:
        config = transformers.AutoConfig.for_model(**{"model_type": None, **of})
        with torch.device("meta"):
            parameters = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
        # Refused before anything is allocated: a process that exceeds the memory is killed without a message.
        if shortage := describe_shortage(parameters * getattr(torch, dtype).itemsize, dtype, device):
            ways_out = "choose a smaller base.of=, a smaller dtype=, or another device="
            raise InputError(f"the weights of {name} {shortage}; {ways_out}")
        torch.manual_seed(0)
        with torch.device(device):
            lm = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
            )
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, torch.OutOfMemoryError) as error:
        raise InputError(f"base.of={dict(of)} is no valid model config: {first_line(error)}") from error
    lm.generation_config = type(lm.generation_config)()  # no EOS: every response has the maximal length
    for key in ("eos_token_id", "bos_token_id"):
        setattr(lm.config, key, None)
    base = BaseLM(lm, NullTokenizer(), name, aux_layers=aux_layers)
    base.static_shapes = padded
    return base
