"""lm_heads of draft heads: trained copies of the base's, and restrictions to the most frequent tokens of a corpus.

A draft head reads V rows of weights for tokens of which most are hardly ever drafted; the rows of the N most frequent
ones suffice (Zhao et al. 2025, "FR-Spec"). Class ids do not change: tokens outside the draft vocabulary have
probability 0, so trees, searches and verification are unaffected, and labels among them have likelihood 0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

import torch
from torch import Tensor, nn

from ctcdraft.errors import InputError, check_int
from ctcdraft.nn.base_layer import dequantized_weight


class DraftVocabHead(nn.Module):
    """`count` rows of an lm_head: the first ones until `set_tokens` selects others.

    trained: its weights are parameters, which begin as these rows. with_bias: then also a bias, zeros if there is none.
    width: of other hidden states than the lm_head's; then the weights begin at random and belong to any tokens.
    """

    def __init__(
        self, lm_head: Any, count: int, trained: bool = False, with_bias: bool = False, width: int | None = None
    ) -> None:
        super().__init__()
        size = len(lm_head.weight)
        if check_int(count, "drafter.vocabulary") > size:
            raise InputError(f"drafter.vocabulary must be <= {size} (the base's vocabulary) or null, got {count}")
        self.all = lm_head
        self.words_N: Tensor
        self.register_buffer("words_N", torch.arange(count, device=lm_head.weight.device))
        self.trained, self.copied = trained, trained and width is None
        self.weight: Any
        self.bias: Any
        if trained and width is not None:
            self.weight, self.bias = random_head(lm_head, width, count).weight, None
        else:
            self.weight, self.bias = own_parameters(*self.rows(), with_bias) if trained else self.rows()
        self.refresh()

    def set_tokens(self, tokens_N: Tensor) -> None:
        """Select these tokens, ids in ascending order."""
        self.words_N.copy_(tokens_N)
        if self.copied:  # in place: an optimizer may have the parameters already
            for own, rows in zip((self.weight, self.bias), self.rows(), strict=True):
                if rows is not None:
                    own.data.copy_(rows)
        self.refresh()

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Return the selected rows, contiguous for products, and their biases."""
        bias_V = getattr(self.all, "bias", None)
        return self.all.weight[self.words_N], None if bias_V is None else bias_V[self.words_N]

    def refresh(self) -> None:
        """Recompute what follows from words_N; to be called after it was written to."""
        self.refuse_wrong_tokens()
        if not self.trained:
            self.weight, self.bias = self.rows()
        self.row_of_token_V = torch.full((len(self.all.weight),), -1, device=self.words_N.device)
        self.row_of_token_V[self.words_N] = torch.arange(len(self.words_N), device=self.words_N.device)

    def refuse_wrong_tokens(self) -> None:
        """Raise InputError unless words_N, which may be from a file, are ids in ascending order."""
        ids_N, size = self.words_N, len(self.all.weight)
        if not ids_N.is_meta and not bool(((ids_N >= 0) & (ids_N < size)).all() & (ids_N[1:] > ids_N[:-1]).all()):
            raise InputError(f"the draft vocabulary of a head must be ascending token ids from 0 to {size - 1}")

    def forward(self, states_XD: Tensor) -> Tensor:
        """Return logits_XV, -inf outside the draft vocabulary."""
        logits_XN = nn.functional.linear(states_XD, self.weight, self.bias)
        logits_XV = logits_XN.new_full((*logits_XN.shape[:-1], len(self.row_of_token_V)), -torch.inf)
        return logits_XV.index_copy(-1, self.words_N, logits_XN)


def own_parameters(weight_VD: Tensor, bias_V: Tensor | None, with_bias: bool) -> tuple[Any, Any]:
    """Return a copy of a weight and a bias as parameters: in float32, as bfloat16 would round most updates away."""
    weight_VD = dequantized_weight(weight_VD.detach()).to(torch.float32, copy=True)
    if bias_V is None:
        return nn.Parameter(weight_VD), nn.Parameter(torch.zeros_like(weight_VD[:, 0])) if with_bias else None
    return nn.Parameter(weight_VD), nn.Parameter(bias_V.detach().to(torch.float32, copy=True))


