"""Training batches cut from prepared conversations.

A batch is a pure function of (corpus, seed, step): the epoch's permutation and the anchors come from generators seeded
by them. So a resumed run needs no iterator state. With `first_fit_packing` several conversations share a row (packed
sequences): less padding, at the price of rows that hold a varying number of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.corpus.hidden_states import HiddenStates, HiddenStatesFactory, OnlineHiddenStates, compute_hidden_states
from ctcdraft.corpus.token_store import Pack, TokenSequences
from ctcdraft.corpus.windows import label_windows, sample_anchors
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.distributed import ALONE, Distributed
from ctcdraft.models.base_model import BaseLM

MAX_OPEN_PACKS = 64  # more open packs leave less padding, at as many comparisons per conversation
FEASIBILITY_CHUNK = 64  # rows per call in feasible_share: one by one, a million rows took six minutes

# (indices of conversations in epoch order, lengths of all, rows per step) -> steps of the epoch, each a list of rows
PackingFunction = Callable[[Sequence[int], Sequence[int], int], list[list[Pack]]]


def one_per_row(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[list[Pack]]:
    """Return full steps with one conversation per row; the remainder is left to another epoch's permutation."""
    return [[[index] for index in order[start : start + rows]] for start in range(0, len(order) - rows + 1, rows)]


def first_fit_packing(size: int) -> PackingFunction:
    """Return a packing into rows of up to `size` tokens that uses all conversations; the last step may be smaller."""

    def pack_epoch(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[list[Pack]]:
        packs = first_fit(order, lengths, size)
        return [packs[start : start + rows] for start in range(0, len(packs), rows)]

    return pack_epoch


def first_fit(order: Sequence[int], lengths: Sequence[int], size: int, most_open: int = MAX_OPEN_PACKS) -> list[Pack]:
    """Return packs in the order in which they were opened: each goes into the oldest one with enough free tokens.

    One that fits nowhere opens a pack; one longer than `size` is a pack by itself.

    size 10, conversations of 6 5 4 5 tokens   ->   [6 4] [5 5]
    """
    packs: list[Pack] = []
    open_packs: list[tuple[int, Pack]] = []  # (free tokens, pack)
    for index in order:
        length = lengths[index]
        slot = next((slot for slot, (free, _) in enumerate(open_packs) if free >= length), None)
        if slot is None:
            packs.append([index])
            open_packs.append((size - length, packs[-1]))
            if len(open_packs) > most_open:  # the fullest is closed
                open_packs.remove(min(open_packs, key=lambda pack: pack[0]))
        else:
            free, pack = open_packs[slot]
            pack.append(index)
            open_packs[slot] = (free - length, pack)
    return packs


class Batches:
    """Conversations in a new permutation every epoch, arranged in rows by `packing`; anchors resampled every step.

    A step has `rows_per_step` rows, each of one conversation or of a pack, `anchors` windows sampled from each row
    (None: all) and at most `labels` labels per window. `compute_states` computes the hidden states that are not stored.

    Batch number n is one of the `per_step` batches of step n // per_step, and of its rows those of this process. All
    rows of a step, with their anchors, are the same however they are divided.
    """

    def __init__(
        self,
        rows: TokenSequences,
        base: BaseLM,
        rows_per_step: int,
        anchors: int | None,
        labels: int,
        seed: int,
        hidden_states: HiddenStatesFactory = OnlineHiddenStates,
        packing: PackingFunction = one_per_row,
        compute_states: Callable[..., Tensor] = compute_hidden_states,
        per_step: int = 1,
        processes: Distributed = ALONE,
    ) -> None:
        self.per_step = per_step
        self.processes = processes
        self.rows = rows
        self.base = base
        self.device = base.device
        self.hidden_states = hidden_states(base, rows.tokens)
        self.rows_per_step = min(rows_per_step, len(rows))
        self.packing = packing
        self.compute_states = compute_states
        self.anchors = anchors
        self.labels = labels
        self.seed = seed
        self.epoch = lru_cache(maxsize=2)(self._epoch_steps)  # two: the prefetched step may be in the next epoch
        self._epoch_starts = [0]  # first step of every epoch seen so far: packed epochs differ in length

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch."""
        return len(self.epoch(0))

    def batch(self, number: int) -> Batch:
        """Return a batch on the base model's device, hidden states included."""
        return self.complete(self.prepare(number))

    def prepare(self, number: int) -> dict[str, Tensor]:
        """Return the fields of a batch that need no forward pass, on the base model's device.

        Hidden states are among them only if they are stored.
        """
        step, place = divmod(number, self.per_step)
        packs = self.packs(step)
        own = list(range(len(packs)))[place :: self.per_step][self.processes.rank :: self.processes.world_size]
        width = max(sum(self.rows.lengths[index] for index in pack) for pack in packs)
        random_BL = torch.rand(len(packs), width, generator=self._rng(step, 1))  # of the rows of all processes
        packs = [packs[row] for row in own or [0]]
        rows = self.rows.pad_packs(packs)
        # The last step of a packed epoch may have too few rows for all: a row without windows takes part with loss 0.
        mask_BL = rows.mask_BL if own else torch.zeros_like(rows.mask_BL)
        anchors_BA = sample_anchors(mask_BL, self.anchors, random_BL[own or [0], : mask_BL.shape[1]])
        windows = label_windows(rows.tokens_BL, mask_BL, anchors_BA, self.labels, rows.ended_BL)
        fields = dict(tokens_BL=rows.tokens_BL, position_ids_BL=rows.position_ids_BL, anchors_BA=anchors_BA)
        fields |= zip(("roots_BA", "labels_BAS", "lengths_BA"), windows, strict=True)
        fields = {name: value.to(self.device) for name, value in fields.items()}
        states_BLD = self.hidden_states.stored_states(packs)
        return fields if states_BLD is None else fields | {"states_BLD": states_BLD}

    def complete(self, fields: dict[str, Tensor]) -> Batch:
        """Return the whole batch; hidden states that are not stored are computed now."""
        if "states_BLD" not in fields:
            states_BLD = self.compute_states(self.base, fields["tokens_BL"], fields["position_ids_BL"])
            fields = fields | {"states_BLD": states_BLD}
        return Batch(**fields)

    def describe(self) -> str:
        """Return how full the rows of the first epoch are, for the plan."""
        packs = [pack for step in self.epoch(0) for pack in step]
        tokens = sum(self.rows.lengths[index] for pack in packs for index in pack)
        responses = sum(len(self.rows.spans[index]) for pack in packs for index in pack)
        padded_tokens = sum(
            len(step) * max(sum(self.rows.lengths[index] for index in pack) for pack in step) for step in self.epoch(0)
        )
        return (
            f"{responses / len(packs):.1f} answers and {tokens / len(packs):,.0f} tokens per row, "
            f"{1 - tokens / padded_tokens:.1%} padding"
        )

    def close(self) -> None:
        """Do nothing; PrefetchingBatches has a thread to end."""

    def packs(self, step: int) -> list[Pack]:
        """Return the indices of the conversations of a step, row by row."""
        epoch = bisect_right(self._epoch_starts, step) - 1
        while step >= (end := self._epoch_starts[epoch] + len(self.epoch(epoch))):
            epoch += 1
            if epoch == len(self._epoch_starts):
                self._epoch_starts.append(end)
        return self.epoch(epoch)[step - self._epoch_starts[epoch]]

    def _epoch_steps(self, epoch: int) -> list[list[Pack]]:
        order = torch.randperm(len(self.rows), generator=self._rng(epoch, 0)).tolist()
        return self.packing(order, self.rows.lengths, self.rows_per_step)

    def _rng(self, number: int, stream: int) -> torch.Generator:
        # Stream 0 permutes epochs, stream 1 samples anchors of steps: epoch 5 and step 5 must not share their numbers.
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) * 2 + stream)


