"""From prepared answers to batches. A batch is a function of (seed, step) alone, so resuming needs no iterator state.

It knows rows and windows; not the drafter, and not the objective beyond how many labels it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.base import BaseLM
from ctcdraft.corpus.states import Live, Source
from ctcdraft.corpus.windows import label_windows, sample_anchors, valid_anchors
from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.drafters.drafter import Batch


@dataclass(frozen=True)
class Rows:
    """Answers as token ids and answer masks, one tensor each a row, cut to the longest length wanted.

    ended: whether the row reaches to the answer's own end, and was cut by nobody.
    """

    tokens: Sequence[Tensor]
    masks: Sequence[Tensor]
    ended: Sequence[bool]

    def __len__(self) -> int:
        return len(self.tokens)

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """tokens_BL and mask_BL of some rows, padded on the right with token 0 and mask 0, and ended_B."""
        tokens_BL = pad_sequence([self.tokens[i] for i in indices], batch_first=True)
        mask_BL = pad_sequence([self.masks[i] for i in indices], batch_first=True)
        return tokens_BL, mask_BL, torch.tensor([self.ended[i] for i in indices])


class Batches:
    """Rows in a new random order every epoch, anchors drawn anew every step."""

    def __init__(
        self,
        rows: Rows,
        base: BaseLM,
        rows_a_step: int,
        anchors: int,
        labels: int,
        seed: int,
        states: Source = Live,
    ) -> None:
        self.rows = rows
        self.device = base.device
        self.states = states(base, rows.tokens)
        self.rows_a_step = min(rows_a_step, len(rows))
        self.anchors = anchors
        self.labels = labels
        self.seed = seed

    @property
    def steps_an_epoch(self) -> int:
        return len(self.rows) // self.rows_a_step

    def batch(self, step: int) -> Batch:
        """The batch of a step, with the base's states, on the base's device."""
        epoch, place = divmod(step, self.steps_an_epoch)
        order = torch.randperm(len(self.rows), generator=self._rng(epoch, 0)).tolist()
        chosen = order[place * self.rows_a_step : (place + 1) * self.rows_a_step]
        tokens_BL, mask_BL, ended_B = self.rows.padded(chosen)
        anchors_BA = sample_anchors(mask_BL, self.anchors, self._rng(step, 1))
        roots_BA, labels_BAS, lengths_BA = label_windows(tokens_BL, mask_BL, anchors_BA, self.labels, ended_B)
        states_BLD = self.states(chosen, tokens_BL)
        windows = (tokens_BL, anchors_BA, roots_BA, labels_BAS, lengths_BA)
        tokens_BL, anchors_BA, roots_BA, labels_BAS, lengths_BA = (part.to(self.device) for part in windows)
        return Batch(tokens_BL, states_BLD, anchors_BA, roots_BA, labels_BAS, lengths_BA)

    def _rng(self, number: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) * 2 + stream)


def feasible_share(
    rows: Rows, labels: int, frames: int, needed: Callable[..., Tensor] = frames_needed
) -> tuple[int, float]:
    """Windows in the corpus, and the share that `frames` frames can say: for the plan, before step 0. needed: how many
    frames labels need, where that is not CTC's."""
    windows = feasible = 0
    for index in range(len(rows)):
        tokens_1L, mask_1L, ended_1 = rows.padded([index])
        anchors_1A = valid_anchors(mask_1L)[0].nonzero().T
        if anchors_1A.numel() == 0:
            continue
        _, labels_1AS, lengths_1A = label_windows(tokens_1L, mask_1L, anchors_1A, labels, ended_1)
        windows += int((lengths_1A > 0).sum())
        feasible += int(((lengths_1A > 0) & (needed(labels_1AS, lengths_1A) <= frames)).sum())
    return windows, feasible / max(windows, 1)
