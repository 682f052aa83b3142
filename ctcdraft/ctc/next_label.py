"""What a collapsed text says next, exactly: every alignment summed. It knows frames and class ids, not who draws.

A prefix's mass is split as in `prefix.py`: by how many frames say it, and by whether the last of them is a blank.
Here it is conditional on the prefix, so that a long text underflows no sooner than a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import _run_products, check_blank
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology


@dataclass(frozen=True)
class PrefixBatch:
    """K prefixes in one batch, all equally long, and where the frames stand that say them.

    frames_KTC: probabilities, float64: one row for all prefixes, or one each where frames depend on the last
    label. blanked_KJ, said_KJ (J = T + 1): the share of the prefix's alignments in which the first j frames say
    just it and the last of them is a blank / is its last word. last_K: that word. topology: CTC's or a transducer's.
    """

    frames_KTC: Tensor
    blank: int
    ends_in_blank_KJ: Tensor
    ends_in_label_KJ: Tensor
    last_K: Tensor
    topology: Topology

    @classmethod
    def empty(cls, frames_TC: Tensor, blank: int, prefixes: int, topology: Topology = CTC_TOPOLOGY) -> Self:
        """The empty prefix, `prefixes` times. frames_TC: probabilities, normalised over C."""
        check_blank(frames_TC, blank)
        frames_TC = frames_TC.double()
        blanked_KJ = F.pad(frames_TC[:, blank].cumprod(0), (1, 0), value=1.0).expand(prefixes, -1)
        # Any word may pass for the last one: none has been said, so "again" is as probable as "at all".
        last_K = torch.zeros(prefixes, dtype=torch.int64, device=frames_TC.device)
        return cls(frames_TC[None], blank, blanked_KJ, torch.zeros_like(blanked_KJ), last_K, topology)

    def next_distribution(self) -> tuple[Tensor, Tensor]:
        """The joint law of the next word and of the end: words_KV (the blank's class left out) and stop_K.

        Two frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, after "a" (5/8 in all):

            a   0  (a a needs three frames)      b   1/8 / 5/8 = 1/5      stop   (1/4 + 1/8 + 1/8) / 5/8 = 4/5

        They sum to 1 as float64 goes, even where the frames do only as float32 goes, so that a draw from them is
        a draw from exactly this law. Behind an impossible prefix all are 0.
        """
        either_KJ = self.ends_in_blank_KJ + self.ends_in_label_KJ
        children_KC = (either_KJ[:, None, :-1] @ self.frames_KTC)[:, 0]
        again_1 = self.last_K.new_ones(1, dtype=torch.bool)
        reopens_KJ = self.topology.begin_mass(self.ends_in_blank_KJ, self.ends_in_label_KJ, again_1)
        again_K = (reopens_KJ[:, :-1] * gather_class(self.frames_KTC, self.last_K)).sum(1)
        children_KC = children_KC.scatter(1, self.last_K[:, None], again_K[:, None])
        token_mass_KV = torch.cat([children_KC[:, : self.blank], children_KC[:, self.blank + 1 :]], dim=1)
        scale_K = safe_reciprocal(token_mass_KV.sum(1) + either_KJ[:, -1])
        return token_mass_KV * scale_K[:, None], either_KJ[:, -1] * scale_K

    def extend(self, tokens_K: Tensor, frames_KTC: Tensor | None = None) -> Self:
        """Each prefix with one word (a class id) more. frames_KTC: what the frames say once it is said, if it
        matters to them: the frame that begins the word is still one of the old."""
        repeats_K1 = (tokens_K == self.last_K)[:, None]
        opens_KJ = self.topology.begin_mass(self.ends_in_blank_KJ, self.ends_in_label_KJ, repeats_K1)
        begins_KT = opens_KJ[:, :-1] * gather_class(self.frames_KTC, tokens_K)
        begins_KT = begins_KT * safe_reciprocal(begins_KT.sum(1, keepdim=True))
        frames_KTC = self.frames_KTC if frames_KTC is None else frames_KTC.double()
        # One frame more, which says nothing, so that the last column of a run is what all T frames say.
        repeat_runs_KJJ = _run_products(F.pad(self.topology.repeat_mass(gather_class(frames_KTC, tokens_K)), (0, 1)))
        repeat_runs_KJJ = repeat_runs_KJJ + torch.eye(repeat_runs_KJJ.shape[-1], device=repeat_runs_KJJ.device)
        said_KJ = (begins_KT[:, None] @ repeat_runs_KJJ[:, 1:])[:, 0]
        silence_KJJ = _run_products(F.pad(frames_KTC[:, :, self.blank], (0, 1)))
        blanked_KJ = (said_KJ[:, None] @ silence_KJJ)[:, 0]
        return type(self)(frames_KTC, self.blank, blanked_KJ, said_KJ, tokens_K, self.topology)


def gather_class(frames_KTC: Tensor, classes_K: Tensor) -> Tensor:
    """What each prefix's frames give its class: [K, T]."""
    frames_KTC = frames_KTC.expand(len(classes_K), -1, -1)
    index_KT1 = classes_K[:, None, None].expand(-1, frames_KTC.shape[1], 1)
    return frames_KTC.gather(2, index_KT1)[:, :, 0]


def safe_reciprocal(mass_X: Tensor) -> Tensor:
    """1 / mass; 0 where there is none."""
    return torch.where(mass_X > 0, 1 / mass_X, 0)
