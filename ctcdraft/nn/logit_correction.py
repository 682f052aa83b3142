"""Logit corrections: dependence between draft tokens, added to the token logits of independently computed frames.

A small memory of the tokens so far gives a low-rank correction of the next token's logits, at almost no cost. In
decoding the projection of all tokens is cached, because every draft would compute it again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctcdraft.errors import check_int
from ctcdraft.nn.block_config import RMSNorm
from ctcdraft.nn.block_operations import gru_memory, gru_step, row_zero
from ctcdraft.nn.compiled_step import CachedArrays, compiled_gru_start

EMBEDDING_CHUNK = 8192  # tokens projected at once, so that no second copy of all embeddings is in memory


class CachedTable(NamedTuple):
    """The projected embeddings of all tokens, and the weights they were computed from."""

    state: tuple[tuple[int, int], ...]  # address and version of every weight
    # Kept alive, or new weights could reuse their addresses and make a stale table look valid.
    source_weights: tuple[Tensor, ...]
    values_VG: Tensor


class LogitCorrection(nn.Module):
    """From a memory_XR of the tokens so far to logits_XV that are added to those of every frame.

    Tokens enter through the base's frozen embedding, normalised; the memory leaves through a matrix of `rank` columns
    that starts at zero, so an untrained correction changes nothing. `start` is the memory at the root, the token before
    the first label.
    """

    reads_anchor = True  # whether `start` reads the hidden state at the anchor
    reads_frames = False  # whether it corrects frame k for draft token k alone, by the frame's own hidden state

    def __init__(self, embedding: Any, rank: int, epsilon: float) -> None:
        super().__init__()
        check_int(rank, "drafter.correction.rank")
        vocabulary, width = embedding.weight.shape
        self.embedding = embedding
        self.norm: Any = RMSNorm(width, eps=epsilon)
        self.out = nn.Linear(rank, vocabulary, bias=False)
        nn.init.zeros_(self.out.weight)
        self._table: CachedTable | None = None
        self._arrays: CachedArrays | None = None

    @abstractmethod
    def start(self, anchor_XD: Tensor, root_X: Tensor, frames_XTD: Tensor | None = None) -> Tensor:
        """Return memory_XR at the root, given the hidden states at the anchor and of the frames."""

    @abstractmethod
    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        """Return memory_XR after one more token."""

    def extend(self, memory_XR: Tensor, rows_K: Tensor, tokens_K: Tensor) -> Tensor:
        """Return memory_KR of these rows after one more token each."""
        return self.step(memory_XR[rows_K], tokens_K)

    @abstractmethod
    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the projection of token embeddings."""

    def features(self, memory_XR: Tensor) -> Tensor:
        """Return what the output matrix is multiplied with."""
        return memory_XR

    def forward(self, memory_XR: Tensor) -> Tensor:
        """Return the logits_XV to add."""
        return self.out(self.features(memory_XR))

    def memories_along(self, start_XR: Tensor, labels_XS: Tensor) -> Tensor:
        """Return memories_XPR after the first 0, 1, .. S labels (P = S + 1); padding in labels_XS is -1."""
        memories = [start_XR]
        for tokens_X in labels_XS.clamp(min=0).unbind(-1):
            memories.append(self.step(memories[-1], tokens_X))
        return torch.stack(memories, dim=-2)

    def train(self, mode: bool = True) -> Any:
        # Training may write to `weight.data`, which torch's version counter does not count.
        self._table = self._arrays = None
        return super().train(mode)

    def is_cacheable(self, *weights: Tensor) -> bool:
        """Return whether a table of these weights may be used now."""
        if self.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        # On a CPU only, where reading a row is cheaper than a product. Versions of inference tensors are not counted.
        return all(weight.is_cpu and not weight.is_inference() for weight in weights)

    def recurrent_weights(self) -> tuple[Tensor, Tensor]:
        """Return weight_GR and bias_G that a recurrent cell applies to the memory; empty without one."""
        return self.out.weight[:0], self.out.weight[:0, 0]

    def arrays(self) -> Sequence[Any] | None:
        """Return float32 arrays table_VG, recurrent_GR, bias_G and out_RV; None without such."""
        if not self.is_cacheable():
            return None
        if self._arrays is None or not self._arrays.are_current():
            self._arrays = CachedArrays.of(self)
        return None if self._arrays is None else self._arrays.arrays

    def alignment_arrays(self) -> Sequence[Any] | None:
        """Return `arrays` where frames may hold any draft token, for the searches of alignments; else None."""
        return None if self.reads_frames else self.arrays()

    def frame_arrays(self, memory_R: Tensor) -> tuple[Any, Sequence[Any]]:
        """Return the recurrent memory_M, and the arrays of `FrameFeatures` if the correction reads frames, else ()."""
        return memory_R.numpy(), ()

    def project_tokens(self, tokens_X: Tensor) -> Tensor:
        """Return the projected embeddings_XG of tokens, from a table of all tokens where it may be used."""
        if (table_VG := self.projected_tokens()) is None:
            return F.linear(self.embed_tokens(tokens_X), *self.input_projection())
        return table_VG[tokens_X]

    def projected_tokens(self) -> Tensor | None:
        """Return the table of all tokens; None where it may not be used."""
        weight, bias = self.input_projection()
        sources = (self.embedding.weight, *self.norm.parameters(), weight, *(() if bias is None else (bias,)))
        if not self.is_cacheable(*sources):
            return None
        state = tuple((source.data_ptr(), source._version) for source in sources)
        if self._table is None or self._table.state != state:  # changed by a step, a file or another device
            self._table = CachedTable(state, tuple(source.detach() for source in sources), self.all_projections())
        return self._table.values_VG

    def all_projections(self) -> Tensor:
        """Return the projected embeddings_VG of all tokens."""
        weight, bias = self.input_projection()
        ids_V = torch.arange(len(self.embedding.weight), device=weight.device)
        return torch.cat([F.linear(self.embed_tokens(ids_X), weight, bias) for ids_X in ids_V.split(EMBEDDING_CHUNK)])

    def embed_tokens(self, tokens_X: Tensor) -> Tensor:
        return self.norm(self.embedding(tokens_X).to(self.out.weight.dtype))


