"""What the values under `base` may be, and what each stands for. It loads no base and knows none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from ctcdraft.errors import InputError, first_line
from ctcdraft.models.device_map import DeviceMapOptions

QUANTIZATION_PACKAGES = {  # of base.quantised: the package that does it
    "bitsandbytes_4bit": "bitsandbytes",
    "torchao_int8": "torchao",
}
INEXACT_QUANTIZATIONS = {  # why a value of base.quantised is refused
    "bitsandbytes_8bit": "LLM.int8 looks for outlier columns over all tokens of a forward pass, so that the logits of "
    "a tree's node depend on its siblings",
}
TEMPLATE_FOLDER = Path(__file__).parents[1] / "corpus" / "templates"


def looks_like_folder(path: str) -> bool:
    """A hub id is `owner/name`; everything that starts like a path or exists is meant as a folder."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()


def refuse_unknown_dtype(dtype: str) -> None:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype={dtype} is no type of torch; try float32, bfloat16 or float16")


def refuse_absent_device(device: str) -> None:
    if not is_device(device):
        raise InputError(f"device={device} is no device of torch; try cpu, cuda or cuda:1")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={device}, but torch finds no CUDA device here; try device=cpu")


def is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def weight_options(
    dtype: str, device: str, quantised: str | None, placing: DeviceMapOptions | None = None
) -> dict[str, Any]:
    """How weights are held, in the words of `from_pretrained`. InputError where a package for it is absent."""
    options_of_placing = {"dtype": "auto"} if placing is None else placing.from_pretrained_options(dtype)
    if quantised is None:
        return options_of_placing
    if quantised in INEXACT_QUANTIZATIONS:
        raise InputError(
            f"base.quantised={quantised} is refused: {INEXACT_QUANTIZATIONS[quantised]}; take "
            f"{', '.join(QUANTIZATION_PACKAGES)}"
        )
    if quantised not in QUANTIZATION_PACKAGES:
        raise InputError(
            f"base.quantised={quantised} is none of {', '.join(QUANTIZATION_PACKAGES)}; null leaves the weights whole"
        )
    package = QUANTIZATION_PACKAGES[quantised]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"base.quantised={quantised} needs the package {package}, which is not installed here")
    options = {
        "dtype": getattr(torch, dtype),
        "device_map": device,
        "quantization_config": make_quantization_config(quantised),
    }
    return options | (options_of_placing if placing is not None else {})


def make_quantization_config(quantised: str) -> Any:
    """The config of transformers for one of QUANTISED."""
    import transformers

    if quantised == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    return transformers.BitsAndBytesConfig(load_in_4bit=True)


def read_chat_template(name: str) -> str:
    """The Jinja text of a file, or of one that ships: vicuna_v1_1, llama2_chat, chatml."""
    shipped = {file.stem: file for file in TEMPLATE_FOLDER.glob("*.jinja")}
    file = shipped.get(name, Path(name).expanduser())
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the chat template {name} ({first_line(error)}); give a file, or one of "
            f"{', '.join(sorted(shipped))}, as base.chat_template_file="
        ) from error
