"""EAGLE's objective: predict the base's next hidden state, and the base's distribution from it.

`EagleCTC` adds the CTC term of the CTC paper's released code, so that the effect of that term can be measured.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.ctc.forward import log_likelihood
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.nn.frame_values import frame_values
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Loss, check_frames, counted_mean, masked_mean, share_left_out
from ctcdraft.objectives.teacher import before_labels


class Eagle:
    """Regression of hidden states and cross-entropy of tokens (Li et al. 2024, section 4.2).

    Args:
        hidden_states: weight of the smooth L1 distance from the base's hidden state at the root.
        tokens: weight of the cross-entropy with the base's distribution there.
    """

    supervises = "states"

    def __init__(self, labels: int, hidden_states: float, tokens: float) -> None:
        self.labels = check_int(labels, "objective.labels")
        self.hidden_states = check_float(hidden_states, "objective.hidden_states")
        self.tokens = check_float(tokens, "objective.tokens")

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, 1)
        width = emissions.head.words.weight.shape[1]  # of several layers the last one comes first
        base_BA1D = before_labels(batch.states_BLD.detach()[..., :width], batch)[:, :, :1]
        if emissions.states_BATD.shape[-1] != base_BA1D.shape[-1]:
            raise InputError(
                f"the drafter's hidden states have width {emissions.states_BATD.shape[-1]} and the base's "
                f"{base_BA1D.shape[-1]}, so they cannot be compared; objective=eagle is for drafter=eagle"
            )

        def token_cross_entropy(log_probs_X1V: Tensor, labels_X1: Tensor, states_X1D: Tensor) -> Tensor:
            base_X1V = emissions.head.token_logits(states_X1D).float().softmax(dim=-1)
            return -(base_X1V * log_probs_X1V).sum(dim=-1)

        # Only the first frame of an anchor is trained: deeper frames are first frames of later anchors.
        real_BA = batch.lengths_BA > 0
        predicted_BAD, base_BAD = emissions.states_BATD[:, :, 0].float(), base_BA1D[:, :, 0].float()
        regression_BA = F.smooth_l1_loss(predicted_BAD, base_BAD, reduction="none").mean(dim=-1)
        cross_entropy_BA1 = emissions.map_label_frames(
            partial(frame_values, token_cross_entropy), batch.labels_BAS[..., :1], base_BA1D
        )
        states, count = counted_mean(regression_BA, real_BA, real_BA)
        tokens = masked_mean(cross_entropy_BA1[..., 0], real_BA)
        value = self.hidden_states * states + self.tokens * tokens
        return Loss(value, {"loss": value.detach(), "states": states.detach(), "words": tokens.detach()}, count)


class EagleCTC:
    """Eagle's two terms + ctc * -log P(the frames collapse to the labels) / labels, as in CTC-drafter's released code.

    As there, the blank is token id 0, and only windows whose frames all lie within the response count. The labels are
    the tokens of the response; that code takes the base's most probable tokens, the same at temperature 0.

    Args:
        frames: frames per anchor in the CTC term, teacher-forced: frame t has read t labels.
    """

    supervises = "states"
    several_counts = True  # the CTC term leaves windows out
    BLANK = 0  # a token like any other in that code, so windows with it as a label are left out

    def __init__(self, labels: int, frames: int, hidden_states: float, tokens: float, ctc: float) -> None:
        if check_int(labels, "objective.labels") > check_int(frames, "objective.frames"):
            raise InputError(f"objective.frames must be >= objective.labels={labels}, got {frames}")
        self.eagle = Eagle(1, hidden_states, tokens)
        self.labels = max(labels, frames - 1)  # the last frame has read frames - 1 labels
        self.label_count = labels
        self.frames = frames
        self.ctc = check_float(ctc, "objective.ctc")

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.frames)
        loss = self.eagle(emissions, batch)

        def negative_log_likelihood(log_probs_XTV: Tensor, labels_XT: Tensor) -> Tensor:
            labels_XS = labels_XT[:, : self.label_count].clamp(min=0)
            label_XTS = log_probs_XTV.gather(-1, labels_XS[:, None].expand(-1, self.frames, -1))
            lengths_X = torch.full_like(labels_XS[:, 0], self.label_count)
            return -log_likelihood(label_XTS, log_probs_XTV[..., self.BLANK], labels_XS, lengths_X) / self.label_count

        whole_BA = batch.lengths_BA >= self.labels  # the last frame reads so many labels
        without_blank_BA = whole_BA & (batch.labels_BAS[..., : self.label_count] != self.BLANK).all(dim=-1)
        # As many label slots as frames, because map_label_frames pairs them.
        labels_BAT = F.pad(batch.labels_BAS, (0, max(self.frames - self.labels, 0)), value=-1)[..., : self.frames]
        loss_BA = emissions.map_label_frames(partial(frame_values, negative_log_likelihood), labels_BAT)
        feasible_BA = without_blank_BA & ~loss_BA.isposinf()  # nan is kept and shows in the loss
        ctc = masked_mean(loss_BA, feasible_BA)
        value = loss.value + self.ctc * ctc
        infeasible = share_left_out(feasible_BA, whole_BA)
        metrics = loss.metrics | {"loss": value.detach(), "ctc": ctc.detach(), "infeasible_share": infeasible}
        return Loss(value, metrics, loss.count)