class MarkovCorrection(LogitCorrection):
    """A correction by the previous token alone: a low-rank matrix from tokens to tokens.

    own_embedding: trained rows of `rank` numbers for all tokens (DSpark) instead of a projection of their embeddings.
    """

    reads_anchor = False

    def __init__(self, embedding: Any, rank: int, epsilon: float, own_embedding: bool = False) -> None:
        super().__init__(embedding, rank, epsilon)
        vocabulary, width = embedding.weight.shape
        self.enter: Any = nn.Embedding(vocabulary, rank) if own_embedding else nn.Linear(width, rank, bias=False)
        if own_embedding:
            self.norm = nn.Identity()
            nn.init.normal_(self.enter.weight, std=0.01)

    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        return self.enter.weight, None

    def project_tokens(self, tokens_X: Tensor) -> Tensor:
        return self.enter(tokens_X) if isinstance(self.enter, nn.Embedding) else super().project_tokens(tokens_X)

    def projected_tokens(self) -> Tensor | None:
        if not isinstance(self.enter, nn.Embedding):
            return super().projected_tokens()
        return self.enter.weight.detach() if self.is_cacheable(self.enter.weight) else None

    def start(self, anchor_XD: Tensor, root_X: Tensor, frames_XTD: Tensor | None = None) -> Tensor:
        return self.project_tokens(root_X)

    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        return self.project_tokens(tokens_X)

    def extend(self, memory_XR: Tensor, rows_K: Tensor, tokens_K: Tensor) -> Tensor:
        return self.project_tokens(tokens_K)


class GRUCorrection(LogitCorrection):
    """A correction by all tokens since the root and the anchor's hidden state, through a GRU cell (Cho et al. 2014)."""

    def __init__(self, embedding: Any, rank: int, epsilon: float) -> None:
        super().__init__(embedding, rank, epsilon)
        width = embedding.weight.shape[1]
        self.first = nn.Linear(width, rank)
        self.cell = nn.GRUCell(width, rank)
        self.inputs_VG: Tensor | None = None  # the cell's products of all tokens, on an accelerator

    @torch.no_grad()
    def pack(self) -> None:
        """Compute the cell's products of all tokens, on an accelerator, for a head that is not trained any more."""
        self.inputs_VG = None if self.cell.weight_ih.is_cpu else self.all_projections()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.inputs_VG = None  # of weights on another device or in another dtype
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.inputs_VG = None  # of other weights
        super()._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> Any:
        self.inputs_VG = None if mode else self.inputs_VG
        return super().train(mode)

    def start(self, anchor_XD: Tensor, root_X: Tensor, frames_XTD: Tensor | None = None) -> Tensor:
        arrays = self.arrays() if root_X.numel() == 1 else None
        if arrays and (memory_XR := compiled_gru_start(self.first, arrays, anchor_XD, root_X)) is not None:
            return memory_XR
        memory_XR = self.first(anchor_XD).tanh()
        if root_X.numel() == 1 and not root_X.is_cpu:  # a draft's, not a training batch's
            return self.extend(memory_XR.flatten(0, -2), row_zero(root_X.device), root_X.flatten()).view_as(memory_XR)
        return self.step(memory_XR, root_X)

    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        return self.cell.weight_ih, self.cell.bias_ih

    def recurrent_weights(self) -> tuple[Tensor, Tensor]:
        return self.cell.weight_hh, self.cell.bias_hh

    def extend(self, memory_XR: Tensor, rows_K: Tensor, tokens_K: Tensor) -> Tensor:
        if self.inputs_VG is None or torch.is_grad_enabled():
            return super().extend(memory_XR, rows_K, tokens_K)
        return gru_step(self.inputs_VG, *self.recurrent_weights(), memory_XR, rows_K, tokens_K)

    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        if not self.is_cacheable(self.cell.weight_ih):
            # The cell takes one leading axis.
            return self.cell(self.embed_tokens(tokens_X).flatten(0, -2), memory_XR.flatten(0, -2)).view_as(memory_XR)
        recurrent_XG = F.linear(memory_XR, *self.recurrent_weights())
        return gru_memory(self.project_tokens(tokens_X), recurrent_XG, memory_XR)
