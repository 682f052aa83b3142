"""From a transducer's frames to trees: every text summed over the frames that may say it, and none of them merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ctcdraft.ctc.topology import TRANSDUCER_TOPOLOGY
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames, UnconditionedFrames
from ctcdraft.drafters.trees.ctc import conditioned_tree
from ctcdraft.drafters.trees.sampled_labels import SampledLabels


class TransducerSearch:
    """The n most probable beginnings of the text."""

    interprets_as = "transductions"

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        depth = min(depth, len(log_probs_TC))
        if depth < 1:
            return TokenTree.only_root(root)
        states = UnconditionedFrames.empty(log_probs_TC) if listening is None else listening
        return conditioned_tree(log_probs_TC, states, root, depth, nodes, stops, TRANSDUCER_TOPOLOGY)


class SampledTransductions(SampledLabels):
    """Chains drawn from the exact law of the next word, and of the end, behind every text."""

    interprets_as = "transductions"
    topology = TRANSDUCER_TOPOLOGY
