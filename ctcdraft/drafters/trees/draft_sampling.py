"""What a drafter draws with: a random stream, and how decoding bends a law before a word is drawn. It draws nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.sampling import unwarped_log_probs
from ctcdraft.decoding.settings import LogitsProcessor


@dataclass(frozen=True)
class DraftSampling:
    """rng: the draft's own. law: of decoding (temperature, top-k, top-p). A draft is drawn as the base's words are
    (Leviathan et al. 2023; Chen et al. 2023): else even the base itself would be refused as its own draft."""

    rng: torch.Generator
    logits_processor: LogitsProcessor = unwarped_log_probs

    @classmethod
    def of(cls, context: Context, rng: torch.Generator) -> DraftSampling:
        return cls(rng, context.logits_processor)

    def warp_probs(self, probs_KV: Tensor) -> Tensor:
        """Laws_KV as they are drawn from, float64. What a row lacks to 1, the chance of saying nothing, stays: the
        words are bent among themselves.

        T = 1/2:   .4 .2, stop .4   ->   .48 .12, stop .4
        """
        token_mass_K1 = probs_KV.sum(dim=1, keepdim=True)
        warped_KV = self.logits_processor(probs_KV.double().log()).exp()
        return torch.where(token_mass_K1 > 0, warped_KV * token_mass_K1, 0.0)
