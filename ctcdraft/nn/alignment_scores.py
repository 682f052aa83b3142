"""Scores of labels and of the blank in every frame, of which likelihoods are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ctcdraft.nn.chunks import RealWindows


@dataclass(frozen=True)
class AlignmentScores:
    """Log-probabilities over all C classes, float32: what objectives that sum over alignments need.

    P = S + 1; or P = 1 for frames that are not label-conditioned, and then hold_BATS is label_BATS.
    """

    label_BATS: Tensor  # of label s in frame t, after the s labels before it
    hold_BATS: Tensor  # of label s again, right after it
    blank_BATP: Tensor  # of the blank after p labels
    memories_BAPR: Tensor | None = None  # of the logit correction after p labels

    def restore(self, real: RealWindows) -> Self:
        """Return the scores of all windows, given those of the real ones."""
        label_BATS, blank_BATP = real.restore(self.label_BATS), real.restore(self.blank_BATP)
        # The forward recursion recognises the same tensor and transposes it once.
        hold_BATS = label_BATS if self.hold_BATS is self.label_BATS else real.restore(self.hold_BATS)
        memories_BAPR = None if self.memories_BAPR is None else real.restore(self.memories_BAPR)
        return type(self)(label_BATS, hold_BATS, blank_BATP, memories_BAPR)
