"""Short hashes of weights, tokenizer and chat template, which identify a base model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.models.deepspeed import gather_copy, is_sharded
from ctcdraft.models.device_map import materialized

ROTARY_TOLERANCE = 0.02
SUMMED = 2**24  # values of a tensor that are rounded at a time


def base_fingerprint(base: Any) -> dict[str, Any]:
    """Return the identity of a base that is written beside everything made for it (fingerprint.json, manifest.json)."""
    return {
        "base": base.name,
        "revision": base.revision,
        "weights": base.weights_hash,
        **({"weights_sum": base.weights_sum} if base.weights_sum else {}),
        **({"quantised": base.quantization} if base.quantization else {}),
        "width": base.width,
        "vocabulary": base.vocabulary,
        "taps": base.aux_layers,
        "tokenizer": tokenizer_hash(base.tokenizer) if base.tokenizer is not None else "",
        "chat_template": text_hash(getattr(base.tokenizer, "chat_template", None) or ""),
        **({"adapter": base.adapted} if base.adapted else {}),
        **({"rotary_frequencies": base.rotary} if base.rotary else {}),
    }


def has_other_rotary(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two fingerprints have different rotary frequencies; those of older versions have none."""
    if "rotary_frequencies" not in one or "rotary_frequencies" not in other:
        return False
    # Rounded to half precision, as by model.to(torch.bfloat16), frequencies are still those of the same base.
    numbers = [[number for table in of["rotary_frequencies"] for number in table] for of in (one, other)]
    return len(numbers[0]) != len(numbers[1]) or any(
        abs(a - b) > ROTARY_TOLERANCE for a, b in zip(*numbers, strict=True)
    )


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def text_hash(text: str) -> str:
    return short_hash(text.encode())


def tokenizer_hash(tokenizer: Any) -> str:
    return text_hash("\n".join(f"{token}\t{index}" for token, index in sorted(tokenizer.get_vocab().items())))


def weights_hash(lm: nn.Module, samples: int = 64) -> str:
    """Return a hash of up to `samples` evenly spaced values of every tensor; "" on the meta device."""
    return weights_identity(lm, samples)[0]


def weights_identity(lm: nn.Module, samples: int = 64) -> tuple[str, str]:
    """Return the hash of `weights_hash`, and the sum of the bits of all values, rounded to bfloat16, in any order.

    Both are "" on the meta device, the sum in float16, too, which does not hold all values of a bfloat16 checkpoint.
    """
    digest, total = hashlib.sha256(), 0
    owners = dict(lm.named_modules(remove_duplicate=False))
    half = False
    for name, tensor in sorted(lm.state_dict().items()):
        module_name, _, tensor_name = name.rpartition(".")
        # Quantised layers write entries (`weight.absmax`) below a name that is no module, so the owner may be None.
        for part in storage_tensors(materialized_tensor(owners.get(module_name), tensor_name, tensor)):
            if part.is_meta:
                return "", ""
            stride, values = max(1, part.numel() // samples), part.reshape(-1)
            # Rounded to bfloat16, one checkpoint has one hash whether it was loaded as float32 or as bfloat16.
            sampled = values[::stride][:samples].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + sampled.numpy().tobytes())
            half = half or part.dtype == torch.float16
            # Of integers, so that it depends neither on the device nor on an order.
            bits = (some.to(torch.bfloat16).view(torch.int16) for some in values.split(SUMMED))
            total += sum(int(some.sum(dtype=torch.int64)) for some in bits)
    return digest.hexdigest()[:16], "" if half else f"{total % 2**64:016x}"


def has_other_sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the sums of weights differ where their hashes are equal; older fingerprints have no sums."""
    sums = {of["weights_sum"] for of in (one, other) if "weights_sum" in of}
    return one.get("weights") == other.get("weights") and len(sums) > 1


def rotary_summary(lm: nn.Module) -> list[list[float]]:
    """Return number, mean log2 and scaling of each table of rotary frequencies, which no checkpoint has.

    They follow from the model's config. [] without any, and on the meta device. Names, which differ between versions of
    transformers, do not count.
    """
    tables = set()
    for module in lm.modules():
        for name, value in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                if value.is_meta:
                    return []
                octaves = float(value.float().clamp(min=1e-30).log2().mean())
                tables.add((value.numel(), round(octaves, 3), round(float(getattr(module, "attention_scaling", 1)), 3)))
    return [list(table) for table in sorted(tables)]


def materialized_tensor(owner: nn.Module | None, name: str, tensor: Tensor) -> Tensor:
    parameter: Any = getattr(owner, name, None)
    return gather_copy(parameter) if is_sharded(parameter) else materialized(owner, name, tensor)


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of every byte, for small weights that have to be identical."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def storage_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in memory: the tensor itself, or codes and scales of a quantised tensor subclass."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storage_tensors(getattr(tensor, name))
    else:
        yield tensor


def was_quantized_since(base_fingerprint: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Return whether `fingerprint` is the base of `base_fingerprint` after quantisation."""
    # The weights of both differ, so the name decides.
    name = base_fingerprint.get("base")
    return bool(fingerprint.get("quantised")) and not base_fingerprint.get("quantised") and name == fingerprint["base"]
