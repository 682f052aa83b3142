"""What a trainable drafter owes: emissions for a batch of windows, a tree for a context. It computes no loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of text with the base's states, and the windows a drafter is asked about.

    tokens_BL, states_BLD: the text, right-padded. anchors_BA: positions with a known state to draft from.
    roots_BA: the certain word after each. labels_BAS: what the draft must say after the root, -1 in free
    slots; lengths_BA: how many labels there are, 0 where a row has fewer anchors than A.
    places_BL: a row may be a pack of several texts; the place of every position in its own one, which is all that
    a drafter may look at from there (nn/packs.py).
    """

    tokens_BL: Tensor
    states_BLD: Tensor
    anchors_BA: Tensor
    roots_BA: Tensor
    labels_BAS: Tensor
    lengths_BA: Tensor
    position_ids_BL: Tensor