class PrefetchingBatches:
    """The same batches, each prepared one request ahead in a thread, which `close` ends; `total` in the whole run.

    The thread cuts windows, reads stored hidden states and copies both to the device, on a CUDA stream of its own where
    there is one (not yet tried on an accelerator). An exception in it is raised by the `batch` call that needed its
    result.
    """

    def __init__(self, batches: Batches, total: int) -> None:
        self.batches = batches
        self.total = total
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.pending: tuple[int, Future[dict[str, Tensor]]] | None = None
        self.stream = torch.cuda.Stream(batches.device) if batches.device.type == "cuda" else None

    @property
    def hidden_states(self) -> HiddenStates:
        return self.batches.hidden_states

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, and start preparing the next one."""
        pending, self.pending = self.pending, None
        if pending is None or pending[0] != step:  # the first step, or one out of order
            pending = (step, self.worker.submit(self.prepare, step))
        prepared = pending[1].result()
        following = step + 1
        if following < self.total:
            self.pending = (following, self.worker.submit(self.prepare, following))
        if self.stream is not None:
            # Allocated on the other stream: the allocator must not reuse the memory before this stream has read it.
            for tensor in prepared.values():
                tensor.record_stream(torch.cuda.current_stream(self.batches.device))
        # Forward passes of the base model stay in the step: on a CPU both would compete for the same cores.
        return self.batches.complete(prepared)

    def prepare(self, step: int) -> dict[str, Tensor]:
        with torch.cuda.stream(self.stream):  # does nothing for None
            prepared = self.batches.prepare(step)
        if self.stream is not None:
            self.stream.synchronize()
        return prepared

    def close(self) -> None:
        """Wait for the batch in preparation and end the thread."""
        self.worker.shutdown(wait=True, cancel_futures=True)


def feasible_share(
    rows: TokenSequences, labels: int, frames: int, needed: Callable[..., Tensor] = frames_needed
) -> tuple[int, float]:
    """Return the number of windows in the corpus and the share whose labels fit into `frames` frames.

    needed(labels_BAS, lengths_BA) are the frames that the labels need, by default S plus adjacent repeats as in CTC.
    """
    windows = feasible = 0
    for start in range(0, len(rows), FEASIBILITY_CHUNK):
        padded = rows.pad_packs([[index] for index in range(start, min(start + FEASIBILITY_CHUNK, len(rows)))])
        # Every position is tried as an anchor: invalid ones get length 0.
        anchors_BA = torch.arange(padded.tokens_BL.shape[1]).expand_as(padded.tokens_BL)
        _, labels_BAS, lengths_BA = label_windows(padded.tokens_BL, padded.mask_BL, anchors_BA, labels, padded.ended_BL)
        windows += int((lengths_BA > 0).sum())
        feasible += int(((lengths_BA > 0) & (needed(labels_BAS, lengths_BA) <= frames)).sum())
    return windows, feasible / max(windows, 1)
