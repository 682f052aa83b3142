"""Drafts of a whole batch by one head, whose keys and values are in vLLM's paged KV cache.

They are stored at the slots where the engine keeps its own: it shares slots between requests with a common prefix,
reuses them after preemption, and overwrites those of rejected draft tokens, so that none of this needs bookkeeping
here. New hidden states are kept aside until the next draft, and their keys and values are then computed in one product:
while nothing is drafted, recording costs a copy per step.

    Q requests    L tokens    G key-value heads    d head width    cache [blocks, G, slots of a block, 2 d]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.nn.transformer import TensorPair
from ctcdraft.serving.chains import Chains
from ctcdraft.serving.served_head import ServedHead

MAX_PENDING = 4096  # tokens whose hidden states are kept aside
LOGIT_BYTES = 2**28  # of logits at a time; the search holds about four tensors of their size


@dataclass(frozen=True)
class DraftBatch:
    """The requests of one step that get a draft."""

    rows_Q: Tensor  # of the anchors among the hidden states recorded last
    anchors_Q: Tensor  # position ids of the anchors
    roots_Q: Tensor
    table_QM: Tensor  # ids of the blocks that hold each request's text
    length: int  # of the longest text up to its anchor

    def split(self, size: int) -> Sequence[DraftBatch]:
        columns = (column.split(size) for column in (self.rows_Q, self.anchors_Q, self.roots_Q, self.table_QM))
        parts = zip(*columns, strict=True)
        return [DraftBatch(rows, anchors, roots, table, self.length) for rows, anchors, roots, table in parts]


class BatchDrafter:
    """A head and its caches. `caches`: one per block of the head that keeps keys and values of the text."""

    def __init__(self, head: ServedHead) -> None:
        self.head = head
        self.caches: list[SlotCache] = []
        self.pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self.pending_tokens = 0
        device = next(head.drafter.head.parameters()).device
        self.stops_S = torch.tensor(head.drafter.stops, dtype=torch.int64, device=device)
        if hasattr(head.drafter.body, "rotary"):
            head.drafter.body.rotary.tables(device)  # allocated now, before the engine measures its memory
        classes = head.drafter.head.blank + 1
        self.requests_at_once = max(1, LOGIT_BYTES // (4 * classes * head.drafter.frames))

    def bind(self, caches: Sequence[Tensor]) -> None:
        self.caches = [SlotCache(cache) for cache in caches]

    @torch.inference_mode()
    def warm_up(self, depth: int, rows: int = 8) -> None:
        """Draft for one and for two requests, so that kernels are compiled before the first request and its timing."""
        drafter, layers = self.head.drafter, len(self.head.layer_order)
        states_LD = torch.zeros(rows, drafter.width, dtype=drafter.dtype, device=self.stops_S.device)
        places_L = torch.arange(rows, device=states_LD.device)
        shape = getattr(drafter.body, "shape", None)
        for ids_Q in (places_L[:1], places_L[:2]):
            if shape is not None:
                self.bind([states_LD.new_zeros(1, shape.kv_heads, rows, 2 * shape.head_width)] * self.head.blocks)
            for _ in range(2):
                self.record([states_LD] * layers, places_L, places_L)
                self.draft(DraftBatch(ids_Q + 1, ids_Q + 1, ids_Q, torch.zeros_like(ids_Q)[:, None], rows), depth)
        self.caches = []

    def record(self, layers: Sequence[Tensor], positions_L: Tensor, slots_L: Tensor) -> None:
        """Take the hidden states [L, D] of new tokens, of the last layer and of the auxiliary ones in ascending order.

        slots_L: negative for padding, which is written to slot 0, that of a block no request has.
        """
        states_LE = torch.cat([layers[number] for number in self.head.layer_order], dim=-1)
        self.pending.append((states_LE, positions_L.clone(), slots_L.clamp(min=0)))
        self.pending_tokens += len(states_LE)
        if self.pending_tokens > MAX_PENDING:
            self.store()

    def store(self) -> Tensor:
        """Store keys and values of all pending tokens; return the last step's hidden states_LE as the head reads them.

        Without auxiliary layers of its own in each block, E = D.
        """
        newest = len(self.pending[-1][0])
        states_1LE = self.head.drafter.input_states(torch.cat([states for states, _, _ in self.pending])[None])
        if self.caches:
            positions_1L = torch.cat([positions for _, positions, _ in self.pending])[None]
            text = self.head.drafter.body.text_keys_values(states_1LE, positions_1L)
            start = 0
            # Step by step: the slot of a rejected draft token is written again in the step after it.
            for _, positions_L, slots_L in self.pending:
                end = start + len(positions_L)
                for cache, (keys, values) in zip(self.caches, text, strict=True):
                    cache.write(slots_L, (keys[0, :, start:end], values[0, :, start:end]))
                start = end
        self.pending, self.pending_tokens = [], 0
        return states_1LE[0, -newest:]

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, depth: int) -> Chains:
        """Return the most probable chains of a batch, on its device."""
        states_LE = self.store()
        parts = [self.draft_part(part, states_LE, depth) for part in batch.split(self.requests_at_once)]
        tokens_QK, probs_QK = (torch.cat(column) for column in zip(*parts, strict=True))
        return tokens_QK, probs_QK

    def draft_part(self, batch: DraftBatch, states_LE: Tensor, depth: int) -> Chains:
        drafter = self.head.drafter
        anchor_Q1D = states_LE[batch.rows_Q, None, : drafter.width]
        places_L = torch.arange(batch.length, device=states_LE.device)
        states_Q1TD = drafter.body(
            anchor_BAD=anchor_Q1D,
            root_BAD=drafter.embedding(batch.roots_Q[:, None]).to(drafter.dtype),
            anchors_BA=batch.anchors_Q[:, None],
            text=read_texts(self.caches, batch.table_QM, batch.length),
            visible_BAL=(places_L <= batch.anchors_Q[:, None])[:, None],
        )
        emissions = drafter.emissions(states_Q1TD, anchor_Q1D, batch.roots_Q[:, None])
        start_QR = None if emissions.start_BAR is None else emissions.start_BAR[:, 0]
        return self.head.search(emissions.logits()[:, 0], depth, self.stops_S, drafter.correction, start_QR)


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


def read_texts(caches: Sequence[SlotCache], table_QM: Tensor, length: int) -> list[TensorPair]:
    """Return keys and values [Q, G, L, d] of the first `length` tokens of every request, for every block.

    What follows a request's own text is undefined and has to be masked. table_QM: the ids of its blocks.
    """
    if not caches:
        return []
    size = caches[0].slots_per_block
    places_L = torch.arange(length, device=table_QM.device)
    slots_QL = table_QM.long()[:, places_L // size] * size + places_L % size
    rows_QGL = caches[0].row_ids(slots_QL)  # the caches of all blocks have the same strides
    return [cache.read(rows_QGL) for cache in caches]
