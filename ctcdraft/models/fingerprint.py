"""Short hashes by which a base is known again: of words, texts, weights. It knows nothing of what they mean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.models.deepspeed_loading import gather_copy, is_sharded
from ctcdraft.models.device_map import materialized


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    return text_hash("\n".join(f"{token}\t{index}" for token, index in sorted(tokenizer.get_vocab().items())))


def weights_hash(lm: nn.Module, samples: int = 64) -> str:
    """A hash of up to `samples` evenly spaced values of every tensor, rounded to bfloat16.

    Rounded, so that one checkpoint read as float32 and as bfloat16 is the same base. A base on paper has no values
    and no hash, so nothing can be made for it.
    """
    digest = hashlib.sha256()
    owners = dict(lm.named_modules(remove_duplicate=False))
    for name, tensor in sorted(lm.state_dict().items()):
        module_name, _, own = name.rpartition(".")
        # Some layers write more than they own (`weight.absmax`, of four bits), under names that are no module's.
        for part in storage_tensors(materialized_tensor(owners.get(module_name), own, tensor)):
            if part.is_meta:
                return ""
            stride = max(1, part.numel() // samples)
            values = part.reshape(-1)[::stride][:samples].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()[:16]


def materialized_tensor(owner: nn.Module | None, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a state with its values, wherever they lie."""
    own: Any = getattr(owner, name, None)
    return gather_copy(own) if is_sharded(own) else materialized(owner, name, tensor)


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Of every byte: for what is small, and must be exactly this."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def storage_tensors(tensor: Any) -> Iterator[Tensor]:
    """What a tensor is made of in memory: itself, or codes and scales where a package for quantising wraps them."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storage_tensors(getattr(tensor, name))
    else:
        yield tensor


def was_quantized_since(base_fingerprint: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Whether this is the base that something was made for, but quantised since: its weights are no longer comparable,
    so its name must do."""
    name = base_fingerprint.get("base")
    return bool(fingerprint.get("quantised")) and not base_fingerprint.get("quantised") and name == fingerprint["base"]
