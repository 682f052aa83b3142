"""Prefix search over label-conditioned frames a few prefixes at a time, most probable first: for few nodes on a CPU.

It gives what `conditioned_prefix_search` gives.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.ctc.best_first import TIE_TOLERANCE, FrameMasses, PrefixLists, round_mantissa
from ctcdraft.ctc.conditioned_search import PrefixStates, select_candidates
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology
from ctcdraft.machine_code import load_kernels

# Prefixes expanded together: with fewer, the fixed cost of an expansion is paid more often. Time relative to a search
# by levels (150 drafts of a head on the embedded base, 16 nodes, one thread of an AMD EPYC with other work): 2 take
# 1.14, 3 0.88, 4 0.82, 6 0.74, 8 0.70 to 0.74, 10 and 14 0.78.
EXPANSION_BATCH = 8


@dataclass(frozen=True, slots=True)
class ExpandedPrefix:
    """A prefix whose frames were computed, and its forward masses before each frame t."""

    rank_key: tuple  # compares as its rank among prefixes of equal length
    number: int  # in the order of expansion: its row in the states
    candidate: PrefixCandidate | None  # what it was before; None for the empty prefix
    token: int | None  # the last token
    max_mass: float  # probability as a prefix
    ends_in_blank_T: FrameMasses
    ends_in_label_T: FrameMasses
    scale_T: FrameMasses  # see PrefixStates.factors


@dataclass(frozen=True, slots=True)
class PrefixCandidate:
    """A prefix that may be selected."""

    rank_key: tuple
    parent: ExpandedPrefix
    depth: int
    token: int
    probs_T: FrameMasses  # unconditioned probability of its last token
    begin_masses_T: FrameMasses  # mass with which each frame begins that token after the parent
    mass: float  # probability as a prefix


def compiled_conditioned_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
    min_mass: float = 0.0,
) -> PrefixLists:
    """Return the result of `best_first_conditioned_search`, by machine code where numba is there and the states are
    arrays."""
    arrays = None if (kernels := conditioned_kernels()) is None else states.arrays()
    if arrays is None:
        return best_first_conditioned_search(log_probs_TC, states, nodes, stop_token_ids, depth, topology, min_mass)
    probs_TV, memory_R, *correction = arrays
    frames_TC, blank_T = log_probs_TC.numpy(), log_probs_TC[:, -1].double().exp().numpy()
    depth = len(frames_TC) if depth is None else min(depth, len(frames_TC))
    stops_S = np.array([*stop_token_ids, -2])  # -2 is no token; numba needs at least one to know their type
    frames = kernels.Frames(frames_TC, probs_TV, blank_T)
    limits = nodes, stops_S, depth, topology.merges_repeats, min_mass
    columns = kernels.search(frames, kernels.Correction(*correction), memory_R, *limits)
    tokens, parents, masses = (column_N.tolist() for column_N in columns)
    return tokens, parents, masses


def conditioned_kernels() -> Any:
    """Return the module of compiled loops, imported by the first search; None without numba."""
    return load_kernels("ctcdraft.ctc.conditioned_kernels")


def best_first_conditioned_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
    min_mass: float = 0.0,
) -> PrefixLists:
    """Return the result of `conditioned_prefix_search` as lists.

    No prefix is more probable than its parent: once `nodes` candidates are known, only those better than the worst of
    the best `nodes` can have children among these, and every such child raises the bar. A prefix exactly as probable
    as the worst is not expanded: of several that tie for the last ranks others may be selected.

    The frames of one more prefix cost a product over the vocabulary, so this expands fewer prefixes than a level has:
    of the 14 at 16 nodes, four or five have children in the tree.
    """
    probs_TV, blank_T = log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].double().exp().tolist()
    depth = len(log_probs_TC) if depth is None else min(depth, len(log_probs_TC))
    factor_KV, scale_KT = states.factors()
    scale_T = scale_KT[0].tolist()
    all_blank_T = [1.0, *accumulate(map(mul, blank_T[:-1], scale_T[:-1]), mul)]
    new, count = [ExpandedPrefix((), 0, None, None, 1.0, all_blank_T, [0.0] * len(blank_T), scale_T)], 1
    candidates: list[PrefixCandidate] = []
    queue: list[tuple[tuple, PrefixCandidate]] = []  # no two rank keys are equal, so candidates are never compared
    best_masses = [min_mass] * nodes  # of all candidates, as a heap
    while nodes > 0 and depth > 0:
        for one in expand_prefixes(log_probs_TC, probs_TV, factor_KV, new, best_masses, topology.merges_repeats):
            if one.depth < depth and one.token not in stop_token_ids:
                heapq.heappush(queue, (one.rank_key, one))
            candidates.append(one)
        chosen: list[PrefixCandidate] = []
        while queue and len(chosen) < EXPANSION_BATCH and queue[0][1].mass > best_masses[0]:
            chosen.append(heapq.heappop(queue)[1])
        if not chosen:
            break
        tokens_K = torch.tensor([one.token for one in chosen], device=probs_TV.device)
        rows_K = torch.tensor([one.parent.number for one in chosen], device=probs_TV.device)
        extended = states.extend(tokens_K, rows_K)
        states, (factor_KV, scale_KT) = states.concat(extended), extended.factors()
        own_K, scales = factor_KV.gather(1, tokens_K[:, None])[:, 0].tolist(), scale_KT.tolist()
        new = [
            expand_candidate(one, count + row, own_K[row], scales[row], blank_T, topology.merges_repeats)
            for row, one in enumerate(chosen)
        ]
        count += len(new)
    best = [one for one in sorted(candidates, key=attrgetter("rank_key"))[:nodes] if one.mass >= min_mass]
    node_of = {id(one): node for node, one in enumerate(best)} | {id(None): -1}
    parents = [node_of[id(one.parent.candidate)] for one in best]
    return [one.token for one in best], parents, [one.mass for one in best]


def expand_prefixes(
    log_probs_TC: Tensor,
    token_probs_TV: Tensor,
    factor_KV: Tensor,
    prefixes: Sequence[ExpandedPrefix],
    best_masses: list[float],
    merges: bool,
) -> Iterator[PrefixCandidate]:
    """Yield the children of these prefixes that may be selected, and update best_masses."""
    begin_KT = [
        [(b + s) * scale for b, s, scale in zip(one.ends_in_blank_T, one.ends_in_label_T, one.scale_T, strict=True)]
        for one in prefixes
    ]
    bound_KV = (token_probs_TV.new_tensor(begin_KT) @ token_probs_TV) * factor_KV
    is_first = prefixes[0].token is None  # there is nothing yet that a child would have to beat
    parent_R, token_R = select_candidates(bound_KV, len(best_masses), None if is_first else best_masses[0])
    columns_RT = log_probs_TC[:, token_R].T.double().exp().tolist()
    factor_R = factor_KV[parent_R, token_R].tolist()
    for row, token, probs_T, factor in zip(parent_R.tolist(), token_R.tolist(), columns_RT, factor_R, strict=True):
        parent = prefixes[row]
        repeats = merges and token == parent.token
        masses = zip(parent.ends_in_blank_T, parent.ends_in_label_T, probs_T, parent.scale_T, strict=True)
        begins_T = [(blank if repeats else blank + label) * p * (factor * scale) for blank, label, p, scale in masses]
        mass = min(sum(begins_T), parent.max_mass)  # rounding must not lift a child above its parent
        if mass > 0 and mass * TIE_TOLERANCE >= best_masses[0]:
            heapq.heappushpop(best_masses, mass)
            depth = parent.rank_key[1] + 1 if parent.rank_key else 1
            rank_key = (-round_mantissa(mass), depth, parent.rank_key, token)
            yield PrefixCandidate(rank_key, parent, depth, token, probs_T, begins_T, mass)


def expand_candidate(
    one: PrefixCandidate, number: int, own: float, scale_T: FrameMasses, blank_T: FrameMasses, merges: bool
) -> ExpandedPrefix:
    """Return the candidate's forward masses: a frame begins its token, frames repeat it, blanks follow.

    own: the factor of its last token after the prefix itself.
    """
    ends_in_blank, ends_in_label = 0.0, 0.0
    blank_mass_T, label_mass_T = [], []
    for begins, p, p_blank, scale in zip(one.begin_masses_T, one.probs_T, blank_T, scale_T, strict=True):
        blank_mass_T.append(ends_in_blank)
        label_mass_T.append(ends_in_label)
        repeat = p * own * scale if merges else 0.0
        ends_in_blank = (ends_in_blank + ends_in_label) * (p_blank * scale)
        ends_in_label = begins + ends_in_label * repeat
    return ExpandedPrefix(one.rank_key, number, one, one.token, one.mass, blank_mass_T, label_mass_T, scale_T)
