"""From prepared answers to batches. A batch is a function of (corpus, seed, step), so resuming needs no iterator state.

It knows rows and windows; not the drafter, and not the objective beyond how many labels it wants.

Which answers a step takes, and which of them share a row. It knows an order and lengths; no tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.batch import Batch
from ctcdraft.corpus.hidden_states import HiddenStatesFactory, OnlineHiddenStates, compute_hidden_states
from ctcdraft.corpus.windows import label_windows, sample_anchors
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.models.base_model import BaseLM

MAX_OPEN_PACKS = (
    64  # packs that may still be filled: more of them leave less padding, and cost as many comparisons an answer
)

Pack = list[int]  # answers, by index
# (the answers in the order of an epoch, all lengths, rows a step) -> the epoch's steps, each a list of rows
PackingFunction = Callable[[Sequence[int], Sequence[int], int], list[list[Pack]]]


def one_per_row(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[list[Pack]]:
    """Every answer in a row of its own, whole steps only: what is left over comes in another epoch's order."""
    return [[[index] for index in order[at : at + rows]] for at in range(0, len(order) - rows + 1, rows)]


def first_fit_packing(size: int) -> PackingFunction:
    """Packs of up to `size` tokens, and every answer exactly once: an epoch's last step may have fewer rows."""

    def fill(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[list[Pack]]:
        packs = first_fit(order, lengths, size)
        return [packs[at : at + rows] for at in range(0, len(packs), rows)]

    return fill


def first_fit(order: Sequence[int], lengths: Sequence[int], size: int, most_open: int = MAX_OPEN_PACKS) -> list[Pack]:
    """Each answer into the oldest open pack that has room; where none has, into a new one. Of more than `most_open`
    the fullest is closed. The order of packs is that in which they were begun. An answer longer than `size` is a
    pack by itself.

    size 10, answers of 6 5 4 5 tokens   ->   [6 4] [5 5]
    """
    packs: list[Pack] = []
    room: list[tuple[int, Pack]] = []  # of the open ones
    for index in order:
        length = lengths[index]
        at = next((at for at, (left, _) in enumerate(room) if left >= length), None)
        if at is None:
            packs.append([index])
            room.append((size - length, packs[-1]))
            if len(room) > most_open:
                room.remove(min(room, key=lambda pack: pack[0]))
        else:
            left, pack = room[at]
            pack.append(index)
            room[at] = (left - length, pack)
    return packs


FEASIBILITY_CHUNK = 64  # at a time, for the plan: row by row a million answers took six minutes


@dataclass(frozen=True)
class TokenSequences:
    """Answers as token ids and answer masks, one tensor each a row, cut to the longest length wanted.

    ended: whether the row reaches to the answer's own end, and was cut by nobody.
    """

    tokens: Sequence[Tensor]
    masks: Sequence[Tensor]
    ended: Sequence[bool]

    def __len__(self) -> int:
        return len(self.tokens)

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often the answers say each word, counts_V."""
        counts_V = torch.zeros(vocabulary, dtype=torch.int64)
        for tokens_L, mask_L in zip(self.tokens, self.masks, strict=True):
            counts_V += torch.bincount(tokens_L[mask_L.bool()], minlength=vocabulary)
        return counts_V

    def pad_packs(self, packs: Sequence[Pack]) -> PaddedRows:
        """The answers of every pack behind one another."""
        tokens_BL = pad_sequence([torch.cat([self.tokens[i] for i in pack]) for pack in packs], batch_first=True)
        mask_BL = pad_sequence([torch.cat([self.masks[i] for i in pack]) for pack in packs], batch_first=True)
        width = tokens_BL.shape[1]
        longest = max(len(self.tokens[i]) for pack in packs for i in pack)
        ended, begins = [], []
        for pack in packs:
            lengths = torch.tensor([len(self.tokens[i]) for i in pack])
            begin = lengths.cumsum(0) - lengths
            lengths[-1] = width - begin[-1]  # padding counts as the end of the last
            ended.append(torch.tensor([self.ended[i] for i in pack]).repeat_interleave(lengths))
            begins.append(begin.repeat_interleave(lengths))
        # Clamped, so that padding stands at no place that a base might not have.
        places_BL = (torch.arange(width) - torch.stack(begins)).clamp(max=longest - 1)
        return PaddedRows(tokens_BL, mask_BL.masked_fill(places_BL == 0, 0), torch.stack(ended), places_BL)


@dataclass(frozen=True)
class PaddedRows:
    """Rows of text, padded on the right with token 0 and mask 0.

    mask_BL: which tokens are answer; never the first of a text, which nobody says, so that no window reaches from
    one text into the next. ended_BL: whether the text of a position ended by itself. places_BL: see nn/packs.py.
    """

    tokens_BL: Tensor
    mask_BL: Tensor
    ended_BL: Tensor
    position_ids_BL: Tensor


@dataclass(frozen=True)
class PreparedBatch:
    """What of a batch can be had beside a running step: all else, and the states if they are stored."""

    windows: dict[str, Tensor]
    states_BLD: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [*self.windows.values(), *([] if self.states_BLD is None else [self.states_BLD])]


class Batches:
    """Answers in a new random order every epoch, laid into rows by `filling`; anchors drawn anew every step.

    rows_a_step: rows, be they one answer or a pack of several. anchors: windows drawn from each row.
    """

    def __init__(
        self,
        rows: TokenSequences,
        base: BaseLM,
        rows_per_step: int,
        anchors: int,
        labels: int,
        seed: int,
        hidden_states: HiddenStatesFactory = OnlineHiddenStates,
        packing: PackingFunction = one_per_row,
        compute_states: Callable[..., Tensor] = compute_hidden_states,
    ) -> None:
        self.rows = rows
        self.base = base
        self.device = base.device
        self.hidden_states = hidden_states(base, rows.tokens)
        self.rows_per_step = min(rows_per_step, len(rows))
        self.packing = packing
        self.compute_states = compute_states  # of states that are not kept
        self.anchors = anchors
        self.labels = labels
        self.seed = seed
        self.epoch = lru_cache(maxsize=2)(self._epoch_steps)
        self._epoch_starts = [0]  # the first steps of the epochs looked at so far: packs are not as many in each

    @property
    def steps_per_epoch(self) -> int:
        """Those of the first."""
        return len(self.epoch(0))

    def batch(self, step: int) -> Batch:
        """The batch of a step, with the base's states, on the base's device."""
        return self.complete(self.prepare(step))

    def prepare(self, step: int) -> PreparedBatch:
        """What of a batch needs no base, on the base's device."""
        packs = self.packs(step)
        laid = self.rows.pad_packs(packs)
        anchors_BA = sample_anchors(laid.mask_BL, self.anchors, self._rng(step, 1))
        roots_BA, labels_BAS, lengths_BA = label_windows(
            laid.tokens_BL, laid.mask_BL, anchors_BA, self.labels, laid.ended_BL
        )
        windows = {
            "tokens_BL": laid.tokens_BL,
            "anchors_BA": anchors_BA,
            "roots_BA": roots_BA,
            "labels_BAS": labels_BAS,
            "lengths_BA": lengths_BA,
            "position_ids_BL": laid.position_ids_BL,
        }
        windows = {name: value.to(self.device) for name, value in windows.items()}
        return PreparedBatch(windows, self.hidden_states.stored_states(packs))

    def complete(self, prepared: PreparedBatch) -> Batch:
        """The batch; where states are not stored the base reads the text now."""
        states_BLD = prepared.states_BLD
        if states_BLD is None:
            states_BLD = self.compute_states(
                self.base, prepared.windows["tokens_BL"], prepared.windows["position_ids_BL"]
            )
        return Batch(states_BLD=states_BLD, **prepared.windows)

    def describe(self) -> str:
        """How the first epoch fills its rows, in words."""
        rows = answers = tokens = padded_tokens = 0
        for packs in self.epoch(0):
            lengths = [sum(len(self.rows.tokens[i]) for i in pack) for pack in packs]
            rows, answers = rows + len(packs), answers + sum(map(len, packs))
            tokens, padded_tokens = tokens + sum(lengths), padded_tokens + len(packs) * max(lengths)
        return (
            f"{answers / rows:.1f} answers and {tokens / rows:,.0f} tokens a row, "
            f"{1 - tokens / padded_tokens:.1%} padding"
        )

    def close(self) -> None:
        """Nothing is open; see Prefetched."""

    def packs(self, step: int) -> list[Pack]:
        """The answers of a step, row by row."""
        epoch = bisect_right(self._epoch_starts, step) - 1
        while step >= (end := self._epoch_starts[epoch] + len(self.epoch(epoch))):
            epoch += 1
            if epoch == len(self._epoch_starts):
                self._epoch_starts.append(end)
        return self.epoch(epoch)[step - self._epoch_starts[epoch]]

    def _epoch_steps(self, epoch: int) -> list[list[Pack]]:
        """The steps of an epoch, each a list of packs."""
        order = torch.randperm(len(self.rows), generator=self._rng(epoch, 0)).tolist()
        return self.packing(order, [len(tokens_L) for tokens_L in self.rows.tokens], self.rows_per_step)

    def _rng(self, number: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) * 2 + stream)


def feasible_share(
    rows: TokenSequences, labels: int, frames: int, needed: Callable[..., Tensor] = frames_needed
) -> tuple[int, float]:
    """Windows in the corpus, and the share that `frames` frames can say: for the plan, before step 0. needed: how many
    frames labels need, where that is not CTC's."""
    windows = feasible = 0
    for start in range(0, len(rows), FEASIBILITY_CHUNK):
        laid = rows.pad_packs([[index] for index in range(start, min(start + FEASIBILITY_CHUNK, len(rows)))])
        every_BA = torch.arange(laid.tokens_BL.shape[1]).expand_as(laid.tokens_BL)  # what is no anchor has no labels
        _, labels_BAS, lengths_BA = label_windows(laid.tokens_BL, laid.mask_BL, every_BA, labels, laid.ended_BL)
        windows += int((lengths_BA > 0).sum())
        feasible += int(((lengths_BA > 0) & (needed(labels_BAS, lengths_BA) <= frames)).sum())
    return windows, feasible / max(windows, 1)
