"""The search over label-conditioned frames in steps of fixed shapes, which a CUDA graph can hold.

    expand   the masses of a level's prefixes before every frame, with frames normalised after each prefix
    select   the level's most probable children

On CUDA these are few kernels each (`triton_conditioned.py`, `triton_selection.py`). Of every prefix and every block of
tokens they compute the largest mass of a child. The n best children of a level are in the n pairs of a prefix and a
block with the largest of these, so that only in these pairs all masses are computed, in float64. No matrix of prefixes
and tokens is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.conditioned_search import PrefixStates, continue_prefixes, select_candidates
from ctcdraft.ctc.prefix_search import RankedNodes, select_nodes, top_masses
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology
from ctcdraft.fused import fused

SELECTION = "ctcdraft.ctc.triton_selection"
# exp of a correction outside this range overflows or vanishes in float32; such a token is certain or impossible anyway.
LOGIT_RANGE = (-80, 80)


def fused_conditioned_search(
    log_probs_TC: Tensor, states: PrefixStates, nodes: int, stops_S: Tensor, depth: int,
    topology: Topology = CTC_TOPOLOGY,
) -> RankedNodes:  # fmt: skip
    """Return the result of `conditioned_prefix_search` with exactly `nodes` nodes, those missing with mass 0 and last.

    Of prefixes that tie for the last ranks others may be selected.
    """
    depth, merges = min(depth, len(log_probs_TC)), topology.merges_repeats
    if nodes < 1 or depth < 1:
        none_N = stops_S.new_zeros(nodes)
        return none_N, none_N - 1, none_N.double()
    out_VR = states.correction_weight()
    tokens_LN, parents_LN = (stops_S.new_empty(depth, nodes) for _ in range(2))
    masses_LN = log_probs_TC.new_empty(depth, nodes, dtype=torch.float64)
    above: tuple[Tensor, ...] = tokens_LN[0], tokens_LN[0], masses_LN[0]  # of the empty prefix none are read
    masses_3KT, above_KR = masses_LN, states.memory_KR
    last_K = tokens_LN[0]
    for level, found in enumerate(zip(tokens_LN, parents_LN, masses_LN, strict=True)):
        memory_KR = states.memory_KR.contiguous()
        shared = log_probs_TC, memory_KR, out_VR
        masses_3KT = expand_level(*shared, *above, last_K, above_KR, masses_3KT, stops_S, level, merges)
        select_children(*shared, above[0], above[2], masses_3KT, level == 0, merges, *found)
        if level + 1 < depth:
            states = states.extend(found[0], found[1])
        last_K, above_KR, above = above[0], memory_KR, found
    return select_levels(tokens_LN, parents_LN, masses_LN)


@fused("ctcdraft.ctc.triton_conditioned", launches=2)
def expand_level(
    log_probs_TC: Tensor, memory_KR: Tensor, out_VR: Tensor, tokens_K: Tensor, parents_K: Tensor, mass_K: Tensor,
    above_tokens_X: Tensor, above_memory_XR: Tensor, above_masses_3XT: Tensor, stops_S: Tensor, level: int,
    merges: bool,
) -> Tensor:  # fmt: skip
    """Return masses_3KT before every frame, ending in a blank and either, and the scale of the frames.

    level: length of the prefixes. At 0, the empty prefix, neither tokens nor what is above are read.
    """
    blank_T, scale_KT = log_probs_TC[:, -1].double().exp(), frame_scale(log_probs_TC, memory_KR, out_VR)
    if level == 0:
        in_blank_KT = F.pad((blank_T * scale_KT)[:, :-1], (1, 0), value=1.0).cumprod(1)
        return torch.stack([in_blank_KT, in_blank_KT, scale_KT])
    prob_KT = log_probs_TC[:, tokens_K].T.double().exp()
    in_blank_KT, either_KT, above_scale_KT = above_masses_3XT[:, parents_K]
    if merges and level > 1:
        either_KT = torch.where((above_tokens_X[parents_K] == tokens_K)[:, None], in_blank_KT, either_KT)
    out_KR = out_VR[tokens_K].float()
    after_2K = torch.stack([above_memory_XR[parents_K], memory_KR]).float().mul(out_KR).sum(-1)
    above_factor_K1, factor_K1 = after_2K.clamp(*LOGIT_RANGE).exp().double()[..., None]
    ends_K = torch.isin(tokens_K, stops_S) | (mass_K <= 0)  # nothing follows a stop token
    begins_KT = (either_KT * prob_KT * (above_factor_K1 * above_scale_KT)).masked_fill(ends_K[:, None], 0)
    repeats_KT = prob_KT * factor_K1 * scale_KT if merges else torch.zeros_like(prob_KT)
    in_blank_KT, in_label_KT = continue_prefixes(begins_KT, repeats_KT, blank_T * scale_KT)
    return torch.stack([in_blank_KT, in_blank_KT + in_label_KT, scale_KT])


def frame_scale(log_probs_TC: Tensor, memory_KR: Tensor, out_VR: Tensor) -> Tensor:
    sums_KT = token_factors(memory_KR, out_VR) @ log_probs_TC[:, :-1].float().exp().T
    return (sums_KT.double() + log_probs_TC[:, -1].double().exp()).reciprocal()


def token_factors(memory_KR: Tensor, out_VR: Tensor) -> Tensor:
    """Return what the correction multiplies every token with, factor_KV."""
    return (memory_KR.float() @ out_VR.float().T).clamp(*LOGIT_RANGE).exp()


@fused(SELECTION, launches=4, writes=("tokens_N", "parents_N", "masses_N"))  # three kernels and a topk
def select_children(
    log_probs_TC: Tensor, memory_KR: Tensor, out_VR: Tensor, tokens_K: Tensor, mass_K: Tensor, masses_3KT: Tensor,
    is_empty: bool, merges: bool, tokens_N: Tensor, parents_N: Tensor, masses_N: Tensor,
) -> None:  # fmt: skip
    """Write the best children of a level, with mass 0 where there are none; parents_N: rows of the level."""
    (in_blank_KT, either_KT, scale_KT), nodes = masses_3KT, len(tokens_N)
    factor_KV, probs_TV = token_factors(memory_KR, out_VR), log_probs_TC[:, :-1].float().exp()
    bound_KV = ((either_KT * scale_KT).float() @ probs_TV) * factor_KV
    parent_R, token_R = select_candidates(bound_KV, nodes, None)
    before_RT = either_KT[parent_R]
    if merges and not is_empty:
        repeats_R1 = (token_R == tokens_K[parent_R])[:, None]
        before_RT = torch.where(repeats_R1, in_blank_KT[parent_R], before_RT)
    prob_RT = log_probs_TC[:, token_R].T.double().exp()
    mass_R = (before_RT * prob_RT * (factor_KV[parent_R, token_R, None] * scale_KT[parent_R])).sum(1)
    # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
    mass_R = mass_R.clamp(max=1.0) if is_empty else torch.minimum(mass_R, mass_K[parent_R])
    best_K = top_masses(mass_R, nodes)
    found, missing = len(best_K), nodes - len(best_K)
    for column_N, column_R in ((tokens_N, token_R), (parents_N, parent_R), (masses_N, mass_R)):
        column_N[:found].copy_(column_R[best_K])
        if missing:
            column_N[found:].zero_()


@fused(SELECTION, launches=1)
def select_levels(tokens_LN: Tensor, parents_LN: Tensor, masses_LN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best nodes of all levels, best first; parents_N are nodes, -1 the empty prefix."""
    depth, nodes = tokens_LN.shape
    # Row 0 is the empty prefix; the prefixes of each level follow those of the level above.
    first_L = torch.arange(1 - nodes, nodes * (depth - 1) + 1, nodes, device=tokens_LN.device).clamp(min=0)
    rows_LN = parents_LN + first_L[:, None]
    return select_nodes(tokens_LN.flatten(), rows_LN.flatten(), masses_LN.flatten(), nodes)
