"""Scores of labels and blank without a wall of logits, and their exact gradient. It knows no alignment and no loss.

The words' head is frozen, so only two things are ever asked of it: the scores, and how they move with the states.
For one row, with p = softmax(logits) and weights W (the blank's row among them),

    d score(label) / d state  =  W[label] - sum_v p_v W_v

and the sum, the expected row, does not depend on the loss. It is formed while the logits are there, so they can go
at once: nothing of the size of the vocabulary is kept, and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 16 * 2**20  # of logits alive at once: about what the caches of a processor hold


class Projected(torch.autograd.Function):
    """(label_XTS, blank_XT) of `label_scores`; gradients go to states, the blank's row and the blank's bias."""

    @staticmethod
    def forward(
        ctx: Any,
        states_XTD: Tensor,
        words_VD: Tensor,
        bias_V: Tensor | None,
        blank_D: Tensor,
        blank_bias: Tensor,
        labels_XS: Tensor,
    ) -> tuple[Tensor, Tensor]:
        windows, frames = states_XTD.shape[:2]
        kept = torch.promote_types(states_XTD.dtype, torch.float32)
        blank_XT = (states_XTD.to(kept) * blank_D).sum(dim=-1) + blank_bias
        label_XTS = blank_XT.new_empty(windows, frames, labels_XS.shape[1])
        expected_XTD = torch.empty_like(states_XTD, dtype=kept)
        size = max(1, CHUNK_BYTES // (kept.itemsize * frames * len(words_VD)))
        for start in range(0, windows, size):
            part = slice(start, start + size)
            logits_XTV = F.linear(states_XTD[part].to(words_VD.dtype), words_VD, bias_V).to(kept)
            at_XTS = labels_XS[part, None].expand(-1, frames, -1)
            normaliser_XT1 = torch.logaddexp(logits_XTV.logsumexp(dim=-1), blank_XT[part])[..., None]
            label_XTS[part] = logits_XTV.gather(-1, at_XTS) - normaliser_XT1
            blank_XT[part] -= normaliser_XT1[..., 0]
            p_XTV = logits_XTV.sub_(normaliser_XT1).exp_()
            expected_XTD[part] = p_XTV.to(words_VD.dtype) @ words_VD
        expected_XTD += blank_XT.exp()[..., None] * blank_D
        ctx.save_for_backward(states_XTD, words_VD, blank_D, labels_XS, blank_XT, expected_XTD)
        return label_XTS, blank_XT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, label_XTS: Tensor, blank_XT: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Of the incoming gradients, named after what they belong to."""
        states_XTD, words_VD, blank_D, labels_XS, log_blank_XT, expected_XTD = ctx.saved_tensors
        all_XT = label_XTS.sum(dim=-1) + blank_XT
        rows_XSD = words_VD[labels_XS].to(label_XTS.dtype)
        moved_XTD = label_XTS @ rows_XSD + blank_XT[..., None] * blank_D - all_XT[..., None] * expected_XTD
        on_blank_XT = blank_XT - all_XT * log_blank_XT.exp()
        blank_row_D = (on_blank_XT[..., None] * states_XTD).flatten(0, 1).sum(dim=0)
        return moved_XTD.to(states_XTD.dtype), None, None, blank_row_D.to(blank_D.dtype), on_blank_XT.sum(), None


def label_scores(
    states_XTD: Tensor,
    words_VD: Tensor,
    bias_V: Tensor | None,
    blank_D: Tensor,
    blank_bias: Tensor,
    labels_XS: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, over all words and the blank, of the labels [X, T, S] and of the blank [X, T] at every frame.

    Logits are computed in the dtype of words_VD, which is frozen; scores are float32 (float64 for float64 states).
    """
    if words_VD.requires_grad:
        raise ValueError("the words' head is to be learned, but these scores give it no gradient; freeze it")
    return Projected.apply(states_XTD, words_VD, bias_V, blank_D, blank_bias, labels_XS)
