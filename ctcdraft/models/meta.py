"""A base on paper: its shape from a config alone, on torch's meta device, which holds sizes and no values.

Plans need no more, so a base that this machine does not have, or cannot hold, can be planned for. It fetches no
weights, and of what is named in configs/base not even a config.

A base that is only a shape: a stock architecture with random weights. It knows no language, and no text names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctcdraft.decoding.static_shapes import StaticShapeForward
from ctcdraft.errors import InputError, first_line
from ctcdraft.hardware import device_memory_bytes, format_bytes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import dequantized_config
from ctcdraft.models.stats import ModelStats
from ctcdraft.models.values import looks_like_folder, read_chat_template, refuse_absent_device, refuse_unknown_dtype

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class MetaBase:
    """base: all of its tensors on the meta device, and no tokenizer (None) where there is none here. why: it is not
    loaded, in words."""

    base: BaseLM
    why: str

    def __str__(self) -> str:
        size, config, dtype = ModelStats.of(self.base), self.base.lm.config, str(self.base.dtype).removeprefix("torch.")
        others = {torch.float32, torch.bfloat16} - {self.base.dtype}
        halves = ", ".join(f"{format_bytes(size.parameters * one.itemsize)} as {str(one)[6:]}" for one in others)
        return (
            f"ON PAPER: {self.base.name} is not loaded, for {self.why}; what follows is arithmetic from its config\n"
            f"base      {size.parameters / 1e9:,.2f} B parameters, "
            f"{format_bytes(size.weight_bytes)} as {dtype} ({halves}); "
            f"{size.layers} layers of width {size.width:,}, MLP {size.inner:,}, {config.num_attention_heads} heads, "
            f"{self.base.vocabulary:,} words, context {self.base.context_length:,}\n"
            f"cache     {format_bytes(size.kv_bytes)} of keys and values a token as {dtype}"
        )


def meta_base_if_absent(
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
) -> MetaBase | None:
    """The values of `load_base`; None where the weights are on this machine and fit, so that it can be loaded.

    quantised, fixed, compiled, adapted: change no plan. device_map, zero3: what does not
    fit one device may fit several, and is loaded.
    config: a base's sizes as Hugging Face names them, or the place of a config.json; without it, that of `path`.
    """
    base = build_meta_base(path, dtype, name, revision, attention, context_length, chat_template_file, taps, config)
    if not has_local_weights(path, revision):
        return MetaBase(base, f"no weights of {path} are on this machine")
    needed, available = ModelStats.of(base).weight_bytes, device_memory_bytes(device)
    if available is not None and needed > available and device_map is None and not zero3:
        return MetaBase(
            base, f"its weights take {format_bytes(needed)} as {dtype} and {device} has {format_bytes(available)}"
        )
    return None


def build_meta_base(
    path: str,
    dtype: str,
    name: str | None = None,
    revision: str | None = None,
    attention: str = "sdpa",
    context_length: int | None = None,
    chat_template_file: str | None = None,
    taps: Sequence[str | int] = ("last",),
    config: Any = None,
    **changes_no_size: Any,
) -> BaseLM:
    """The base of these values with all of its tensors on the meta device, wherever its weights may be."""
    import transformers

    refuse_unknown_dtype(dtype)
    found = dequantized_config(model_config(path, revision, config), path)
    try:
        with torch.device("meta"):
            lm = transformers.AutoModelForCausalLM.from_config(
                found, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, ImportError, TypeError) as error:
        raise InputError(f"no base can be made from the config of {path} ({first_line(error)})") from error
    template = read_chat_template(chat_template_file) if chat_template_file else None
    base = BaseLM(
        lm, local_tokenizer(path, revision), name or Path(path).name, revision, context_length, template, taps
    )
    return base.to(getattr(torch, dtype))


def model_config(path: str, revision: str | None, given: Any) -> Any:
    """The config: of a file that is named, else of the base's own folder, else the sizes given, else the hub's."""
    import transformers

    folder = looks_like_folder(path) and (Path(path) / "config.json").is_file()
    if isinstance(given, dict) and not folder:
        try:
            return transformers.AutoConfig.for_model(**given)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"base.config is no config ({first_line(error)}); it needs model_type and sizes"
            ) from error
    source = given if isinstance(given, str) else path
    if looks_like_folder(source) and not (Path(source) / "config.json").is_file() and not Path(source).is_file():
        raise InputError(
            f"no base LLM at {source}: there is no config.json; give a Hugging Face folder as base.path=, or a "
            "config.json as base.config= for a plan on paper"
        )
    try:
        return transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the config of the base {source}: {first_line(error)}; check base.path=, or give a "
            "config.json "
            "as base.config="
        ) from error


def local_tokenizer(path: str, revision: str | None) -> Any:
    """The tokenizer, where it lies on this machine; else None."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, revision=revision, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, TypeError):  # each kind of tokenizer has its own for "not there"
        return None


def has_local_weights(path: str, revision: str | None) -> bool:
    """Whether a folder, or what the hub's cache holds of a hub id, has files of weights."""
    folder = Path(path)
    if not looks_like_folder(path):
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(path, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            return False
    return any(file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern))


class NullTokenizer:
    """The tokenizer of a shape: no words, no template, no stop."""

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
    fixed: bool = False,
    compiled: bool = False,
) -> BaseLM:
    """A base of random weights from the values of a transformers config; `of.model_type` is its architecture.

    What it takes is what the real one takes, a read's time and memory; what it says means nothing, so it is good
    for latency alone. The embedding counts as the real one's does: looked up, unless it is the head too.
    """
    import transformers

    refuse_absent_device(device)
    refuse_unknown_dtype(dtype)
    reads = StaticShapeForward.of(fixed, compiled)
    values = {**of}
    kind = values.pop("model_type", None)
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            parameters = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
        refuse_out_of_memory(name, parameters * getattr(torch, dtype).itemsize, dtype, device)
        torch.manual_seed(0)
        with torch.device(device):
            lm = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
            )
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, torch.OutOfMemoryError) as error:
        raise InputError(f"base.of={dict(of)} is no shape of a base here: {first_line(error)}") from error
    lm.generation_config = type(lm.generation_config)()  # no stop word: every answer is as long as it may be
    for key in ("eos_token_id", "bos_token_id"):
        setattr(lm.config, key, None)
    base = BaseLM(lm, NullTokenizer(), name)
    base.fixed = reads
    return base


def refuse_out_of_memory(name: str, needed: int, dtype: str, device: str) -> None:
    """Before anything is allocated: a process that takes more than there is would be killed without a word."""
    available = device_memory_bytes(device)
    if available is not None and needed > available:
        raise InputError(
            f"the weights of shape {name} take {format_bytes(needed)} as {dtype}, and {device} has "
            f"{format_bytes(available)}; take a "
            "smaller shape, a smaller dtype=, or another device="
        )
