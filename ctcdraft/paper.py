"""A base on paper: its shape from a config alone, on torch's meta device, which holds sizes and no values.

Plans need no more, so a base that this machine does not have, or cannot hold, can be planned for. It fetches no
weights, and of what is named in configs/base not even a config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctcdraft.base import BaseLM
from ctcdraft.base_values import chat_template, looks_like_folder, refuse_unknown_dtype
from ctcdraft.errors import InputError, first_line
from ctcdraft.fetching import whole_config
from ctcdraft.machine import memory_bytes, spelled
from ctcdraft.size import Size

WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Paper:
    """base: all of its tensors on the meta device, and no tokenizer (None) where there is none here. why: it is not
    loaded, in words."""

    base: BaseLM
    why: str

    def __str__(self) -> str:
        size, config, dtype = Size.of(self.base), self.base.lm.config, str(self.base.dtype).removeprefix("torch.")
        others = {torch.float32, torch.bfloat16} - {self.base.dtype}
        halves = ", ".join(f"{spelled(size.parameters * one.itemsize)} as {str(one)[6:]}" for one in others)
        return (
            f"ON PAPER: {self.base.name} is not loaded, for {self.why}; what follows is arithmetic from its config\n"
            f"base      {size.parameters / 1e9:,.2f} B parameters, {spelled(size.weight_bytes)} as {dtype} ({halves}); "
            f"{size.layers} layers of width {size.width:,}, MLP {size.inner:,}, {config.num_attention_heads} heads, "
            f"{self.base.vocabulary:,} words, context {self.base.context_length:,}\n"
            f"cache     {spelled(size.kv_bytes)} of keys and values a token as {dtype}"
        )


def on_paper(
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
) -> Paper | None:
    """The values of `load_base`; None where the weights are on this machine and fit, so that it can be loaded.

    quantised, fixed, compiled, adapted: change no plan. device_map, zero3: what does not
    fit one device may fit several, and is loaded.
    config: a base's sizes as Hugging Face names them, or the place of a config.json; without it, that of `path`.
    """
    base = of_sizes(path, dtype, name, revision, attention, context_length, chat_template_file, taps, config)
    if not weights_here(path, revision):
        return Paper(base, f"no weights of {path} are on this machine")
    needed, available = Size.of(base).weight_bytes, memory_bytes(device)
    if available is not None and needed > available and device_map is None and not zero3:
        return Paper(base, f"its weights take {spelled(needed)} as {dtype} and {device} has {spelled(available)}")
    return None


def of_sizes(
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
    found = whole_config(shape(path, revision, config), path)
    try:
        with torch.device("meta"):
            lm = transformers.AutoModelForCausalLM.from_config(
                found, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, ImportError, TypeError) as error:
        raise InputError(f"no base can be made from the config of {path} ({first_line(error)})") from error
    template = chat_template(chat_template_file) if chat_template_file else None
    base = BaseLM(lm, tokenizer_here(path, revision), name or Path(path).name, revision, context_length, template, taps)
    return base.to(getattr(torch, dtype))


def shape(path: str, revision: str | None, given: Any) -> Any:
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
            f"cannot read the config of the base {source}: {first_line(error)}; check base.path=, or give a config.json "
            "as base.config="
        ) from error


def tokenizer_here(path: str, revision: str | None) -> Any:
    """The tokenizer, where it lies on this machine; else None."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, revision=revision, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, TypeError):  # each kind of tokenizer has its own for "not there"
        return None


def weights_here(path: str, revision: str | None) -> bool:
    """Whether a folder, or what the hub's cache holds of a hub id, has files of weights."""
    folder = Path(path)
    if not looks_like_folder(path):
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(path, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            return False
    return any(file for pattern in WEIGHTS for file in folder.glob(pattern))
