"""From a transducer's frames to trees: every text summed over the frames that may say it, and none of them merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ctcdraft.ctc.transitions import ANEW
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.drawn_paths import DrawnLabels
from ctcdraft.drafters.listening import Deaf, Listening
from ctcdraft.drafters.paths import tree_of_listening


class TransducerSearch:
    """The n most probable beginnings of the text."""

    reads = "transductions"

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: Listening | None = None,
    ) -> TokenTree:
        depth = min(depth, len(log_probs_TC))
        if depth < 1:
            return TokenTree.only_root(root)
        states = Deaf.empty(log_probs_TC) if listening is None else listening
        return tree_of_listening(log_probs_TC, states, root, depth, nodes, stops, ANEW)


class DrawnTransductions(DrawnLabels):
    """Chains drawn from the exact law of the next word, and of the end, behind every text."""

    reads = "transductions"
    topology = ANEW
