"""Prefix search over label-conditioned frames, a few prefixes at a time, most probable first: for few nodes on a CPU.

The frames of one more prefix cost a product over the vocabulary, so this expands fewer prefixes than a level has: of
the 14 at 16 nodes, four or five have children in the tree. Masses are added up in plain Python, where a handful of
them costs less than one tensor operation.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.ctc.best_first import TIE_TOLERANCE, FrameMasses, round_mantissa
from ctcdraft.ctc.conditioned_search import PrefixStates, select_candidates
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology

# Prefixes expanded together: with fewer, the fixed cost of an expansion is paid more often. Time relative to a search
# by levels (150 drafts of a head on the embedded base, 16 nodes, one thread of an AMD EPYC with other work): 2 take
# 1.14, 3 0.88, 4 0.82, 6 0.74, 8 0.70 to 0.74, 10 and 14 0.78.
EXPANSION_BATCH = 8


@dataclass(frozen=True, slots=True)
class ExpandedPrefix:
    """A prefix whose frames were computed, and its forward masses before each frame t."""

    rank_key: tuple  # compares as its rank among prefixes of equal length
    number: int  # in the order of expansion
    candidate_index: int  # among the candidates; -1 for the empty prefix
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


def best_first_conditioned_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
) -> tuple[list[int], list[int]]:
    """Return the result of `conditioned_prefix_search` as lists: tokens, and parents with -1 for the empty prefix.

    No prefix is more probable than its parent: once `nodes` candidates are known, only those better than the worst of
    the best `nodes` can have children among these, and every such child raises the bar. A prefix exactly as probable
    as the worst is not expanded: of several that tie for the last ranks others may be selected.
    """
    probs_TV, blank_T = log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].double().exp().tolist()
    depth = len(log_probs_TC) if depth is None else min(depth, len(log_probs_TC))
    factor_KV, scale_KT = states.factors()
    new, count = [empty_prefix(blank_T, scale_KT[0].tolist())], 1
    candidates: list[PrefixCandidate] = []
    queue: list[tuple[tuple, int]] = []
    best_masses = [0.0] * nodes  # of all candidates, as a heap
    while nodes > 0 and depth > 0:
        for one in expand_prefixes(log_probs_TC, probs_TV, factor_KV, new, best_masses, topology.merges_repeats):
            if one.depth < depth and one.token not in stop_token_ids:
                heapq.heappush(queue, (one.rank_key, len(candidates)))
            candidates.append(one)
        chosen = pop_promising(queue, candidates, best_masses[0])
        if not chosen:
            break
        some = [candidates[index] for index in chosen]
        tokens_K = torch.tensor([one.token for one in some], device=probs_TV.device)
        rows_K = torch.tensor([one.parent.number for one in some], device=probs_TV.device)
        extended = states.extend(tokens_K, rows_K)
        states, (factor_KV, scale_KT) = states.concat(extended), extended.factors()
        own_K, scales = factor_KV.gather(1, tokens_K[:, None])[:, 0].tolist(), scale_KT.tolist()
        new = [
            expand_candidate(one, count + row, chosen[row], own_K[row], scales[row], blank_T, topology.merges_repeats)
            for row, one in enumerate(some)
        ]
        count += len(new)
    return rank_candidates(candidates, nodes)


def empty_prefix(blank_T: FrameMasses, scale_T: FrameMasses) -> ExpandedPrefix:
    """Return the prefix of blanks only."""
    mass_T = [1.0]
    for p_blank, scale in zip(blank_T[:-1], scale_T[:-1], strict=True):
        mass_T.append(mass_T[-1] * (p_blank * scale))
    return ExpandedPrefix((), 0, -1, None, 1.0, mass_T, [0.0] * len(blank_T), scale_T)


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
        begins_T = [
            (ends_in_blank if repeats else ends_in_blank + ends_in_label) * p * (factor * scale)
            for ends_in_blank, ends_in_label, p, scale in zip(
                parent.ends_in_blank_T, parent.ends_in_label_T, probs_T, parent.scale_T, strict=True
            )
        ]
        mass = min(sum(begins_T), parent.max_mass)  # rounding must not lift a child above its parent
        if mass > 0 and mass * TIE_TOLERANCE >= best_masses[0]:
            heapq.heappushpop(best_masses, mass)
            depth = parent.rank_key[1] + 1 if parent.rank_key else 1
            rank_key = (-round_mantissa(mass), depth, parent.rank_key, token)
            yield PrefixCandidate(rank_key, parent, depth, token, probs_T, begins_T, mass)


def pop_promising(queue: list[tuple[tuple, int]], candidates: Sequence[PrefixCandidate], least: float) -> list[int]:
    """Remove from the queue, and return, the next candidates to expand: those whose children may be selected."""
    chosen: list[int] = []
    while queue and len(chosen) < EXPANSION_BATCH and candidates[queue[0][1]].mass > least:
        chosen.append(heapq.heappop(queue)[1])
    return chosen


def expand_candidate(
    one: PrefixCandidate, number: int, index: int, own: float, scale_T: FrameMasses, blank_T: FrameMasses, merges: bool
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
    return ExpandedPrefix(one.rank_key, number, index, one.token, one.mass, blank_mass_T, label_mass_T, scale_T)


def rank_candidates(candidates: Sequence[PrefixCandidate], nodes: int) -> tuple[list[int], list[int]]:
    best = sorted(range(len(candidates)), key=lambda index: candidates[index].rank_key)[:nodes]
    node = {index: row for row, index in enumerate(best)} | {-1: -1}
    return [candidates[i].token for i in best], [node[candidates[i].parent.candidate_index] for i in best]
