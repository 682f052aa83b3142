"""Keys and values of a draft head's blocks in a paged KV cache, at the slots where the engine keeps its own.

A slot holds what belongs to one token of one text. The engine shares slots between requests with a common prefix,
reuses them after preemption, and overwrites those of rejected draft tokens; a head that writes and reads at the same
slots needs no bookkeeping for any of this.

    Q requests    L tokens    G key-value heads    d head width    cache [blocks, G, slots of a block, 2 d]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctcdraft.nn.transformer import TensorPair


class SlotCache:
    """The keys and values of one block of the head, stored side by side in one row per slot and head."""

    def __init__(self, cache: Tensor) -> None:
        _, heads, self.slots_per_block, self.columns = cache.shape
        # The engine chooses the order of blocks, heads and slots in memory; rows of 2 d numbers are whole in all.
        strides = cache.stride()
        if strides[3] != 1 or any(stride % self.columns for stride in strides[:3]):
            raise ValueError(f"a KV cache of strides {strides} does not keep rows of {self.columns} numbers together")
        self.block_rows, head_rows, self.slot_rows = (stride // self.columns for stride in strides[:3])
        last = sum(stride // self.columns * (size - 1) for stride, size in zip(strides[:3], cache.shape, strict=False))
        self.rows = cache.as_strided((last + 1, self.columns), (self.columns, 1))
        self.heads_G1 = (torch.arange(heads, device=cache.device) * head_rows)[:, None]

    def row_ids(self, slots_XL: Tensor) -> Tensor:
        """Return the rows_XGL of slots."""
        blocks_XL, offsets_XL = slots_XL // self.slots_per_block, slots_XL % self.slots_per_block
        return (blocks_XL * self.block_rows + offsets_XL * self.slot_rows)[..., None, :] + self.heads_G1

    def write(self, slots_L: Tensor, keys_values: TensorPair) -> None:
        """Store keys and values [G, L, d]; later writes to a slot replace earlier ones."""
        self.rows[self.row_ids(slots_L)] = torch.cat(keys_values, dim=-1)

    def read(self, rows_QGL: Tensor) -> TensorPair:
        """Return keys and values [Q, G, L, d] of rows from `row_ids`, as views of one copy."""
        both = self.rows.index_select(0, rows_QGL.flatten()).view(*rows_QGL.shape, self.columns)
        keys, values = both.split(self.columns // 2, dim=-1)
        return keys, values


def write_text(caches: Sequence[SlotCache], slots_L: Tensor, text: Sequence[TensorPair]) -> None:
    """Store a text's keys and values [1, G, L, d] of every block."""
    for cache, (keys, values) in zip(caches, text, strict=True):
        cache.write(slots_L, (keys[0], values[0]))


def read_texts(caches: Sequence[SlotCache], table_QM: Tensor, length: int) -> list[TensorPair]:
    """Return keys and values [Q, G, L, d] of the first `length` tokens of every request, for every block.

    What lies behind a request's own text is undefined and has to be masked. table_QM: the ids of its blocks.
    """
    if not caches:
        return []
    size = caches[0].slots_per_block
    places_L = torch.arange(length, device=table_QM.device)
    slots_QL = table_QM.long()[:, places_L // size] * size + places_L % size
    rows_QGL = caches[0].row_ids(slots_QL)  # the caches of all blocks have the same strides
    return [cache.read(rows_QGL) for cache in caches]
