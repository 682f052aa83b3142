"""Drafts of a whole batch by one head, whose keys and values are in vLLM's paged KV cache.

They are stored at the slots where the engine keeps its own: it shares slots between requests with a common prefix,
reuses them after preemption, and overwrites those of rejected draft tokens, so that none of this needs bookkeeping
here. New hidden states are kept aside until the next draft, or until there are many, and their keys and values are then
computed in one product: while nothing is drafted, recording costs little more than a copy per step.

    Q requests    L tokens    G key-value heads    d head width    cache [blocks, G, slots of a block, 2 d]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ctcdraft.nn.compiled_body import compiled_step
from ctcdraft.serving.chains import Chains
from ctcdraft.serving.served_head import ServedHead
from ctcdraft.serving.slot_cache import SlotCache, cache_of_text, paged_texts, read_texts, slots_of

MAX_PENDING = 256  # tokens whose hidden states are kept aside; more at a time are no cheaper per token
LOGIT_BYTES = 2**28  # of logits at a time; the search holds about four tensors of their size
TEXT_BYTES = 2**28  # of keys and values at a time, padded to the longest text of the part


class Recorded(NamedTuple):
    """The tokens of one forward pass."""

    states_LE: Tensor
    positions_L: Tensor
    slots_L: Tensor


@dataclass(frozen=True)
class DraftBatch:
    """The requests of one step that get a draft."""

    rows_Q: Tensor  # of the anchors among the rows in kept_L
    anchors_Q: Tensor  # position ids of the anchors
    roots_Q: Tensor
    table_QM: Tensor  # ids of the blocks that hold each request's text
    lengths: Sequence[int]  # of the texts up to their anchors, in ascending order
    kept_L: Tensor  # rows of the last forward pass without those of rejected draft tokens, whose slots others will use

    @property
    def length(self) -> int:
        return self.lengths[-1]

    def split(self, requests: int, text_rows: int) -> Iterator[DraftBatch]:
        """Yield parts of at most so many requests, and of so many rows of padded texts unless it is a single one."""
        start = 0
        while start < len(self.lengths):
            end = start + 1
            while end < min(start + requests, len(self.lengths)) and (end + 1 - start) * self.lengths[end] <= text_rows:
                end += 1
            part = slice(start, end)
            columns = self.rows_Q[part], self.anchors_Q[part], self.roots_Q[part], self.table_QM[part]
            yield DraftBatch(*columns, self.lengths[part], self.kept_L)
            start = end


class BatchDrafter:
    """A head and its caches. `caches`: one per block of the head that keeps keys and values of the text."""

    def __init__(self, head: ServedHead) -> None:
        self.head = head
        self.caches: list[SlotCache] = []
        self.pending: list[Recorded] = []
        self.pending_tokens = 0
        device = next(head.drafter.head.parameters()).device
        self.latest_S = torch.zeros(0, dtype=torch.int64, device=device)  # number of the latest write to each slot
        self.writes = 0
        self.stops_S = torch.tensor(head.drafter.stops, dtype=torch.int64, device=device)
        if hasattr(head.drafter.body, "rotary"):
            head.drafter.body.rotary.tables(device)  # allocated now, before the engine measures its memory
        self.requests_at_once = max(1, LOGIT_BYTES // (4 * (head.drafter.head.blank + 1) * head.drafter.frames))
        self.text_rows_at_once = TEXT_BYTES  # of all requests; known with the caches

    def bind(self, caches: Sequence[Tensor]) -> None:
        self.caches = [SlotCache(cache) for cache in caches]
        slots = caches[0].shape[0] * caches[0].shape[2] if caches else 0
        self.latest_S = torch.zeros(slots, dtype=torch.int64, device=self.stops_S.device)
        row_bytes = sum(one.heads_G1.numel() * one.columns * one.rows.element_size() for one in self.caches)
        self.text_rows_at_once = TEXT_BYTES // max(row_bytes, 1)

    @torch.inference_mode()
    def warm_up(self, depth: int, rows: int = 8) -> None:
        """Draft for one and for two requests, so that kernels are compiled before the first request and its timing."""
        drafter, layers = self.head.drafter, len(self.head.layer_order)
        states_LD = torch.zeros(rows, drafter.width, dtype=drafter.dtype, device=self.stops_S.device)
        places_L = torch.arange(rows, device=states_LD.device)
        shape = getattr(drafter.body, "shape", None)
        for ids_Q in (places_L[:1], places_L[:2]):
            lengths = (ids_Q + 2).tolist()
            if shape is not None:
                self.bind([states_LD.new_zeros(1, shape.kv_heads, rows, 2 * shape.head_width)] * self.head.blocks)
            for _ in range(2):
                self.record([states_LD] * layers, places_L, places_L)
                table_Q1 = torch.zeros_like(ids_Q)[:, None]
                self.draft(DraftBatch(ids_Q + 1, ids_Q + 1, ids_Q, table_Q1, lengths, places_L), depth)
        self.bind([])

    def record(self, layers: Sequence[Tensor], positions_L: Tensor, slots_L: Tensor) -> None:
        """Take the hidden states [L, D] of new tokens, of the last layer and of the auxiliary ones in ascending order.

        Args:
            slots_L: negative for padding, which is written to slot 0, that of a block no request has.
        """
        states_LE = torch.cat([layers[number] for number in self.head.layer_order], dim=-1)
        states_LE.masked_fill_((slots_L < 0)[:, None], 0.0)  # undefined, and a weight of 0 times NaN would be NaN
        self.pending.append(Recorded(states_LE, positions_L.clone(), slots_L.clamp(min=0)))
        self.pending_tokens += len(slots_L)

    def store_when_many(self) -> None:
        """Store what is pending if it is much; called where nothing is drafted."""
        if self.pending_tokens > MAX_PENDING:
            self.store_older()

    def store_older(self) -> None:
        """Store keys and values of all pending tokens but those of the last forward pass."""
        if older := self.pending[:-1]:
            self.store(older)
            del self.pending[:-1]
            self.pending_tokens = len(self.pending[0].slots_L)

    def store(self, recorded: Sequence[Recorded]) -> Tensor:
        """Store keys and values of these tokens; return their hidden states_LE as the head reads them.

        Without auxiliary layers of its own in each block, E = D.
        """
        states_1LE = self.head.drafter.input_states(torch.cat([one.states_LE for one in recorded])[None])
        if self.caches:
            positions_1L = torch.cat([one.positions_L for one in recorded])[None]
            text = self.head.drafter.body.text_keys_values(states_1LE, positions_1L)
            slots_L = torch.cat([one.slots_L for one in recorded])
            if len(recorded) > 1:
                slots_L = self.last_writes(slots_L)
            rows_GL = self.caches[0].row_ids(slots_L)  # the caches of all blocks have the same strides
            for cache, (keys, values) in zip(self.caches, text, strict=True):
                cache.write(rows_GL, (keys[0], values[0]))
        return states_1LE[0]

    def last_writes(self, slots_L: Tensor) -> Tensor:
        """Return the slots, 0 in place of those that a later token is written to: a rejected draft token was there."""
        order_L = torch.arange(self.writes + 1, self.writes + 1 + len(slots_L), device=slots_L.device)
        self.writes += len(slots_L)
        self.latest_S.scatter_reduce_(0, slots_L, order_L, "amax")
        return slots_L.where(self.latest_S[slots_L] == order_L, 0)

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, depth: int) -> Chains:
        """Return the most probable chains of a batch, on its device."""
        self.store_older()
        last = self.pending.pop()
        states_LE = self.store([Recorded(*(column[batch.kept_L] for column in last))])
        self.pending_tokens = 0
        parts = batch.split(self.requests_at_once, self.text_rows_at_once)
        drafted = [self.draft_part(part, states_LE, depth) for part in parts]
        tokens_QK, probs_QK = map(torch.cat, zip(*drafted, strict=True))
        return tokens_QK, probs_QK

    def draft_part(self, batch: DraftBatch, states_LE: Tensor, depth: int) -> Chains:
        drafter = self.head.drafter
        anchor_Q1E, roots_Q1 = states_LE[batch.rows_Q, None], batch.roots_Q[:, None]
        root_Q1D, anchor_Q1D = drafter.embedding(roots_Q1).to(drafter.dtype), anchor_Q1E[..., : drafter.width]
        states_Q1TD = None
        if self.caches and len(batch.lengths) == 1 and states_LE.is_cpu:
            slots_1L = slots_of(batch.table_QM, batch.length, self.caches)
            memory = cache_of_text(self.caches, slots_1L, drafter.body.rows)
            states_Q1TD = compiled_step(drafter.body, anchor_Q1E, root_Q1D, memory)
        if states_Q1TD is None:
            text: Any = paged_texts(self.caches, batch.table_QM, batch.lengths)
            text = text or read_texts(self.caches, slots_of(batch.table_QM, batch.length, self.caches))
            places_L = torch.arange(batch.length, device=states_LE.device)
            states_Q1TD = drafter.body(
                anchor_BAD=anchor_Q1D,
                root_BAD=root_Q1D,
                anchors_BA=batch.anchors_Q[:, None],
                text=text,
                visible_BAL=(places_L <= batch.anchors_Q[:, None])[:, None],
            )
        emissions = drafter.emissions(states_Q1TD, anchor_Q1E, roots_Q1)
        start_QR = None if emissions.start_BAR is None else emissions.start_BAR[:, 0]
        return self.head.search(emissions.logits()[:, 0], depth, self.stops_S, drafter.correction, start_QR)
