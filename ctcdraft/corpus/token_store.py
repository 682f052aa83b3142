"""Prepared responses in memory, up to a million of them, and the rows of packed sequences made from them.

A tensor costs five hundred bytes beside its values and a row has two of them. So the tokens of all rows share one
buffer and their masks another, and a row's tensors are views that are created on access.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.errors import InputError

Pack = list[int]  # indices of the responses in one row


@dataclass(frozen=True)
class Row:
    """One prompt with its response; the mask is true on the response, EOS included."""

    id: str
    turn: int
    category: str
    tokens_L: Tensor  # int32: a corpus of a hundred million tokens has to fit in memory
    mask_L: Tensor
    ended: bool
    sample: int = 0


def row_from_line(line: dict[str, Any]) -> Row:
    """Return the row of one line of a part file."""
    return TokenStore([line])[0]


class TokenStore(Sequence[Row]):
    """The rows of many lines of part files; their tensors are views of shared buffers and must not be written to."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        tokens, masks, lengths = array("i"), bytearray(), array("q")
        self._row_fields: list[tuple[str, int, str, bool, int]] = []
        shared: dict[str, str] = {}
        for line in lines:
            if len(line["tokens"]) != len(line["mask"]):
                raise InputError(
                    f"the answer mask of {line['id']} has {len(line['mask'])} entries for {len(line['tokens'])} "
                    "tokens; prepare the corpus again with data/prepare.py overwrite=true"
                )
            tokens.extend(line["tokens"])
            masks.extend(map(bool, line["mask"]))
            lengths.append(len(line["tokens"]))
            category = shared.setdefault(line["category"], line["category"])  # one string object per category
            self._row_fields.append((line["id"], line["turn"], category, line["ended"], line["sample"]))
        self._ends = array("q", accumulate(lengths, initial=0))
        self._tokens_N = torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.empty(0, dtype=torch.int32)
        self._mask_N = torch.frombuffer(masks, dtype=torch.bool) if masks else torch.empty(0, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self._row_fields)

    def __getitem__(self, index: Any) -> Any:  # a Row, or a list of them for a slice
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        name, turn, category, ended, sample = self._row_fields[index]
        inside = slice(self._ends[index], self._ends[index + 1])
        return Row(name, turn, category, self._tokens_N[inside], self._mask_N[inside], ended, sample)


class TensorColumn(Sequence[Tensor]):
    """One tensor of some of the rows, created anew on every access."""

    def __init__(self, rows: Sequence[Row], kept: Iterable[int], tensor_of: Callable[[Row], Tensor]) -> None:
        self._rows = rows
        self._indices = array("q", kept)
        self._tensor_of = tensor_of

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:  # a tensor, or a list of them for a slice
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        return self._tensor_of(self._rows[self._indices[index]])


@dataclass(frozen=True)
class PaddedRows:
    """Rows of packed sequences, right-padded with token 0 and mask 0."""

    tokens_BL: Tensor
    # 1 on response tokens, but never on the first token of a sequence, so that no window crosses into the next one.
    mask_BL: Tensor
    ended_BL: Tensor  # whether the sequence of a position ended by itself
    position_ids_BL: Tensor  # restart at 0 in every sequence (nn/packing.py)


@dataclass(frozen=True)
class TokenSequences:
    """Prompts with their responses as token ids and answer masks, one tensor each, cut to the longest wanted length."""

    tokens: Sequence[Tensor]
    masks: Sequence[Tensor]
    ended: Sequence[bool]  # whether it reaches the response's own end: neither truncated in generation nor cut here

    def __len__(self) -> int:
        return len(self.tokens)

    def token_counts(self, vocabulary: int) -> Tensor:
        """Return counts_V: how often each token occurs in the responses."""
        counts_V = torch.zeros(vocabulary, dtype=torch.int64)
        for tokens_L, mask_L in zip(self.tokens, self.masks, strict=True):
            counts_V += torch.bincount(tokens_L[mask_L.bool()], minlength=vocabulary)
        return counts_V

    def pad_packs(self, packs: Sequence[Pack]) -> PaddedRows:
        """Concatenate the sequences of every pack and pad the rows."""
        tokens_BL = pad_sequence([torch.cat([self.tokens[i] for i in pack]) for pack in packs], batch_first=True)
        mask_BL = pad_sequence([torch.cat([self.masks[i] for i in pack]) for pack in packs], batch_first=True)
        width = tokens_BL.shape[1]
        longest = max(len(self.tokens[i]) for pack in packs for i in pack)
        ended, starts = [], []
        for pack in packs:
            lengths = torch.tensor([len(self.tokens[i]) for i in pack])
            start = lengths.cumsum(0) - lengths
            lengths[-1] = width - start[-1]  # padding belongs to the last sequence
            ended.append(torch.tensor([self.ended[i] for i in pack]).repeat_interleave(lengths))
            starts.append(start.repeat_interleave(lengths))
        # Clamped, so that padding gets no position id beyond those the base model has.
        position_ids_BL = (torch.arange(width) - torch.stack(starts)).clamp(max=longest - 1)
        return PaddedRows(tokens_BL, mask_BL.masked_fill(position_ids_BL == 0, 0), torch.stack(ended), position_ids_BL)
