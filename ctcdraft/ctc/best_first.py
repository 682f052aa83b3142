"""Prefix search a few prefixes at a time, most probable first, in plain Python: for few nodes on a CPU.

`best_first_search` gives what `prefix_search` gives, and `best_first_conditioned_search` what
`conditioned_prefix_search` gives. A level of those costs twenty tensor operations however small the tensors are; a few
hundred additions cost less.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, mul

import torch
from torch import Tensor

from ctcdraft.ctc.conditioned_search import PrefixStates, select_candidates
from ctcdraft.ctc.prefix_search import check_blank
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology

# The ranking's precision: masses that agree in 29 significant bits count as equal, as in `prefix_search.py`.
VELTKAMP_FACTOR = 2.0**24 + 1
TIE_TOLERANCE = 1 + 1e-8  # larger than that rounding, so that a bound cuts nothing that could still tie
# Prefixes expanded together: with fewer, the fixed cost of an expansion is paid more often. Time relative to a search
# by levels (150 drafts of a head on the embedded base, 16 nodes, one thread of an AMD EPYC with other work): 2 take
# 1.14, 3 0.88, 4 0.82, 6 0.74, 8 0.70 to 0.74, 10 and 14 0.78.
EXPANSION_BATCH = 8

FrameMasses = Sequence[float]  # one per frame
PrefixLists = tuple[list[int], list[int], list[float]]  # tokens, parents with -1 for the empty prefix, and masses


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A prefix and its forward masses: the probability that the frames before t collapse to exactly it, for every t."""

    ends_in_blank_T: FrameMasses  # and the last of them is a blank (or there is none)
    any_ending_T: FrameMasses  # and the last of them is a blank or the last token
    token: int | None  # the last one
    max_mass: float  # probability as a prefix
    rank_key: tuple  # compares as its rank among prefixes of equal length
    number: int  # of the node; -1 for the empty prefix


def best_first_search(
    log_probs_TC: Tensor,
    blank: int,
    nodes: int,
    tokens_per_frame: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    min_mass: float = 0.0,
) -> PrefixLists:
    """Return the result of `prefix_search`, ties included, as lists.

    No prefix is more probable than its parent, so the next best of all is always a child of one expanded already:

        frames a 1/2 b 1/4 blank 1/4, twice       candidates            taken
                                                  a 5/8    b 5/16       a
                                                  b 5/16   a b 1/8      b
                                                  a b 1/8  b a 1/8      a b
    """
    probs = token_probabilities(log_probs_TC, blank, tokens_per_frame)
    blank_T = probs.pop(blank)
    by_total_mass = sorted(((sum(probs_T), token, probs_T) for token, probs_T in probs.items()), reverse=True)
    depth = len(blank_T) if depth is None else min(depth, len(blank_T))
    tokens: list[int] = []
    parents: list[int] = []
    masses: list[float] = []
    best_masses = [min_mass] * nodes  # of all candidates so far, as a heap: nothing below its least can be selected
    queue: list[tuple] = []
    all_blank_T = [1.0, *accumulate(blank_T[:-1], mul)]
    parent = PrefixNode(all_blank_T, all_blank_T, None, 1.0, (), -1)
    level = 1
    while nodes > 0 and depth > 0:
        if level <= depth and parent.token not in stop_token_ids:
            for total, token, probs_T in by_total_mass:
                if total * parent.max_mass * TIE_TOLERANCE < best_masses[0]:
                    break  # a child's mass is at most the parent's times the token's sum over all frames
                begin_T = parent.ends_in_blank_T if token == parent.token else parent.any_ending_T
                # Rounding must not lift a child above its parent: it would be taken first.
                mass = min(sum(map(mul, begin_T, probs_T)), parent.max_mass)
                if mass > 0 and mass * TIE_TOLERANCE >= best_masses[0]:
                    heapq.heappushpop(best_masses, mass)
                    heapq.heappush(queue, (-round_mantissa(mass), level, parent.rank_key, token, mass, parent))
        if not queue or len(tokens) == nodes:
            break
        rank, level, parent_rank, token, mass, above = heapq.heappop(queue)
        if mass < min_mass:
            break
        parent = extend_prefix(above, token, probs[token], blank_T, mass, (rank, parent_rank, token), len(tokens))
        tokens.append(token)
        parents.append(above.number)
        masses.append(mass)
        level += 1
    return tokens, parents, masses


def extend_prefix(
    parent: PrefixNode, token: int, p_T: FrameMasses, blank_T: FrameMasses, mass: float, rank_key: tuple, number: int
) -> PrefixNode:
    """Return the prefix with one more token: a frame begins the token, frames repeat it, blanks follow."""
    ends_in_blank, ends_in_label = 0.0, 0.0
    blank_mass_T, any_mass_T = [], []
    begin_T = parent.ends_in_blank_T if token == parent.token else parent.any_ending_T
    for begin, p, p_blank in zip(begin_T, p_T, blank_T, strict=True):
        either = ends_in_blank + ends_in_label
        blank_mass_T.append(ends_in_blank)
        any_mass_T.append(either)
        ends_in_blank, ends_in_label = either * p_blank, (begin + ends_in_label) * p
    return PrefixNode(blank_mass_T, any_mass_T, token, mass, rank_key, number)


def token_probabilities(log_probs_TC: Tensor, blank: int, tokens_per_frame: int) -> dict[int, list[float]]:
    """Return float64 probabilities_T of the blank and of every frame's best tokens."""
    check_blank(log_probs_TC, blank)
    size = min(tokens_per_frame + 1, log_probs_TC.shape[1])  # one more class replaces the blank
    chosen = {blank}
    for best in log_probs_TC.topk(size, dim=1).indices.tolist():
        chosen.update([token for token in best if token != blank][:tokens_per_frame])
    classes = list(chosen)
    return dict(zip(classes, log_probs_TC[:, classes].T.double().exp().tolist(), strict=True))


def round_mantissa(mass: float) -> float:
    high = mass * VELTKAMP_FACTOR  # the low bits are lost in the sum (Veltkamp 1968)
    return high - (high - mass)


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
