"""The alignment topology: how a frame continues a text, in CTC and in a transducer.

Once frames are summed over, the two differ in nothing else; searches and next-label distributions take the topology
as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """Whether a frame that repeats the one before it belongs to the same token, or begins the next."""

    merges_repeats: bool

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        """Return the mass_X from which a frame may begin a token.

        Args:
            ends_in_blank_X, ends_in_label_X: masses of texts whose last frame was a blank / their last token.
            repeats_X: true where the new token equals the text's last one.
        """
        either_X = ends_in_blank_X + ends_in_label_X
        # Only a blank separates equal tokens in CTC.
        return torch.where(repeats_X, ends_in_blank_X, either_X) if self.merges_repeats else either_X

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        """Return the probability that a frame right after a token's frame repeats it without a new token."""
        return token_prob_X if self.merges_repeats else torch.zeros_like(token_prob_X)


CTC_TOPOLOGY = Topology(merges_repeats=True)  # Graves et al. 2006:   5 5 0 5  ->  5 5
TRANSDUCER_TOPOLOGY = Topology(merges_repeats=False)  # every frame that is no blank emits:   5 5 0 5  ->  5 5 5
