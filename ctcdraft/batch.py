"""A training batch: sequences with the base's hidden states, and the windows that a drafter is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences with hidden states, and A windows per sequence.

    Args:
        tokens_BL, states_BLD: the texts and their hidden states, right-padded.
        anchors_BA: positions with a known hidden state to draft from.
        roots_BA: the token after each anchor, which the base has computed already.
        labels_BAS: the tokens to draft after the root, -1 in free slots.
        lengths_BA: number of labels; 0 where a sequence has fewer anchors than A.
        position_ids_BL: position of every token in its own text. Packed sequences hold several texts, and a drafter
            may read the anchor's own text only (nn/masks.py).
    """

    tokens_BL: Tensor
    states_BLD: Tensor
    anchors_BA: Tensor
    roots_BA: Tensor
    labels_BAS: Tensor
    lengths_BA: Tensor
    position_ids_BL: Tensor

    def next_tokens(self) -> Tensor:
        """Return the token after every position, [B, L]; 0 after the last one of a text."""
        # The last token of a text has no successor; the next position may be the first of another packed text.
        next_BL = self.tokens_BL.roll(-1, dims=1).masked_fill(self.position_ids_BL.roll(-1, dims=1) == 0, 0)
        # roots_BA equal the text in a real batch; they are written over it so that a shifted root changes the output.
        return next_BL.scatter(1, self.anchors_BA, self.roots_BA)
