"""Keys and values of everything the base has read. It knows rows, not what the tokens were or why some are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor

ALLOCATION_STEP = 256  # rows are allocated in steps of this many, so that a growing text seldom reallocates


class KVCache(transformers.Cache):
    """Preallocated keys and values of one sequence, all layers in two buffers [LAYERS, 1, H, capacity, d].

    A read appends its rows to every layer; `keep` then closes the gaps that rejected guesses leave. One
    buffer for all layers makes that two copies a pass instead of two a layer.
    """

    def __init__(self, layers: int, capacity: int, zeroed: bool = False) -> None:
        super().__init__(layers=[])
        self._zero_filled = zeroed  # rows that are masked are still added up: they must not be NaN
        self.capacity = -(-capacity // ALLOCATION_STEP) * ALLOCATION_STEP
        self._rows = [0] * layers  # written, per layer: all are equal once a read is over
        self._keys: Any = None  # allocated at the first update, which knows heads, width and dtype
        self._values: Any = None
        self._layers: list[tuple[Tensor, Tensor]] = []  # the same buffers, one pair of views a layer
        self._span = (0, 0)  # the rows that are being read
        self._views: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # of every layer: these rows, and all up to them

    @property
    def length(self) -> int:
        """Rows held: how many tokens the base has read and not forgotten."""
        return self._rows[-1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one layer's rows [1, H, N, d] and return that layer's keys and values so far."""
        start = self._rows[layer_idx]
        end = start + key_states.shape[-2]
        if (start, end) != self._span:
            self._slice_views(start, end, key_states, value_states)
        new_keys, new_values, keys, values = self._views[layer_idx]
        new_keys.copy_(key_states)
        new_values.copy_(value_states)
        self._rows[layer_idx] = end
        return keys, values

    def _slice_views(self, start: int, end: int, key_states: Tensor, value_states: Tensor) -> None:
        """Views of all layers at once, when the first of them is read: one by one they cost a pass a hundredth."""
        if self._keys is None or end > self.capacity:
            self._reserve(end, key_states, value_states)
        both = (self._keys, self._values)
        new = [buffer.narrow(3, start, end - start).unbind() for buffer in both]
        seen = [buffer.narrow(3, 0, end).unbind() for buffer in both]
        self._views = list(zip(*new, *seen, strict=True))
        self._span = (start, end)

    def static_view(self, rows_N: Tensor) -> StaticCacheView:
        """This cache for one read that goes to these rows, which the device knows and the host need not."""
        return StaticCacheView(self._layers, rows_N)

    @property
    def buffers(self) -> tuple[Any, Any]:
        return self._keys, self._values

    def use_buffers(self, buffers: tuple[Any, Any] | None) -> None:
        """Begin on rows that another text has left, instead of new ones."""
        if buffers is not None:
            self._set_buffers(*buffers)

    def reserve(self, rows: int) -> None:
        """Room for this many rows; there must be some already."""
        if rows > self.capacity:
            self._reserve(rows, self._keys[0], self._values[0])

    def keep_path(self, start: int, path_K: Tensor) -> None:
        """Of the rows read since `start` keep those of the accepted path, in order, and forget the rest.

        A read of 5 nodes after 3 rows, path 0 2 4:

            rows    a b c | 0 1 2 3 4   ->   a b c 0 2 4

        path_K counts nodes from the root, which is 0. Rows move in place: selecting whole caches anew costs
        ten times as much. A path that is already in order (0 1 2 ...) moves nothing new, but asking would
        cost a transfer to the host.
        """
        end = start + len(path_K)
        self._rows = [end] * len(self._rows)
        if len(path_K) == 1:
            return  # the root alone stands where it was read
        for buffer in (self._keys, self._values):
            buffer[:, :, :, start:end] = buffer[:, :, :, start + path_K]

    def crop(self, length: int) -> None:
        """Keep the first `length` rows: for drafters, which read guesses and take all of them back."""
        self._rows = [length] * len(self._rows)

    def batch_select(self, indices_B: Tensor) -> None:
        """Of a batch of sequences keep these, in this order. Decoding has no batch; answering a corpus has."""
        self._set_buffers(
            self._select_sequences(self._keys, indices_B), self._select_sequences(self._values, indices_B)
        )

    def _select_sequences(self, buffer: Any, indices_B: Tensor) -> Tensor:
        selected = buffer.new_empty(buffer.shape[0], len(indices_B), *buffer.shape[2:])
        selected[:, :, :, : self.length] = buffer[:, indices_B, :, : self.length]
        return selected

    def _reserve(self, rows: int, keys: Tensor, values: Tensor) -> None:
        """Allocate the buffers, or grow them; rows already held stay."""
        self.capacity = max(self.capacity, -(-rows // ALLOCATION_STEP) * ALLOCATION_STEP)
        self._set_buffers(self._enlarge(self._keys, keys), self._enlarge(self._values, values))

    def _set_buffers(self, keys: Tensor, values: Tensor) -> None:
        """Work on these buffers from now on; no view of others may be left."""
        self._keys, self._values = keys, values
        self._layers = list(zip(keys.unbind(), values.unbind(), strict=True))
        self._span = (0, 0)

    def _enlarge(self, current: Any, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        empty = like.new_zeros if self._zero_filled else like.new_empty
        buffer = empty(len(self._rows), batch, heads, self.capacity, width)
        if current is not None:
            buffer[:, :, :, : current.shape[3]] = current
        return buffer

    def bytes_held(self) -> int:
        """Bytes of the rows really used: what a pass must stream besides the weights."""
        if self._keys is None:
            return 0
        row = self._keys[:, :, :, 0].numel() + self._values[:, :, :, 0].numel()
        return row * self.length * self._keys.element_size()

    # What stock modelling code asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows[layer_idx]

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        # Older releases hand over the tensor of the queries' positions instead of their number.
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self._rows[layer_idx] + queries, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._rows[layer_idx]


class StaticCacheView(transformers.Cache):
    """What stock modelling code is given where a read's rows are written to places that the device knows, and all rows
    of the buffers are seen. It holds tensors alone: a compiler can follow it whatever the text's length is."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], rows_N: Tensor) -> None:
        super().__init__(layers=[])
        self.layer_buffers = layers
        self._rows_N = rows_N

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.layer_buffers[layer_idx]
        return keys.index_copy_(2, self._rows_N, key_states), values.index_copy_(2, self._rows_N, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._rows_N[0]  # a tensor, as that of stock static caches is

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return self.layer_buffers[layer_idx][0].shape[2], 0
