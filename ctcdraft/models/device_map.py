"""A base whose layers accelerate distributes over several devices of one process, and its KV cache.

The modules that drafters share or copy (embedding, lm_head, final norm, last layer) are moved to one device, where the
hidden states arrive too; all other layers stay where the device map puts them: another GPU, host memory or a disk.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.errors import InputError


def device_map_options(dtype: str, device_map: Any, max_memory: Any, offload_folder: str | None) -> dict[str, Any]:
    """Return the keyword arguments of from_pretrained; raise InputError without accelerate or under torchrun."""
    if importlib.util.find_spec("accelerate") is None:
        raise InputError(
            f"base.device_map={device_map} needs accelerate, which is not installed; pip install accelerate"
        )
    if (world_size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise InputError(
            f"base.device_map={device_map} distributes one base over the devices of one process, and {world_size} were "
            "started; start one, or leave out device_map so that each process has its own base"
        )
    # Hydra passes mappings of its own, which transformers does not accept.
    device_map, max_memory = (dict(each) if isinstance(each, Mapping) else each for each in (device_map, max_memory))
    options = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    return {"dtype": getattr(torch, dtype), **options}


def gather_shared_modules(lm: Any, device: str) -> None:
    """Move the modules that drafters use to `device`, and let the hidden states of all layers arrive there."""
    inner = lm.base_model
    home = torch.empty(0, device=device).device  # "cuda" -> cuda:0, to compare equal with the device of a weight
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = head.weight is embedding.weight
    for module in (embedding, head, getattr(inner, "norm", None), *list(getattr(inner, "layers", []))[-1:]):
        if module is not None:
            pin_to_device(module, home)
    if tied:  # moved one by one they are two matrices, which would take twice the memory
        head.weight = embedding.weight
    inner.register_forward_hook(lambda module, inputs, output: output_on_device(output, home))


def pin_to_device(module: nn.Module, device: torch.device) -> None:
    """Move all weights of a module to this device for good; its inputs are moved there by a hook."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    values = [
        (owner, name, materialized(owner, name, tensor))
        for owner in module.modules()
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
    ]
    remove_hook_from_module(module, recurse=True)  # before moving: a removed hook puts the weights back
    for owner, name, value in values:
        set_module_tensor_to_device(owner, name, device, value=value)
    if device.type != "cpu":
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, skip_keys="past_key_values"))


def materialized(module: nn.Module | None, name: str, tensor: Tensor) -> Tensor:
    """Return a weight with its values; those of an offloaded one are in the storage of accelerate's hook."""
    if tensor.is_meta:
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):  # a SequentialHook holds several
            if getattr(each, "weights_map", None) is not None:
                return each.weights_map[name]
    return tensor


def output_on_device(output: Any, device: torch.device) -> Any:
    output.last_hidden_state = output.last_hidden_state.to(device)
    if output.hidden_states is not None:
        output.hidden_states = tuple(states.to(device) for states in output.hidden_states)
    return output


@torch.inference_mode()
def layer_devices(lm: Any, device: torch.device) -> list[torch.device]:
    """Return the device on which each layer computes, found by a forward pass over one token."""
    cache: Any = transformers.DynamicCache()  # leaves the keys of each layer where they were computed
    lm.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True)
    return [layer.keys.device for layer in cache.layers]


class MultiDeviceCache(transformers.Cache):
    """A KV cache made of one KVCache per device, each for the layers on that device.

    layers a b c d on devices 0 0 1 1   ->   two caches of two layers
    """

    def __init__(self, devices: Sequence[Hashable], capacity: int) -> None:
        super().__init__(layers=[])
        self.parts = {device: KVCache(list(devices).count(device), capacity) for device in dict.fromkeys(devices)}
        # For every layer its cache, and its index there.
        self._of = [(self.parts[device], list(devices[:n]).count(device)) for n, device in enumerate(devices)]

    @property
    def length(self) -> int:
        return self._of[-1][0].length

    @property
    def capacity(self) -> int:
        return self._of[-1][0].capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        part, index = self._of[layer_idx]
        return part.update(key_states, value_states, index)

    def keep_path(self, start: int, path_K: Tensor) -> None:
        for part in self.parts.values():
            part.keep_path(start, path_K.to(part.buffers[0].device))

    def crop(self, length: int) -> None:
        for part in self.parts.values():
            part.crop(length)

    def batch_select(self, indices_B: Tensor) -> None:
        for part in self.parts.values():
            part.batch_select(indices_B.to(part.buffers[0].device))

    def bytes_held(self) -> int:
        return sum(part.bytes_held() for part in self.parts.values())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        part, index = self._of[layer_idx]
        return part.get_seq_length(index)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        part, index = self._of[layer_idx]
        return part.get_mask_sizes(query_length, index)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)
