"""EAGLE's objective: guess the base's next state, and say what the base says from it. It knows no alignment.

`EagleCTC` adds the CTC term of the CTC paper's released code, to learn what that term is worth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.ctc.forward import log_likelihood
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.base import Loss, check_frames, check_labels, masked_mean
from ctcdraft.objectives.distillation import base_states_at_labels


class Eagle:
    """states * smooth L1 to the base's state at the root + words * cross-entropy to the base's law there (Li et al.
    2024, section 4.2). Only the first frame of an anchor is asked: the deeper ones are those of later anchors."""

    supervises = "states"

    def __init__(self, labels: int, states: float, words: float) -> None:
        self.labels = check_labels(labels)
        self.states = check_float(states, "objective.states")
        self.words = check_float(words, "objective.words")

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, 1)
        width = emissions.head.words.weight.shape[1]  # the last tap comes first
        true_BA1D = base_states_at_labels(batch)[:, :, :1, :width]
        if emissions.states_BATD.shape[-1] != true_BA1D.shape[-1]:
            raise InputError(
                f"the drafter's states are {emissions.states_BATD.shape[-1]} wide and the base's "
                f"{true_BA1D.shape[-1]}, so they cannot be compared; objective=eagle is for drafter=eagle"
            )

        def said(log_probs_X1V: Tensor, labels_X1: Tensor, true_X1D: Tensor) -> Tensor:
            base_X1V = emissions.head.token_logits(true_X1D).float().softmax(dim=-1)
            return -(base_X1V * log_probs_X1V).sum(dim=-1)

        real_BA = batch.lengths_BA > 0
        predicted_BAD, true_BAD = emissions.states_BATD[:, :, 0].float(), true_BA1D[:, :, 0].float()
        regression_BA = F.smooth_l1_loss(predicted_BAD, true_BAD, reduction="none").mean(dim=-1)
        cross_entropy_BA1 = emissions.map_label_frames(said, batch.labels_BAS[..., :1], true_BA1D)
        states, words = masked_mean(regression_BA, real_BA), masked_mean(cross_entropy_BA1[..., 0], real_BA)
        value = self.states * states + self.words * words
        return Loss(value, {"loss": value.detach(), "states": states.detach(), "words": words.detach()})


class EagleCTC:
    """Eagle's two terms + ctc * -log P(the frames collapse to the labels) / labels, as the released code of
    CTC-drafter has it. frames: of an anchor, each teacher-forced, so that they have seen the labels they are to
    align with; the blank is word id 0. Only windows whose frames all lie within the answer count.

    The labels are the answer's own words; at temperature 0 these are the base's best words, which that code takes.
    """

    supervises = "states"
    BLANK = 0

    def __init__(self, labels: int, frames: int, states: float, words: float, ctc: float) -> None:
        if check_labels(labels) > check_int(frames, "objective.frames"):
            raise InputError(f"objective.frames={frames} cannot say objective.labels={labels} labels")
        self.eagle = Eagle(1, states, words)
        self.labels = max(labels, frames - 1)  # frame t of an anchor has been told t labels
        self.label_count = labels
        self.frames = frames
        self.ctc = check_float(ctc, "objective.ctc")

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.frames)
        loss = self.eagle(emissions, batch)

        def unlikely(log_probs_XTV: Tensor, labels_XT: Tensor) -> Tensor:
            labels_XS = labels_XT[:, : self.label_count].clamp(min=0)
            label_XTS = log_probs_XTV.gather(-1, labels_XS[:, None].expand(-1, self.frames, -1))
            lengths_X = torch.full_like(labels_XS[:, 0], self.label_count)
            return -log_likelihood(label_XTS, log_probs_XTV[..., self.BLANK], labels_XS, lengths_X) / self.label_count

        whole_BA = batch.lengths_BA >= self.labels
        speakable_BA = whole_BA & (batch.labels_BAS[..., : self.label_count] != self.BLANK).all(dim=-1)
        labels_BAT = F.pad(batch.labels_BAS, (0, max(self.frames - self.labels, 0)), value=-1)[..., : self.frames]
        aligned_BA = emissions.map_label_frames(unlikely, labels_BAT)
        feasible_BA = speakable_BA & ~aligned_BA.isposinf()  # what is not a number must show
        ctc = masked_mean(aligned_BA, feasible_BA)
        infeasible = 1 - feasible_BA.sum() / whole_BA.sum().clamp(min=1)
        value = loss.value + self.ctc * ctc
        metrics = loss.metrics | {"loss": value.detach(), "ctc": ctc.detach(), "infeasible_share": infeasible}
        return Loss(value, metrics)
