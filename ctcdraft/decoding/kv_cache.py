"""The KV cache of the base: keys and values of all tokens read, of which only the accepted path of a tree is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

ALLOCATION_STEP = 256  # rows are allocated in multiples of this, so that a growing text seldom reallocates


class KVCache(transformers.Cache):
    """Preallocated keys and values of one sequence.

    A forward pass appends its rows to every layer; `keep_path` then closes the gaps that rejected draft tokens leave.
    capacity: rows to allocate, rounded up to ALLOCATION_STEP; the buffers grow on demand.
    """

    fixed_shapes = False

    def __init__(self, layers: int, capacity: int, zeroed: bool = False) -> None:
        super().__init__(layers=[])
        # Static shapes need zeros: masked rows are still multiplied by 0, and uninitialised memory may hold NaN.
        self._zeroed = zeroed
        self.capacity = -(-capacity // ALLOCATION_STEP) * ALLOCATION_STEP
        self._rows = [0] * layers  # rows written per layer: all equal once a forward pass is over
        # Keys and values [LAYERS, 1, H, capacity, d], allocated at the first update, whose tensors give heads, width
        # and dtype. All layers are in one buffer: dropping the rows of rejected draft tokens then takes two copies per
        # step instead of two per layer.
        self.buffers: tuple[Any, Any] = (None, None)
        self.layer_buffers: list[tuple[Tensor, Tensor]] = []  # views of the same buffers, one pair per layer
        self._span = (0, 0)  # the rows of the current forward pass
        self._views: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # per layer: views of these rows and of all rows

    @property
    def length(self) -> int:
        """Rows held: the number of tokens read and kept."""
        return self._rows[-1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one layer's rows [1, H, N, d] and return that layer's keys and values so far."""
        start = self._rows[layer_idx]
        end = start + key_states.shape[-2]
        if (start, end) != self._span:
            self._slice_views(start, end, key_states, value_states)  # the first layer does it for all
        new_keys, new_values, keys, values = self._views[layer_idx]
        new_keys.copy_(key_states)
        new_values.copy_(value_states)
        self._rows[layer_idx] = end
        return keys, values

    def _slice_views(self, start: int, end: int, key_states: Tensor, value_states: Tensor) -> None:
        if self.buffers[0] is None or end > self.capacity:
            self.reserve(end, key_states, value_states)
        # All layers at once: layer by layer these views would cost a hundredth of a forward pass.
        new = [buffer.narrow(3, start, end - start).unbind() for buffer in self.buffers]
        seen = [buffer.narrow(3, 0, end).unbind() for buffer in self.buffers]
        self._views = list(zip(*new, *seen, strict=True))
        self._span = (start, end)

    def use_buffers(self, keys: Tensor, values: Tensor) -> None:
        """Use these buffers from now on, and drop all views of earlier ones."""
        self.buffers = keys, values
        self.layer_buffers = list(zip(keys.unbind(), values.unbind(), strict=True))
        self._span = (0, 0)

    def reserve(self, rows: int, keys: Tensor, values: Tensor) -> None:
        """Allocate the buffers, or grow them and keep their rows. keys, values: of one layer, for the shape."""
        self.capacity = max(self.capacity, -(-rows // ALLOCATION_STEP) * ALLOCATION_STEP)
        self.use_buffers(self._enlarge(self.buffers[0], keys), self._enlarge(self.buffers[1], values))

    def _enlarge(self, current: Any, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        empty = like.new_zeros if self._zeroed else like.new_empty
        buffer = empty(len(self._rows), batch, heads, self.capacity, width)
        if current is not None:
            buffer[:, :, :, : current.shape[3]] = current
        return buffer

    def keep_path(self, start: int, path_K: Tensor) -> None:
        """Of the rows read since `start` keep those of the accepted path, in order, and drop the rest.

        A forward pass over 5 nodes after 3 rows, path 0 2 4:

            rows    a b c | 0 1 2 3 4   ->   a b c 0 2 4

        path_K: node numbers, the root (0) first.
        """
        end = start + len(path_K)
        self._rows = [end] * len(self._rows)
        if len(path_K) == 1:
            return  # the root alone is in its place already
        if path_K.is_cpu:
            # 0 1 4 moves one row. Elsewhere finding that out would cost a transfer to the host.
            in_place = next((at for at, node in enumerate(path_K.tolist()) if at != node), len(path_K))
            start, path_K = start + in_place, path_K[in_place:] - in_place
            if start == end:
                return
        # In place: selecting whole caches would cost ten times as much.
        for buffer in self.buffers:
            buffer[:, :, :, start:end] = buffer[:, :, :, start + path_K]

    def append(
        self, text: int, device: torch.device, drafted: int = 0, causal: bool = True, count_1: Tensor | None = None
    ) -> AppendedRows:
        """Return the rows of `text` new tokens and `drafted` rows behind them that are not kept; see StaticCache.

        causal: a drafted row sees those before it, not all.
        """
        return AppendedRows(self, self.length, text, drafted, causal, device)

    def append_level(self, depth: int, above_XR: Tensor, parents_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return position ids and mask_KM of K drafted rows that are to be written, and which drafted rows_KR they see.

        The newest token of the text has depth 0. above_XR: which drafted rows each of the level above sees.
        """
        own_KK = torch.eye(len(parents_K), dtype=torch.bool, device=parents_K.device)
        seen_KR = torch.cat([above_XR[parents_K], own_KK], dim=1)
        text = self.length + len(seen_KR) - seen_KR.shape[1]
        position_ids_K = torch.full((len(seen_KR),), text - 1 + depth, device=seen_KR.device)
        return position_ids_K, F.pad(seen_KR, (text, 0), value=True), seen_KR

    def drop_levels(self, rows: int) -> None:
        """Drop the newest rows, those of `append_level`."""
        self.crop(self.length - rows)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows: for drafters, which read draft tokens and drop all of them again."""
        self._rows = [length] * len(self._rows)

    def batch_select(self, indices_B: Tensor) -> None:
        """Keep these sequences of a batch, in this order (decoding has batch size 1; response generation has more)."""
        selected = [one.new_empty(one.shape[0], len(indices_B), *one.shape[2:]) for one in self.buffers]
        for new, old in zip(selected, self.buffers, strict=True):
            new[:, :, :, : self.length] = old[:, indices_B, :, : self.length]
        self.use_buffers(*selected)

    def bytes_held(self) -> int:
        """Return the bytes of the rows in use: what a forward pass must read besides the weights."""
        keys, values = self.buffers
        if keys is None:
            return 0
        row = keys[:, :, :, 0].numel() + values[:, :, :, 0].numel()
        return row * self.length * keys.element_size()

    # The rest is the interface that stock modeling code expects of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows[layer_idx]

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        # Older releases pass the tensor of the queries' positions instead of their number.
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self._rows[layer_idx] + queries, 0

    get_query_offset = get_seq_length


@dataclass(frozen=True)
class AppendedRows:
    """The rows that a forward pass appends to a KVCache: new text, then drafted rows that are not kept."""

    cache: KVCache
    start: int  # rows before them
    text: int
    drafted: int
    causal: bool
    device: torch.device

    @property
    def position_ids_N(self) -> Tensor:
        return torch.arange(self.start, self.start + self.text + self.drafted, device=self.device)

    def rotation(self, rotary: Any) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of their positions."""
        return rotary.span(self.start, self.start + self.text + self.drafted, self.device)

    def seen_by_text(self) -> Tensor | None:
        """Return the mask of the new text, None: attention makes the causal one of exact shapes."""
        return None

    def seen_by_drafted(self) -> Tensor | None:
        """Return the mask_RM of the drafted rows: they see all text, and each other or those up to themselves."""
        if not self.causal:
            return None
        size = self.drafted, self.start + self.text + self.drafted
        return torch.ones(size, dtype=torch.bool, device=self.device).tril(self.start + self.text)

    def seen_by_all(self) -> Tensor:
        """Return the mask_NM of text and drafted rows: each sees the rows up to itself."""
        rows = self.text + self.drafted
        return torch.ones(rows, self.start + rows, dtype=torch.bool, device=self.device).tril(self.start)

    def close(self) -> None:
        """Drop the drafted rows."""
        self.cache.crop(self.start + self.text)
