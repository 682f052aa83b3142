"""The cache of a base whose layers lie on several devices: one for each of them. It knows which layer is where."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import transformers
from torch import Tensor

from ctcdraft.decoding.kv_cache import KVCache


class PlacedCache(transformers.Cache):
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
