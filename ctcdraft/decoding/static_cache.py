"""Keys and values whose number is known on the device alone, for decoding steps of fixed shapes.

A CUDA graph always writes and reads the same memory, so the length of the text is a tensor, rows are written at indices
computed from it, and attention sees a fixed number of rows under a mask. `AppendedRows` in kv_cache.py is the same
interface for exact shapes; drafters and the base model use either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.step_operations import level_rows, move_rows, text_rows, tree_rows
from ctcdraft.decoding.tree import TokenTree


class StaticCache(transformers.Cache):
    """Keys and values of one sequence in buffers that never move.

    The prompt is read with exact shapes into the same buffers, by `exact`; `adopt_prompt` then copies its length to the
    device. The last row of the buffers belongs to no token: what must be written but not kept goes there.

    Args:
        capacity: rows for tokens, those of the largest tree included.
        positions: position ids of the model; later ones, which only tokens beyond the context have, become the last.
    """

    fixed_shapes = True

    def __init__(self, layers: int, capacity: int, positions: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.exact = KVCache(layers, capacity + 1, zeroed=True)
        self.positions = positions
        self.visible = self.capacity = self.exact.capacity  # rows that attention sees, from the first one
        self.length_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows_N = self.length_1  # that the next update writes

    def restart(self) -> None:
        """Forget the text."""
        self.length_1.zero_()
        self.exact.crop(0)

    def adopt_prompt(self) -> None:
        """Take over the rows that `exact` holds."""
        self.length_1.fill_(self.exact.length)

    def append(
        self, text: int, device: torch.device, drafted: int = 0, causal: bool = True, count_1: Tensor | None = None
    ) -> StaticRows:
        """Let the next updates write `text` rows of new text, of which count_1 are real (None: all), and behind the
        real ones `drafted` rows that are not kept."""
        real_1 = torch.full_like(self.length_1, text) if count_1 is None else count_1
        limits = self.visible, self.capacity, self.positions
        self.rows_N, position_ids_N, seen_NM = text_rows(self.length_1, real_1, text, drafted, causal, *limits)
        return StaticRows(self, text, real_1, position_ids_N, seen_NM)

    def append_level(self, depth: int, above_XR: Tensor, parents_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Let the next updates write a level of drafted rows; see KVCache.append_level."""
        limits = self.visible, self.positions
        self.rows_N, *level = level_rows(self.length_1, above_XR, parents_K, depth, *limits)
        return tuple(level)

    def append_tree(self, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """Let the next updates write the rows of a tree behind the text; return its position ids and mask_NM."""
        limits = self.visible, self.positions
        self.rows_N, position_ids_N, seen_NM = tree_rows(self.length_1, tree.depths_N, tree.ancestors_NN, *limits)
        return position_ids_N, seen_NM

    def drop_levels(self, rows: int) -> None:
        """Drop the rows of `append_level`: they are not counted as part of the text."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's rows [1, H, N, d] and return the keys and values that attention sees."""
        keys, values = self.layer(layer_idx, key_states, value_states)
        keys.index_copy_(2, self.rows_N, key_states)
        values.index_copy_(2, self.rows_N, value_states)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def layer(self, layer: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, rows_N of which are to be written, and the first `visible` to be read."""
        if self.exact.buffers[0] is None:
            self.exact.reserve(1, key_states, value_states)
        return self.exact.layer_buffers[layer]

    def view(self) -> StaticCacheView:
        """Return the cache of one forward pass, for compiled code: tensors alone."""
        layers = [(keys[:, :, : self.visible], values[:, :, : self.visible]) for keys, values in self.layer_buffers]
        return StaticCacheView(layers, self.rows_N)

    @property
    def layer_buffers(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.exact.layer_buffers

    def keep_path(self, path_K: Tensor, count_1: Tensor) -> None:
        """Keep the rows of the first count_1 nodes of path_K, of the tree just read; steps do it by themselves."""
        rows_K = self.length_1 + torch.arange(len(path_K), device=path_K.device)
        self.move_rows(self.length_1 + path_K, rows_K)
        self.length_1.add_(count_1)

    def move_rows(self, source_K: Tensor, target_K: Tensor) -> None:
        """Copy rows to where they belong."""
        move_rows(*self.exact.buffers, source_K, target_K)

    def saved_rows(self, count: int) -> Callable[[], None]:
        """Return a function that writes back the present content of so many rows behind the text."""
        if self.exact.buffers[0] is None:
            return lambda: None
        rows_K = (self.length_1 + torch.arange(count, device=self.length_1.device)).clamp(max=self.capacity - 1)
        saved = [(buffer, buffer.index_select(3, rows_K)) for buffer in self.exact.buffers]

        def restore() -> None:
            for buffer, content in saved:
                buffer.index_copy_(3, rows_K, content)

        return restore

    def bytes_per_row(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return sum(buffer[:, :, :, 0].nbytes for buffer in self.exact.buffers)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.rows_N[0]

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return self.visible, 0


@dataclass(frozen=True)
class StaticRows:
    """The rows that a forward pass appends: new text, then drafted rows."""

    cache: StaticCache
    text: int
    real_1: Tensor  # how many of the text's rows are real
    position_ids_N: Tensor
    seen_NM: Tensor

    def rotation(self, rotary: Any) -> tuple[Tensor, ...]:
        return rotary.at(self.position_ids_N)

    def seen_by_text(self) -> Tensor:
        """Return the mask_KM of the new text: every row sees the rows up to itself."""
        return self.seen_NM[: self.text]

    def seen_by_drafted(self) -> Tensor:
        """Return the mask_RM of the drafted rows: they see all text, and each other or those up to themselves."""
        return self.seen_NM[self.text :]

    def seen_by_all(self) -> Tensor:
        """Return the mask_NM of text and drafted rows."""
        return self.seen_NM

    def close(self) -> None:
        """Count the real rows of text as part of the text, after they were written."""
        self.cache.length_1.add_(self.real_1)


class StaticCacheView(transformers.Cache):
    """A cache for one forward pass: it writes to rows_N, and attention sees all rows of the buffers given."""

    # Nothing but tensors, so that one compiled graph serves texts of every length; the row numbers stay on the device.

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
