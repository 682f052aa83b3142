"""A logit correction by the tokens so far and the hidden state of the frame that it corrects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctcdraft.errors import check_int
from ctcdraft.nn.compiled_step import MAX_WEIGHTS, is_ready_linear
from ctcdraft.nn.logit_correction import LogitCorrection


class FrameGRUCorrection(LogitCorrection):
    """Domino's correction: a GRU reads the root and the draft tokens, and meets the frame's hidden state in an MLP.

        logits of frame k  +=  out(SiLU(A h_k + B s_k))        s_k: the GRU after the root and k - 1 draft tokens

    A memory holds s_k and A h of the frames from k on, of which every token drops the first one. So frame k is
    corrected for draft token k alone, and alignments, where any frame may hold any token, cannot be summed over.

        memory after one token     s_2 | A h_2, 1 | A h_3, 1 | 0, 0        the second number: whether it is corrected

    Args:
        memory: width of the GRU.
        uncorrected: first frames that stay as they are.
    """

    reads_anchor = False
    reads_frames = True

    def __init__(self, embedding: Any, rank: int, epsilon: float, memory: int, uncorrected: int) -> None:
        super().__init__(embedding, rank, epsilon)
        width = embedding.weight.shape[1]
        self.rank, self.memory = rank, check_int(memory, "drafter.correction.memory")
        self.uncorrected = check_int(uncorrected, "drafter.correction.uncorrected", least=0)
        self.norm = nn.Identity()
        self.cell = nn.GRUCell(width, memory, bias=False)
        self.of_frame = nn.Linear(width, rank, bias=False)
        self.of_tokens = nn.Linear(memory, rank, bias=False)

    def start(self, anchor_XD: Tensor, root_X: Tensor, frames_XTD: Tensor | None = None) -> Tensor:
        if frames_XTD is None:
            raise ValueError("FrameGRUCorrection starts from the hidden states of the frames")
        frames_XTR = self.of_frame(frames_XTD.to(self.out.weight.dtype))
        corrected_T = torch.arange(frames_XTR.shape[-2], device=root_X.device) >= self.uncorrected
        corrected_XT1 = corrected_T.to(frames_XTR.dtype)[:, None].expand(*frames_XTR.shape[:-1], 1)
        queue_XQ = torch.cat([frames_XTR, corrected_XT1], dim=-1).flatten(-2)
        state_XM = queue_XQ.new_zeros(*queue_XQ.shape[:-1], self.memory)
        return torch.cat([self.read(state_XM, root_X), queue_XQ], dim=-1)

    def step(self, memory_XR: Tensor, tokens_X: Tensor) -> Tensor:
        state_XM, queue_XQ = memory_XR.split([self.memory, memory_XR.shape[-1] - self.memory], dim=-1)
        entry = self.rank + 1
        return torch.cat([self.read(state_XM, tokens_X), F.pad(queue_XQ[..., entry:], (0, entry))], dim=-1)

    def read(self, state_XM: Tensor, tokens_X: Tensor) -> Tensor:
        """Return the GRU's state after one more token."""
        # The cell takes one leading axis.
        state_YM = self.cell(self.embed_tokens(tokens_X).flatten(0, -2), state_XM.flatten(0, -2))
        return state_YM.view(state_XM.shape)

    def features(self, memory_XR: Tensor) -> Tensor:
        state_XM, frame_XR, corrected_X1, _ = memory_XR.split(
            [self.memory, self.rank, 1, memory_XR.shape[-1] - self.memory - self.rank - 1], dim=-1
        )
        return corrected_X1 * F.silu(frame_XR + self.of_tokens(state_XM))

    def input_projection(self) -> tuple[Tensor, Tensor | None]:
        return self.cell.weight_ih, None

    def recurrent_weights(self) -> tuple[Tensor, Tensor]:
        return self.cell.weight_hh, torch.zeros_like(self.cell.weight_hh[:, 0])

    def arrays(self) -> Sequence[Any] | None:
        # Machine code multiplies one prefix at a time; with more weights torch's products of a level are faster.
        few = self.cell.weight_hh.numel() <= MAX_WEIGHTS
        return super().arrays() if few and is_ready_linear(self.of_tokens) else None

    def frame_arrays(self, memory_R: Tensor) -> tuple[Any, Sequence[Any]]:
        state_M, queue_Q = memory_R.split([self.memory, len(memory_R) - self.memory])
        frames_TE = queue_Q.view(-1, self.rank + 1).numpy()
        features = frames_TE[:, :-1].copy(), frames_TE[:, -1].copy(), self.of_tokens.weight.detach().T.numpy()
        return state_M.numpy(), features
