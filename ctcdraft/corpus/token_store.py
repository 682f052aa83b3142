"""Prepared responses in memory, up to a million of them: packed into rows, checked against the template, and printed.

A tensor costs five hundred bytes beside its values and a row has two of them. So the tokens of all rows share one
buffer and their masks another, and a row's tensors are views that are created on access.

A row is one response behind its own prompt, so its mask is derived and not searched: zeros on the rendered prompt, ones
on the generated tokens. That holds for templates with and without generation markers, also for those that rewrite
earlier turns. But a wrong mask fails silently: a draft head trained on prompts, or one token beside the responses,
still learns something. So every mask is checked against its template again before training.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.corpus.windows import label_windows, valid_anchors
from ctcdraft.errors import InputError

PROBE_PROMPTS = ("x", "Two words", "3 + 4 =", "Why?\n")  # user turns without a common ending
# ANSI codes: dim, green, reversed, yellow, magenta
COLOURS = {"prompt": "2", "answer": "32", "anchor": "7", "root": "1;33", "labels": "1;35"}

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
            category = shared.setdefault(line["category"], line["category"])  # one object for a million rows
            self._row_fields.append((line["id"], line["turn"], category, line["ended"], line["sample"]))
        self._ends = array("q", accumulate(lengths, initial=0))
        # torch.frombuffer refuses an empty buffer.
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
    position_ids_BL: Tensor  # restart at 0 in every sequence (nn/masks.py)


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


def generation_prompt_tokens(tokenizer: Any) -> list[int]:
    """Return the token ids of the template's generation prompt: the longest common ending of unlike prompts."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    backwards = [prompt_tokens(tokenizer, [{"role": "user", "content": text}])[::-1] for text in PROBE_PROMPTS]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*backwards, strict=False))
    return [tokens[0] for tokens in same][::-1]


def refuse_wrong_masks(rows: Iterable[Row], tokenizer: Any, stop_token_ids: Collection[int]) -> None:
    """Raise InputError unless every response follows the generation prompt and ends at its first stop token."""
    opening_K = torch.tensor(generation_prompt_tokens(tokenizer), dtype=torch.int64)
    stops_E = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
    for row in rows:
        fault = mask_fault(row, opening_K, stops_E)
        if fault:
            raise InputError(
                f"the answer mask of {row.id} {fault}; training on it would teach the wrong tokens: prepare the corpus "
                "again with data/prepare.py overwrite=true, and look at it with show=3"
            )


def mask_fault(row: Row, opening_K: Tensor, stops_E: Tensor) -> str:
    """Return what is wrong with the mask of a row, or an empty string."""
    tokens_L, mask_L = row.tokens_L.long(), row.mask_L.int()
    if len(tokens_L) != len(mask_L):
        return f"has {len(mask_L)} entries for {len(tokens_L)} tokens"
    if not mask_L.any() or mask_L.all():
        return "is all ones: prompt and answer cannot be distinguished" if mask_L.any() else "is all zeros: no answer"
    edges_L = torch.diff(mask_L, prepend=mask_L.new_zeros(1), append=mask_L.new_zeros(1))
    starts, ends = (edges_L == 1).nonzero()[:, 0].tolist(), (edges_L == -1).nonzero()[:, 0].tolist()
    is_stop_L = torch.isin(tokens_L, stops_E)
    for start, end in zip(starts, ends, strict=True):
        if not torch.equal(tokens_L[max(start - len(opening_K), 0) : start], opening_K):
            return f"is shifted: the answer at token {start} does not follow the template's generation prompt"
        if is_stop_L[start : end - 1].any():
            return f"is shifted: the answer at token {start} continues after its end token"
        if not is_stop_L[end - 1] and (end < len(tokens_L) or row.ended):
            return f"is shifted: the answer at token {start} stops before its end token"
    return ""


def paint(text: str, colour: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def legend() -> str:
    return " ".join(paint(name, name) for name in COLOURS)


def render_row(row: Row, tokenizer: Any, labels: int) -> str:
    """Return one prompt and response in colour, and the window of at most `labels` labels of its middle anchor."""
    tokens_1L, mask_1L = row.tokens_L.long()[None], row.mask_L.int()[None]
    anchors_A = valid_anchors(mask_1L)[0].nonzero()[:, 0]
    colours = ["answer" if is_answer else "prompt" for is_answer in row.mask_L.tolist()]
    window = "no anchor: the answer has fewer than two tokens"
    if len(anchors_A):
        anchor = int(anchors_A[len(anchors_A) // 2])
        ended_1L = torch.full_like(tokens_1L, row.ended, dtype=torch.bool)
        root_11, labels_11S, lengths_11 = label_windows(tokens_1L, mask_1L, torch.tensor([[anchor]]), labels, ended_1L)
        length = int(lengths_11)
        colours[anchor : anchor + 2 + length] = ["anchor", "root"] + ["labels"] * length
        anchor_text, root_text = (repr(tokenizer.decode(int(token))) for token in (tokens_1L[0, anchor], root_11))
        label_texts = [paint(repr(tokenizer.decode(token)), "labels") for token in labels_11S[0, 0, :length].tolist()]
        window = (
            f"anchor {anchor} {paint(anchor_text, 'anchor')}, root {paint(root_text, 'root')}: the draft head is "
            f"trained on the labels {' '.join(label_texts) or '(none: the answer was cut off here)'}"
        )
    counts = f"{int(mask_1L.sum())} of {len(row.tokens_L)} tokens are answer, {'ended' if row.ended else 'cut off'}"
    return f"{row.id}: {counts}\n{paint_tokens(tokens_1L[0].tolist(), colours, tokenizer)}\n{window}"


def paint_tokens(tokens: list[int], colours: list[str], tokenizer: Any) -> str:
    """Return the text of all tokens in colours, one decoding per run of a colour: characters can span tokens."""
    text, painted, end = "", [], 0
    for colour, run in groupby(colours):
        end += len(list(run))
        # The difference of two decodings: decoded alone, a run would lose its leading space with some tokenizers.
        longer = tokenizer.decode(tokens[:end])
        painted.append(paint(longer[len(text) :], colour))
        text = longer
    return "".join(painted)
