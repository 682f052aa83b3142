"""Prepared rows: views of the Arrow table, packed into rows of a batch, and checked against the template.

A row is a conversation, or its turns up to one whose prompt does not begin with them (lines.py), so spans of responses
are derived and not searched: each follows its own prompt and ends with its generated tokens. That holds for templates
with and without generation markers, also for those that rewrite earlier turns. But a wrong span fails silently: a draft
head trained on prompts, or one token beside the responses, still learns something. So every span is checked against
its template again before training.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.corpus import arrow_files
from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.corpus.lines import Line, Span
from ctcdraft.errors import InputError

PROBE_PROMPTS = ("x", "Two words", "3 + 4 =", "Why?\n")  # user turns without a common ending

Pack = list[int]  # indices of the sequences in one row


@dataclass(frozen=True)
class Row:
    """A conversation, or some of its turns, with the spans of its responses, EOS included."""

    id: str
    turn: int  # of the first response
    category: str
    tokens_L: Tensor  # int32
    spans: Sequence[Span]
    sample: int = 0

    @property
    def mask_L(self) -> Tensor:
        """Return a bool mask that is true on the responses."""
        return span_mask(self.spans, len(self.tokens_L))


def row_from_line(line: Line) -> Row:
    """Return the row of one line of a part file."""
    return TokenStore(arrow_files.in_memory([[line]]))[0]


class TokenStore(Sequence[Row]):
    """The rows of an Arrow table in the columns of arrow_files, read where they are accessed."""

    def __init__(self, table: pa.Table) -> None:
        self._columns = {name: table.column(name) for name in table.column_names}
        self._kept = np.flatnonzero(self._columns["tokens"].is_valid().to_numpy())  # without dropped responses

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:  # a Row, or a list of them for a slice
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        at = int(self._kept[range(len(self))[index]])
        name, turn, category, sample = (self._columns[key][at].as_py() for key in ("id", "turn", "category", "sample"))
        # Copied, because torch warns of the memory map, which cannot be written to.
        tokens_L = torch.from_numpy(self._columns["tokens"][at].values.to_numpy().copy())
        flat = self._columns["spans"][at].values.flatten().to_pylist()
        spans = list(zip(*[iter(flat)] * 3, strict=True))
        return Row(name, turn, category, tokens_L, spans, sample)


class Column(Sequence[Any]):
    """One value of some of the rows, read anew on every access."""

    def __init__(self, rows: Sequence[Row], kept: Iterable[int], value_of: Callable[[Row], Any]) -> None:
        self._rows = rows
        self._indices = array("q", kept)
        self._value_of = value_of

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:  # a value, or a list of them for a slice
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        return self._value_of(self._rows[self._indices[index]])


def span_mask(spans: Iterable[Span], length: int) -> Tensor:
    """Return a bool mask of so many tokens that is true in the spans.

    span_mask([(1, 3, 1)], 4)   ->   [False, True, True, False]
    """
    mask_L = torch.zeros(length, dtype=torch.bool)
    for start, end, _ in spans:
        mask_L[start:end] = True
    return mask_L


@dataclass(frozen=True)
class PaddedRows:
    """Rows of packed sequences, right-padded with token 0 and mask 0."""

    tokens_BL: Tensor
    # True on response tokens, but never on the first token of a sequence, so that no window crosses into the next one.
    mask_BL: Tensor
    ended_BL: Tensor  # true on the tokens of responses that ended by themselves
    position_ids_BL: Tensor  # restart at 0 in every sequence (nn/masks.py)


@dataclass(frozen=True)
class TokenSequences:
    """Conversations as token ids with the spans of their responses, cut to the longest wanted length."""

    tokens: Sequence[Tensor]
    # Ended: the span reaches the response's own end, neither truncated in generation nor cut here.
    spans: Sequence[Sequence[Span]]
    beyond: int = 0  # responses that begin beyond that length and are left out

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> list[int]:
        return [len(tokens_L) for tokens_L in self.tokens]

    def token_counts(self, vocabulary: int) -> Tensor:
        """Return counts_V: how often each token occurs in the responses."""
        counts_V = torch.zeros(vocabulary, dtype=torch.int64)
        for tokens_L, spans in zip(self.tokens, self.spans, strict=True):
            counts_V += torch.bincount(tokens_L[span_mask(spans, len(tokens_L))], minlength=vocabulary)
        return counts_V

    def pad_packs(self, packs: Sequence[Pack]) -> PaddedRows:
        """Concatenate the sequences of every pack and pad the rows."""
        tokens = [[self.tokens[i] for i in pack] for pack in packs]
        tokens_BL = pad_sequence([torch.cat(row) for row in tokens], batch_first=True)
        mask_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
        ended_BL = torch.zeros_like(mask_BL)
        width = tokens_BL.shape[1]
        starts_BL = torch.zeros_like(tokens_BL)
        for row, pack in enumerate(packs):
            begin = 0
            for i, tokens_L in zip(pack, tokens[row], strict=True):
                starts_BL[row, begin:] = begin  # padding belongs to the last sequence
                for start, end, ended in self.spans[i]:
                    mask_BL[row, begin + start : begin + end] = True
                    ended_BL[row, begin + start : begin + end] = ended
                begin += len(tokens_L)
        longest = max(len(tokens_L) for row in tokens for tokens_L in row)
        # Clamped, so that padding gets no position id beyond those the base model has.
        position_ids_BL = (torch.arange(width) - starts_BL).clamp(max=longest - 1)
        return PaddedRows(tokens_BL, mask_BL & (position_ids_BL > 0), ended_BL, position_ids_BL)


def generation_prompt_tokens(tokenizer: Any) -> list[int]:
    """Return the token ids of the template's generation prompt: the longest common ending of unlike prompts."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    backwards = [prompt_tokens(tokenizer, [{"role": "user", "content": text}])[::-1] for text in PROBE_PROMPTS]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*backwards, strict=False))
    return [tokens[0] for tokens in same][::-1]


def refuse_wrong_masks(rows: Iterable[Row], tokenizer: Any, stop_token_ids: Collection[int]) -> None:
    """Raise InputError unless every response follows the generation prompt and ends at its first stop token."""
    opening, stops = generation_prompt_tokens(tokenizer), set(stop_token_ids)
    for row in rows:
        fault = mask_fault(row, opening, stops)
        if fault:
            raise InputError(
                f"the answer mask of {row.id} {fault}; training on it would teach the wrong tokens: prepare the corpus "
                "again with data/prepare.py overwrite=true, and look at it with show=3"
            )


def mask_fault(row: Row, opening: list[int], stops: Set[int]) -> str:
    """Return what is wrong with the spans of a row, or an empty string."""
    tokens, before = row.tokens_L.tolist(), 0
    if not row.spans:
        return "is all zeros: no answer"
    for start, end, ended in row.spans:
        if not start:
            return "is all ones: prompt and answer cannot be distinguished"
        if not before < start < end <= len(tokens):
            return f"has the answer {start} to {end} in a row of {len(tokens)} tokens, after one to {before}"
        if tokens[max(start - len(opening), 0) : start] != opening:
            return f"is shifted: the answer at token {start} does not follow the template's generation prompt"
        if not stops.isdisjoint(tokens[start : end - 1]):
            return f"is shifted: the answer at token {start} continues after its end token"
        if ended and tokens[end - 1] not in stops:
            return f"is shifted: the answer at token {start} stops before its end token"
        before = end
    return ""
