"""What the weight files of a checkpoint hold: names, dtypes and shapes, without reading a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ctcdraft.errors import InputError, first_line

QUANTIZED_NAMES = ("weight", "weight_packed", "qweight")  # integer tensors of these names are quantised matrices


def weight_files(path: str, revision: str | None) -> list[str]:
    """Return the files that transformers reads the weights from."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (file := cached_file(path, name, **options)) is not None:
            return [file]
        if (index := cached_file(path, f"{name}.index.json", **options)) is not None:
            return list(get_checkpoint_shard_files(path, index, revision=revision)[0])
    return []


def stored_tensors(path: str, revision: str | None) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, dtype (as safetensors names it: F8_E4M3, I8) and shape of all tensors, of which none is read."""
    for file in weight_files(path, revision):
        if file.endswith(".bin"):
            for name, value in torch.load(file, map_location="meta", weights_only=True).items():
                yield name, f"{'F' if value.is_floating_point() else 'I'}{8 * value.dtype.itemsize}", [*value.shape]
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    tensor_slice = opened.get_slice(name)
                    yield name, tensor_slice.get_dtype(), tensor_slice.get_shape()
        except SafetensorError as error:
            raise InputError(f"{file} is damaged ({first_line(error)}); fetch base {path} again") from error


def is_quantized_tensor(name: str, dtype: str) -> bool:
    """Return whether a tensor holds quantised codes: floats of a byte or less, or an integer matrix."""
    # Other integers are buffers, such as position ids.
    matrix = name.rpartition(".")[2] in QUANTIZED_NAMES
    return dtype.startswith(("F8", "F6", "F4")) or (dtype.startswith(("I", "U")) and matrix)
