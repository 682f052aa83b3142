"""Keys and values whose number is known on the device alone, for decoding steps of fixed shapes.

A CUDA graph always writes and reads the same memory, so the length of the text is a tensor, rows are written at indices
computed from it, and attention sees a fixed number of rows under a mask. `AppendedRows` in kv_cache.py is the same
interface for exact shapes; drafters and the base model use either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.tree import TokenTree


class StaticCache(transformers.Cache):
    """Keys and values of one sequence in buffers that never move.

    The prompt is read with exact shapes into the same buffers, by `exact`; `adopt_prompt` then copies its length to the
    device. The last row of the buffers belongs to no token: what must be written but not kept goes there.

    Args:
        capacity: rows for tokens, those of the largest tree included.
        positions: position ids of the model; later ones, which only tokens beyond the context have, become the last.
    """

    def __init__(self, layers: int, capacity: int, positions: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.exact = KVCache(layers, capacity + 1, zeroed=True)
        self.positions = positions
        self.visible = self.capacity = self.exact.capacity  # rows that attention sees, from the first one
        self.length_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers_M = torch.arange(max(self.capacity, positions), device=device)
        self.rows_N = self.numbers_M  # that the next update writes

    def restart(self) -> None:
        """Forget the text."""
        self.length_1.zero_()
        self.exact.crop(0)

    def adopt_prompt(self) -> None:
        """Take over the rows that `exact` holds."""
        self.length_1.fill_(self.exact.length)

    def position_ids(self, offsets_N: Tensor) -> Tensor:
        """Return the position ids of rows at these offsets behind the text."""
        return (self.length_1 + offsets_N).clamp(max=self.positions - 1)

    def append(self, text: int, device: torch.device, drafted: int = 0, count_1: Tensor | None = None) -> StaticRows:
        """Let the next updates write `text` rows of new text, of which count_1 are real (None: all), and behind the
        real ones `drafted` rows that are not kept."""
        offsets_N = self.numbers_M[:text]
        real_1 = torch.full_like(self.length_1, text) if count_1 is None else count_1
        rows_N = self.length_1 + offsets_N
        if count_1 is not None:
            rows_N = torch.where(offsets_N < count_1, rows_N, self.capacity - 1)
        if drafted:
            drafted_R = real_1 + self.numbers_M[:drafted]
            offsets_N = torch.cat([offsets_N, drafted_R])
            rows_N = torch.cat([rows_N, self.length_1 + drafted_R])
        self.rows_N = rows_N
        return StaticRows(self, text, drafted, real_1, self.position_ids(offsets_N))

    def append_level(self, depth: int, seen_KR: Tensor) -> tuple[Tensor, Tensor]:
        """Let the next updates write the last K of R drafted rows; return their position ids and mask_KM.

        The newest token of the text has depth 0. seen_KR: which drafted rows each of the K new ones sees, itself
        included.
        """
        rows_R = self.length_1 + self.numbers_M[: seen_KR.shape[1]]
        self.rows_N = rows_R[-len(seen_KR) :]
        mask_KM = (self.numbers_M[: self.visible] < self.length_1).repeat(len(seen_KR), 1)
        mask_KM.index_copy_(1, rows_R, seen_KR)
        return (self.length_1 + (depth - 1)).clamp(max=self.positions - 1).expand(len(seen_KR)), mask_KM

    def append_tree(self, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """Let the next updates write the rows of a tree behind the text; return its position ids and mask_NM."""
        if len(tree) > 1:
            seen_NM = self.append_level(0, tree.ancestors_NN)[1]
            return self.position_ids(tree.depths_N), seen_NM
        self.rows_N = self.length_1
        return self.length_1, (self.numbers_M[: self.visible] <= self.length_1)[None]

    def drop_levels(self, rows: int) -> None:
        """Drop the rows of `append_level`: they are not counted as part of the text."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's rows [1, H, N, d] and return the keys and values that attention sees."""
        if self.exact.buffers[0] is None:
            self.exact.reserve(1, key_states, value_states)
        keys, values = self.exact.layer_buffers[layer_idx]
        keys.index_copy_(2, self.rows_N, key_states)
        values.index_copy_(2, self.rows_N, value_states)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def view(self) -> StaticCacheView:
        """Return the cache of one forward pass, for compiled code: tensors alone."""
        layers = [(keys[:, :, : self.visible], values[:, :, : self.visible]) for keys, values in self.layer_buffers]
        return StaticCacheView(layers, self.rows_N)

    @property
    def layer_buffers(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.exact.layer_buffers

    def keep_path(self, path_K: Tensor, count_1: Tensor) -> None:
        """Keep the rows of the first count_1 nodes of path_K, of the tree just read, and drop its other rows.

        Every entry of path_K is moved; those beyond count_1 land where the next rows are written.
        """
        if len(path_K) > 1:
            rows_K, start_1 = self.numbers_M[: len(path_K)] + self.length_1, self.length_1
            for buffer in self.exact.buffers:
                buffer.index_copy_(3, rows_K, buffer.index_select(3, start_1 + path_K.clamp(min=0)))
        self.length_1.add_(count_1)

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
    drafted: int
    real_1: Tensor  # how many of the text's rows are real
    position_ids_N: Tensor

    def rotation(self, rotary: Any) -> tuple[Tensor, Tensor]:
        return rotary(self.position_ids_N)

    def seen_by_text(self) -> Tensor:
        """Return the mask_KM of the new text: every row sees the rows up to itself."""
        numbers_M = self.cache.numbers_M
        return numbers_M[: self.cache.visible] <= (self.cache.length_1 + numbers_M[: self.text])[:, None]

    def seen_by_drafted(self, causal: bool) -> Tensor:
        """Return the mask_RM of the drafted rows: they see all text, and each other or those up to themselves."""
        numbers_M, last_1 = self.cache.numbers_M, self.cache.length_1 + self.real_1
        last_R1 = (last_1 + numbers_M[: self.drafted])[:, None] if causal else (last_1 + self.drafted - 1)[:, None]
        return (numbers_M[: self.cache.visible] <= last_R1).expand(self.drafted, -1)

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
