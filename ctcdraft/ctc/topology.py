"""The alignment topology: how a frame continues a text, in CTC and in a transducer.

Once frames are summed over, the two differ in nothing else; searches and next-label distributions take the topology
as an argument.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Topology(Protocol):
    """merges_repeats: whether a frame that repeats the one before it belongs to the same token."""

    merges_repeats: bool

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        """Return the mass_X from which a frame may begin a token.

        Args:
            ends_in_blank_X, ends_in_label_X: masses of texts whose last frame was a blank / their last token.
            repeats_X: true where the new token equals the text's last one.
        """

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        """Return the probability that a frame right after a token's frame repeats it without a new token.

        token_prob_X: probability of this token in the frame.
        """


class CTCTopology:
    """CTC (Graves et al. 2006): a repeated frame extends its token; only a blank separates equal tokens.

    5 5 0 5  ->  5 5
    """

    merges_repeats = True

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        return torch.where(repeats_X, ends_in_blank_X, ends_in_blank_X + ends_in_label_X)

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        return token_prob_X


class TransducerTopology:
    """A transducer: every frame that is not blank emits a new token.   5 5 0 5  ->  5 5 5"""

    merges_repeats = False

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        return ends_in_blank_X + ends_in_label_X

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        return torch.zeros_like(token_prob_X)


CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY = CTCTopology(), TransducerTopology()
