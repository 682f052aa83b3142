"""What the words said so far add to the scores of the next one: dependence between draft words at almost no cost.

It knows words and a small memory of them; no frames, no blank and no tree.

A table made of weights that are at rest: what every draft would compute again. It knows no draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctcdraft.errors import check_int
from ctcdraft.nn.transformer import RMSNorm


@dataclass(frozen=True)
class CachedTable:
    """Values, and the weights that they were made of: kept, so that no other can come to lie where they lay."""

    values: Tensor
    source_weights: tuple[Tensor, ...]
    state: tuple[tuple[int, int], ...]


class CachedProjection(nn.Module):
    """A module whose table is made once and used until its weights change: by a step, a file, another device. What
    writes past torch's count of changes (`weight.data`) does so in training, behind which the table is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self._table: CachedTable | None = None

    def train(self, mode: bool = True) -> Any:
        self._table = None
        return super().train(mode)

    def is_cacheable(self, *weights: Tensor) -> bool:
        """Whether a table may be made of these now. On a CPU alone: there a row that is read saves a product. Weights
        made in inference mode are left out, because torch does not count what changes them."""
        if self.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        return all(weight.is_cpu and not weight.is_inference() for weight in weights)

    def cached(self, make: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        """What `make` made of these weights, or makes of them now."""
        state = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if self._table is None or self._table.state != state:
            self._table = CachedTable(make(), tuple(weight.detach() for weight in weights), state)
        return self._table.values


EMBEDDING_CHUNK = 8192  # words at once while a table of all is made, or all embeddings would be there once more


class LogitCorrection(CachedProjection):
    """From a memory_XR of the words said, scores_XV that are added to every frame's words.

    The words come in through the base's frozen embedding, normalised, and leave through a table of `rank` columns
    that starts at zero: a new drafter is the uncorrected one. `start` is the memory at the root, which is certain
    and the previous word of the first label.
    """

    def __init__(self, embedding: Any, rank: int, epsilon: float) -> None:
        super().__init__()
        check_int(rank, "drafter.correction.rank")
        vocabulary, width = embedding.weight.shape
        self.embedding = embedding
        self.norm = RMSNorm(width, eps=epsilon)
        self.out = nn.Linear(rank, vocabulary, bias=False)
        nn.init.zeros_(self.out.weight)

    @abstractmethod
    def start(self, anchor_XD: Tensor, root_X: Tensor) -> Tensor:
        """Memory_XR behind the root, at an anchor with this state."""

    @abstractmethod
    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        """Memory_XR behind one word more."""

    @abstractmethod
    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weights and bias through which a word comes in."""

    def forward(self, memory_XR: Tensor) -> Tensor:
        """Scores_XV to add."""
        return self.out(memory_XR)

    def memories_along(self, start_XR: Tensor, labels_XS: Tensor) -> Tensor:
        """Memories_XPR behind the first 0, 1, .. S labels (P = S + 1); free slots of labels_XS are -1."""
        memories = [start_XR]
        for tokens_X in labels_XS.clamp(min=0).unbind(-1):
            memories.append(self.step(memories[-1], tokens_X))
        return torch.stack(memories, dim=-2)

    def project_tokens(self, tokens_X: Tensor) -> Tensor:
        """The words, looked up and through their entrance; at rest from a table of them all."""
        weight, bias = self.input_projection()
        made_of = (self.embedding.weight, self.norm.weight, weight, *(() if bias is None else (bias,)))
        if not self.is_cacheable(*made_of):
            return F.linear(self.embed_tokens(tokens_X), weight, bias)
        return self.cached(self._project_all_tokens, *made_of)[tokens_X]

    def _project_all_tokens(self) -> Tensor:
        weight, bias = self.input_projection()
        entered_VG = weight.new_empty(len(self.embedding.weight), len(weight))
        for start in range(0, len(entered_VG), EMBEDDING_CHUNK):
            some_XG = entered_VG[start : start + EMBEDDING_CHUNK]
            some_XG[:] = F.linear(self.embed_tokens(torch.arange(start, start + len(some_XG))), weight, bias)
        return entered_VG

    def embed_tokens(self, tokens_X: Tensor) -> Tensor:
        return self.norm(self.embedding(tokens_X).to(self.out.weight.dtype))


class MarkovCorrection(LogitCorrection):
    """The previous word alone: a map from words to words of low rank."""

    def __init__(self, embedding: Any, rank: int, epsilon: float) -> None:
        super().__init__(embedding, rank, epsilon)
        self.enter = nn.Linear(embedding.weight.shape[1], rank, bias=False)

    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        return self.enter.weight, None

    def start(self, anchor_XD: Tensor, root_X: Tensor) -> Tensor:
        return self.project_tokens(root_X)

    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        return self.project_tokens(tokens_X)


class GRUCorrection(LogitCorrection):
    """All words since the root, and the anchor's state, through a gated recurrent cell (Cho et al. 2014)."""

    def __init__(self, embedding: Any, rank: int, epsilon: float) -> None:
        super().__init__(embedding, rank, epsilon)
        width = embedding.weight.shape[1]
        self.first = nn.Linear(width, rank)
        self.cell = nn.GRUCell(width, rank)

    def start(self, anchor_XD: Tensor, root_X: Tensor) -> Tensor:
        return self.step(self.first(anchor_XD).tanh(), root_X)

    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        return self.cell.weight_ih, self.cell.bias_ih

    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        if self.is_cacheable(self.cell.weight_ih):
            return self.gru_cell(memory_XR, self.project_tokens(tokens_X))
        # The cell takes one leading axis.
        memory_YR = self.cell(self.embed_tokens(tokens_X).flatten(0, -2), memory_XR.flatten(0, -2))
        return memory_YR.view(memory_XR.shape)

    def gru_cell(self, memory_XR: Tensor, entered_XG: Tensor) -> Tensor:
        """What the cell does once its words have entered; G = 3 R: reset, update, new."""
        rank, cell = memory_XR.shape[-1], self.cell
        recurrent_XG = F.linear(memory_XR, cell.weight_hh, cell.bias_hh)
        gates_XG = (entered_XG[..., : 2 * rank] + recurrent_XG[..., : 2 * rank]).sigmoid_()
        reset_XR, update_XR = gates_XG[..., :rank], gates_XG[..., rank:]
        new_XR = torch.addcmul(entered_XG[..., 2 * rank :], reset_XR, recurrent_XG[..., 2 * rank :]).tanh_()
        return new_XR.lerp_(memory_XR, update_XR)
