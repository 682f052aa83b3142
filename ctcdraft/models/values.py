"""Interpretation and checks of single config values below `base`: dtype, device, quantization, chat template."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from ctcdraft.errors import InputError, first_line

QUANTIZATION_PACKAGES = {  # value of base.quantization: the package that implements it
    "bitsandbytes_4bit": "bitsandbytes",
    "torchao_int8": "torchao",
}
INEXACT_QUANTIZATIONS = {  # value of base.quantization: why it is refused
    "bitsandbytes_8bit": "LLM.int8 looks for outlier columns over all tokens of a forward pass, so that the logits of "
    "a tree's node depend on its siblings",
}
TEMPLATE_FOLDER = Path(__file__).parents[1] / "corpus" / "templates"


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


def weight_options(
    dtype: str, device: str, quantization: str | None, map_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` for dtype, quantization and device map.

    Raises InputError for an unknown or inexact quantization, or one whose package is not installed.
    """
    options = map_options or {"dtype": "auto"}
    if quantization is None:
        return options
    if quantization in INEXACT_QUANTIZATIONS:
        raise InputError(
            f"base.quantization={quantization} is refused: {INEXACT_QUANTIZATIONS[quantization]}; use "
            f"{' or '.join(QUANTIZATION_PACKAGES)}"
        )
    if quantization not in QUANTIZATION_PACKAGES:
        raise InputError(
            f"base.quantization must be one of {', '.join(QUANTIZATION_PACKAGES)} or null, got {quantization}"
        )
    package = QUANTIZATION_PACKAGES[quantization]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"base.quantization={quantization} needs the package {package}, which is not installed")
    if map_options is None:
        options = {"dtype": getattr(torch, dtype), "device_map": device}
    return options | {"quantization_config": make_quantization_config(quantization)}


def make_quantization_config(quantization: str) -> Any:
    """Return the quantization_config of transformers for a value of base.quantization."""
    import transformers

    if quantization == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    return transformers.BitsAndBytesConfig(load_in_4bit=True)


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
