"""The exact next-label distribution and stop probability of a collapsed text, summed over all alignments.

A prefix's mass is split as in `prefix_search.py`: by the number of frames used, and by whether the last of them is a
blank. Here it is conditional on the prefix, so that a long text underflows no sooner than a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import check_blank, run_products
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology


@dataclass(frozen=True)
class PrefixBatch:
    """K prefixes of equal length and their forward variables."""

    frames_KTC: Tensor  # probabilities, float64: one row for all prefixes, or one per prefix (label-conditioned)
    blank: int
    # Share of the prefix's alignments in which the first j frames collapse to exactly the prefix and the last of them
    # is a blank / is its last token; J = T + 1.
    ends_in_blank_KJ: Tensor
    ends_in_label_KJ: Tensor
    last_K: Tensor  # the last token
    topology: Topology

    @classmethod
    def empty(cls, frames_TC: Tensor, blank: int, prefixes: int, topology: Topology = CTC_TOPOLOGY) -> Self:
        """Return the empty prefix, `prefixes` times. frames_TC: probabilities, normalised over C."""
        check_blank(frames_TC, blank)
        frames_TC = frames_TC.double()
        blanks_KJ = F.pad(frames_TC[:, blank].cumprod(0), (1, 0), value=1.0).expand(prefixes, -1)
        # Any class serves as the last token: no mass ends in a token yet, so a repeat is like any other token.
        last_K = torch.zeros(prefixes, dtype=torch.int64, device=frames_TC.device)
        return cls(frames_TC[None], blank, blanks_KJ, torch.zeros_like(blanks_KJ), last_K, topology)

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        """Return the joint distribution of the next token, probs_KV (without the blank), and of stopping, stop_K.

        Two frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, after "a" (5/8 in all):

            a   0  (a a needs three frames)      b   1/8 / 5/8 = 1/5      stop   (1/4 + 1/8 + 1/8) / 5/8 = 4/5

        After an impossible prefix all are 0.
        """
        either_KJ = self.ends_in_blank_KJ + self.ends_in_label_KJ
        children_KC = (either_KJ[:, None, :-1] @ self.frames_KTC)[:, 0]
        is_repeat_1 = self.last_K.new_ones(1, dtype=torch.bool)
        begin_KJ = self.topology.begin_mass(self.ends_in_blank_KJ, self.ends_in_label_KJ, is_repeat_1)
        repeat_K = (begin_KJ[:, :-1] * gather_class(self.frames_KTC, self.last_K)).sum(1)
        # The one child that repeats the last token begins from other masses than all others.
        children_KC = children_KC.scatter(1, self.last_K[:, None], repeat_K[:, None])
        token_mass_KV = torch.cat([children_KC[:, : self.blank], children_KC[:, self.blank + 1 :]], dim=1)
        # Scaled to sum to 1 in float64 even if the frames do so only in float32: a sample then follows exactly the
        # returned distribution.
        scale_K = safe_reciprocal(token_mass_KV.sum(1) + either_KJ[:, -1])
        return token_mass_KV * scale_K[:, None], either_KJ[:, -1] * scale_K

    def extend(self, tokens_K: Tensor, frames_KTC: Tensor | None = None) -> Self:
        """Return each prefix with one more token (a class id).

        frames_KTC: label-conditioned frames after this token; the frame that begins the token is still an old one.
        """
        repeats_K1 = (tokens_K == self.last_K)[:, None]
        begin_KJ = self.topology.begin_mass(self.ends_in_blank_KJ, self.ends_in_label_KJ, repeats_K1)
        begins_KT = begin_KJ[:, :-1] * gather_class(self.frames_KTC, tokens_K)
        begins_KT = begins_KT * safe_reciprocal(begins_KT.sum(1, keepdim=True))  # conditional on the longer prefix
        frames_KTC = self.frames_KTC if frames_KTC is None else frames_KTC.double()
        # One extra frame with probability 0, so that the last column of a run covers all T frames.
        repeat_runs_KJJ = run_products(F.pad(self.topology.repeat_mass(gather_class(frames_KTC, tokens_K)), (0, 1)))
        repeat_runs_KJJ = repeat_runs_KJJ + torch.eye(repeat_runs_KJJ.shape[-1], device=repeat_runs_KJJ.device)
        label_KJ = (begins_KT[:, None] @ repeat_runs_KJJ[:, 1:])[:, 0]
        blank_runs_KJJ = run_products(F.pad(frames_KTC[:, :, self.blank], (0, 1)))
        blank_KJ = (label_KJ[:, None] @ blank_runs_KJJ)[:, 0]
        return type(self)(frames_KTC, self.blank, blank_KJ, label_KJ, tokens_K, self.topology)


def gather_class(frames_KTC: Tensor, classes_K: Tensor) -> Tensor:
    """Return probability_KT of each prefix's class in its frames."""
    frames_KTC = frames_KTC.expand(len(classes_K), -1, -1)
    index_KT1 = classes_K[:, None, None].expand(-1, frames_KTC.shape[1], 1)
    return frames_KTC.gather(2, index_KT1)[:, :, 0]


def safe_reciprocal(mass_X: Tensor) -> Tensor:
    """Return 1 / mass, and 0 where the mass is 0."""
    return torch.where(mass_X > 0, 1 / mass_X, 0)
