"""Trees from the frames of a transducer: each frame emits one token or none, and repeated tokens never merge."""

from __future__ import annotations

from torch import Tensor

from ctcdraft.ctc.topology import TRANSDUCER_TOPOLOGY
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames, UnconditionedFrames
from ctcdraft.drafters.trees.ctc import conditioned_tree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.drafters.trees.sampled_labels import SampledLabels


class TransducerSearch:
    """The most probable prefixes, each summed over all alignments that emit it."""

    interprets_as = "transductions"

    def __call__(
        self, log_probs_TC: Tensor, request: TreeRequest, conditioned: ConditionedFrames | None = None
    ) -> TokenTree:
        request = request.limit_depth(len(log_probs_TC))
        if request.depth < 1:
            return TokenTree.only_root(request.root)
        states = UnconditionedFrames.empty(log_probs_TC) if conditioned is None else conditioned
        return conditioned_tree(log_probs_TC, states, request, TRANSDUCER_TOPOLOGY)


class SampledTransductions(SampledLabels):
    """Chains sampled from the exact next-token distribution of a transducer, summed over all alignments."""

    interprets_as = "transductions"
    topology = TRANSDUCER_TOPOLOGY
