"""Keys and values of a head's blocks in a paged KV cache: where they are stored, and attention to them.

On a CPU and in float32 machine code reads them in place; else the texts of a batch are copied, padded to the longest.

    Q requests    L tokens    G key-value heads    d head width    cache [blocks, G, slots of a block, 2 d]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.machine_code import load_kernels
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
        self.heads, self.head_rows = heads, head_rows
        self.heads_G1 = (torch.arange(heads, device=cache.device) * head_rows)[:, None]
        self.copies = self.rows.new_empty(0, self.columns)

    def row_ids(self, slots_XL: Tensor) -> Tensor:
        """Return the rows_XGL of slots."""
        blocks_XL, offsets_XL = slots_XL // self.slots_per_block, slots_XL % self.slots_per_block
        return (blocks_XL * self.block_rows + offsets_XL * self.slot_rows)[..., None, :] + self.heads_G1

    def write(self, rows_GL: Tensor, keys_values: TensorPair) -> None:
        """Store keys and values [G, L, d]; later writes to a slot replace earlier ones."""
        self.rows[rows_GL] = torch.cat(keys_values, dim=-1)

    def read(self, rows_QGL: Tensor) -> TensorPair:
        """Return keys and values [Q, G, L, d] of rows from `row_ids`: views of one copy, valid until the next call."""
        count = rows_QGL.numel()
        if count > len(self.copies):  # kept: on a CPU the pages of a new copy take four times as long as the copying
            self.copies = self.rows.new_empty(count, self.columns)
        torch.index_select(self.rows, 0, rows_QGL.flatten(), out=self.copies[:count])
        keys, values = self.copies[:count].view(*rows_QGL.shape, self.columns).split(self.columns // 2, dim=-1)
        return keys, values


def slots_of(table_QM: Tensor, length: int, caches: Sequence[SlotCache]) -> Tensor:
    """Return the slots_QL of the first `length` tokens of every request. table_QM: the ids of its blocks."""
    size = caches[0].slots_per_block if caches else 1
    places_L = torch.arange(length if caches else 0, device=table_QM.device)
    return table_QM.long()[:, places_L // size] * size + places_L % size


def read_texts(caches: Sequence[SlotCache], slots_QL: Tensor) -> list[TensorPair]:
    """Return keys and values [Q, G, L, d] of every request, for every block.

    What follows a request's own text is undefined and has to be masked.
    """
    if not caches:
        return []
    rows_QGL = caches[0].row_ids(slots_QL)
    return [cache.read(rows_QGL) for cache in caches]


def cache_of_text(caches: Sequence[SlotCache], slots_1L: Tensor, rows: int) -> KVCache:
    """Return a cache with keys and values of one request's text before its anchor, and room for so many rows behind."""
    text = read_texts(caches, slots_1L)
    length, (_, heads, _, width) = slots_1L.shape[1], text[0][0].shape
    memory = KVCache(len(caches), length + rows)
    keys, values = (text[0][0].new_empty(len(caches), 1, heads, memory.capacity, width) for _ in range(2))
    for number, (own_keys, own_values) in enumerate(text):
        keys[number, :, :, :length], values[number, :, :, :length] = own_keys, own_values
    memory.use_buffers(keys, values)
    memory.crop(length - 1)
    return memory


@dataclass(frozen=True)
class PagedText:
    """The texts of all requests where the engine keeps them, for machine code on a CPU."""

    cache: SlotCache
    table_QM: Any  # ids of the blocks of every request, an array
    lengths_Q: Any

    def attend(self, query: Tensor, own_key: Tensor, own_value: Tensor, causal: bool) -> Tensor:
        """Do `StoredText.attend`, A = 1: a request has one anchor, at the end of its text."""
        assert query.shape[2] == 1, "one anchor per request"
        own_QGTC = torch.cat([own_key, own_value], dim=-1)[:, :, 0].numpy()
        one, query_QGRE = self.cache, query[:, :, 0].contiguous().numpy()
        places = one.block_rows, one.slot_rows, one.head_rows, one.slots_per_block
        pages = one.rows.numpy(), self.table_QM, self.lengths_Q, places
        return torch.from_numpy(paged_kernels().attend_pages(query_QGRE, own_QGTC, causal, *pages))[:, :, None]


MAX_PAGED = 2**23  # numbers of a batch in one block; with more, torch's products by all threads may be faster


def paged_texts(caches: Sequence[SlotCache], table_QM: Tensor, lengths: Sequence[int]) -> list[PagedText] | None:
    """Return the text of every block for machine code; None where that is not possible."""
    if not caches or not table_QM.is_cpu or caches[0].rows.dtype != torch.float32 or paged_kernels() is None:
        return None
    if sum(lengths) * caches[0].heads * caches[0].columns > MAX_PAGED:
        return None
    array_QM, lengths_Q = table_QM.long().contiguous().numpy(), np.array(lengths)
    return [PagedText(cache, array_QM, lengths_Q) for cache in caches]


def paged_kernels() -> Any:
    """Return the module of compiled loops, imported by the first draft; None without numba."""
    return load_kernels("ctcdraft.serving.paged_kernels")
