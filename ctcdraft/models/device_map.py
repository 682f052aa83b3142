"""A base that lies over several devices of one process, as accelerate puts it. It knows modules and devices, no drafts.

What drafters share or begin with (embedding, head, final norm, last layer) is brought to one device, and states arrive
there; all else stays where it was put, be that another card, the memory of the host or a disk.

The cache of a base whose layers lie on several devices: one for each of them. It knows which layer is where.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.errors import InputError


@dataclass(frozen=True)
class DeviceMapOptions:
    """Values of transformers' from_pretrained. device_map: auto, balanced, ..., or devices by module. max_memory: of
    each device, where it is not all there is. offload_folder: for layers that fit nowhere else."""

    device_map: Any
    max_memory: Any = None
    offload_folder: str | None = None

    def from_pretrained_options(self, dtype: str) -> dict[str, Any]:
        """In the words of from_pretrained; InputError where it cannot be done here."""
        if importlib.util.find_spec("accelerate") is None:
            raise InputError(
                f"base.device_map={self.device_map} needs accelerate, which is not installed; pip install accelerate"
            )
        world = int(os.environ.get("WORLD_SIZE", 1))
        if world > 1:
            raise InputError(
                f"base.device_map={self.device_map} lays one base over the devices of one process, and {world} were "
                "started; start one, or leave it out so that each has a base of its own"
            )
        return {
            "dtype": getattr(torch, dtype),
            "device_map": as_plain_dict(self.device_map),
            "max_memory": as_plain_dict(self.max_memory),
            "offload_folder": self.offload_folder,
        }


def as_plain_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def gather_shared_modules(lm: Any, device: str) -> None:
    """Bring to `device` what drafters touch, and have the states of all layers arrive there."""
    inner = lm.base_model
    home = torch.empty(0, device=device).device  # "cuda" -> cuda:0, as weights say it
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = head.weight is embedding.weight
    layers = getattr(inner, "layers", None)
    for module in (embedding, head, getattr(inner, "norm", None), None if layers is None else layers[-1]):
        if module is not None:
            pin_to_device(module, home)
    if tied:
        head.weight = embedding.weight
    inner.register_forward_hook(lambda module, inputs, output: output_on_device(output, home))


def pin_to_device(module: nn.Module, device: torch.device) -> None:
    """Hold all of its weights on this device from now on, and move there what it is told."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    values = [
        (part, name, materialized(part, name, tensor))
        for part in module.modules()
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    ]
    remove_hook_from_module(module, recurse=True)  # first: a hook that goes puts weights back where it found them
    for part, name, value in values:
        set_module_tensor_to_device(part, name, device, value=value)
    if device.type != "cpu":
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, skip_keys="past_key_values"))


def materialized(module: nn.Module | None, name: str, tensor: Tensor) -> Tensor:
    """A weight of this module itself, in memory or on disk; of no module: as it is."""
    if tensor.is_meta:
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):  # several in a row are one hook
            if getattr(each, "weights_map", None) is not None:
                return each.weights_map[name]
    return tensor


def output_on_device(output: Any, device: torch.device) -> Any:
    """The output of stock modelling code with its states on this device."""
    output.last_hidden_state = output.last_hidden_state.to(device)
    if output.hidden_states is not None:
        output.hidden_states = tuple(states.to(device) for states in output.hidden_states)
    return output


class CacheProbe(KVCache):
    """A cache that only looks where each layer writes."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers, 1)
        self.devices: list[torch.device] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.devices.append(key_states.device)
        return key_states, value_states


@torch.inference_mode()
def layer_devices(lm: Any, device: torch.device) -> list[torch.device]:
    """The device on which each layer computes, by having it read one word."""
    cache = CacheProbe(lm.config.num_hidden_layers)
    lm.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True)
    return cache.devices


class MultiDeviceCache(transformers.Cache):
    """As KVCache, its rows on the device of the layer that wrote them.

    layers a b c d on devices 0 0 1 1   ->   two caches of two layers
    """

    def __init__(self, places: Sequence[Hashable], capacity: int) -> None:
        super().__init__(layers=[])
        self.parts = {device: KVCache(list(places).count(device), capacity) for device in dict.fromkeys(places)}
        # Of every layer: the cache, and the layer's number in there.
        self._of = [(self.parts[device], list(places[:n]).count(device)) for n, device in enumerate(places)]

    @property
    def length(self) -> int:
        return self._of[-1][0].length

    @property
    def capacity(self) -> int:
        return self._of[-1][0].capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        part, number = self._of[layer_idx]
        return part.update(key_states, value_states, number)

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
        part, number = self._of[layer_idx]
        return part.get_seq_length(number)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        part, number = self._of[layer_idx]
        return part.get_mask_sizes(query_length, number)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)
