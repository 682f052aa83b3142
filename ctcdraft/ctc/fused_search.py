"""The prefix search of fixed shapes, which a CUDA graph can hold: `drop_improbable` then counts the nodes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import RankedNodes, static_prefix_search
from ctcdraft.fused import fused


@fused("ctcdraft.ctc.triton_prefix", launches=2)
def fused_prefix_search(
    log_probs_TC: Tensor, blank: int, nodes: int, tokens_per_frame: int, stops_S: Tensor, depth: int, min_mass: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `prefix_search` with exactly `nodes` nodes, those that are missing with mass 0 and last.

    stops_S: int64, on the device of the frames.
    """
    return pad_nodes(
        static_prefix_search(log_probs_TC, blank, nodes, tokens_per_frame, stops_S, depth), nodes, min_mass
    )


def pad_nodes(ranked: RankedNodes, nodes: int, min_mass: float) -> RankedNodes:
    """Return exactly `nodes` nodes, those below min_mass with mass 0."""
    tokens_N, parents_N, masses_N = ranked
    if (missing := nodes - len(tokens_N)) > 0:
        tokens_N, parents_N = F.pad(tokens_N, (0, missing)), F.pad(parents_N, (0, missing), value=-1)
        masses_N = F.pad(masses_N, (0, missing))
    return tokens_N, parents_N, masses_N if min_mass == 0 else masses_N.masked_fill(masses_N < min_mass, 0)