def random_head(lm_head: Any, width: int, count: int) -> nn.Linear:
    """Return an lm_head of `count` rows for hidden states of another width, as torch draws it."""
    return nn.Linear(width, count, bias=False, device=lm_head.weight.device)


def draft_lm_head(
    lm_head: Any, vocabulary: int | None, trained: bool, with_bias: bool = False, width: int | None = None
) -> Any:
    """Return the lm_head of a draft head: the base's or a trained copy, for all tokens or a draft vocabulary.

    width: of the hidden states that a trained one reads instead of the base's; then it begins at random.
    """
    if vocabulary is not None:
        return DraftVocabHead(lm_head, vocabulary, trained, with_bias, width)
    if not trained:
        return lm_head
    if width is not None:
        return random_head(lm_head, width, len(lm_head.weight))
    vocabulary, width = lm_head.weight.shape
    own = nn.Linear(width, vocabulary, bias=False, device="meta")  # no random numbers are drawn
    own.weight, own.bias = own_parameters(lm_head.weight, getattr(lm_head, "bias", None), with_bias)
    return own


class FrameHeads(nn.Module):
    """An lm_head for each frame, which begins as the base's and is trained: of Medusa and Hydra.

    with_blank: the logits have a column for the blank, of probability zero, as trees of frames expect.
    """

    def __init__(
        self, lm_head: Any, frames: int, vocabulary: int | None, with_bias: bool = False, with_blank: bool = False
    ) -> None:
        super().__init__()
        heads = [draft_lm_head(lm_head, vocabulary, trained=True, with_bias=with_bias) for _ in range(frames)]
        self.frames = nn.ModuleList(heads)
        self.blank: int = lm_head.weight.shape[0]
        self.with_blank = with_blank

    @property
    def words(self) -> Self:
        """The lm_head of all frames, which has no rows that serve them all."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.of_frame(0).weight.dtype

    def of_frame(self, frame: int) -> Any:
        return self.frames[frame]

    def token_logits(self, states_XTD: Tensor) -> Tensor:
        """Return logits_XTV of the first T frames."""
        states = enumerate(states_XTD.unbind(dim=-2))
        return torch.stack([self.of_frame(frame)(states_XD.to(self.dtype)) for frame, states_XD in states], dim=-2)

    def forward(self, states_XTD: Tensor) -> Tensor:
        logits_XTV = self.token_logits(states_XTD)
        if not self.with_blank:
            return logits_XTV
        # Not -inf, whose differences are nan.
        return nn.functional.pad(logits_XTV, (0, 1), value=torch.finfo(logits_XTV.dtype).min)


def most_frequent_tokens(counts_V: Tensor, count: int, always: Collection[int]) -> Tensor:
    """Return the `count` tokens with the largest counts, `always` among them, ascending; of equal ones the first.

    counts 5 0 7 5, two of them, always 1   ->   1 2
    """
    required = [token for token in always if token < len(counts_V)]  # a stop token id may exceed the lm_head's rows
    if count < len(required):
        raise InputError(f"drafter.vocabulary must be >= {len(required)}, the number of stop tokens, got {count}")
    ranked_V = counts_V.double()
    ranked_V[required] = torch.inf
    return ranked_V.sort(descending=True, stable=True).indices[:count].sort().values


def head_rows(lm_head: Any, labels_XS: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the lm_head's rows_XS of these labels (any for padding), and true_XS for labels without one, or None."""
    tokens_XS = labels_XS.clamp(min=0)
    if not isinstance(lm_head, DraftVocabHead):
        return tokens_XS, None
    rows_XS = lm_head.row_of_token_V[tokens_XS]
    return rows_XS.clamp(min=0), rows_XS < 0


def restrict_rows(lm_head: Any, table_VR: Tensor) -> Tensor:
    """Return the rows of another table that belong to the lm_head's rows."""
    return table_VR[lm_head.words_N] if isinstance(lm_head, DraftVocabHead) else table_VR


def mask_absent_labels(scores_XTS: Tensor, absent_XS: Tensor | None) -> Tensor:
    """Set the scores of labels outside the draft vocabulary to -inf."""
    return scores_XTS if absent_XS is None else scores_XTS.masked_fill(absent_XS[:, None], -torch.inf)
