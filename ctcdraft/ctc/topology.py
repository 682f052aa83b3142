"""How a frame goes on from a text: what it may begin a word from, and whether it may hold one. It knows masses alone.

This is all in which CTC and a transducer differ once frames are summed over; the searches and laws take it as a value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Topology(Protocol):
    """merges: whether frames hold a word; the same in one word, for who counts text by text."""

    merges_repeats: bool

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        """Mass_X from which a frame may begin a word, of texts whose last frame was a blank / their last word.

        repeats_X: true where the word to begin is the text's last one.
        """

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        """What a frame that says the text's last word right behind it leaves the text as it is with, given what
        the frame gives to that word."""


class CTCTopology:
    """CTC (Graves et al. 2006): a frame that repeats the one before it holds its word, so that only a blank between
    two equal words keeps both.   5 5 0 5  ->  5 5"""

    merges_repeats = True

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        return torch.where(repeats_X, ends_in_blank_X, ends_in_blank_X + ends_in_label_X)

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        return token_prob_X


class TransducerTopology:
    """A transducer: whatever a frame says is said anew, so that nothing is ever held.   5 5 0 5  ->  5 5 5"""

    merges_repeats = False

    def begin_mass(self, ends_in_blank_X: Tensor, ends_in_label_X: Tensor, repeats_X: Tensor) -> Tensor:
        return ends_in_blank_X + ends_in_label_X

    def repeat_mass(self, token_prob_X: Tensor) -> Tensor:
        return torch.zeros_like(token_prob_X)


CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY = CTCTopology(), TransducerTopology()
