"""Best-first prefix search in plain Python: the slow twin of the compiled one, equal to the last bit of every mass."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from operator import mul

from torch import Tensor

from ctcdraft.ctc.best_first import TIE_TOLERANCE, VELTKAMP_FACTOR, PrefixLists
from ctcdraft.ctc.prefix_search import check_blank

FrameMasses = Sequence[float]  # one per frame


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
    """Return what `compiled_search` returns, by the same order of expansions and sums."""
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
    columns = log_probs_TC[:, classes].T.tolist()
    # exp of the C library, as in the compiled search: that of torch differs in the last bit.
    return {token: list(map(exp, log_probs_T)) for token, log_probs_T in zip(classes, columns, strict=True)}


def round_mantissa(mass: float) -> float:
    high = mass * VELTKAMP_FACTOR  # the low bits are lost in the sum (Veltkamp 1968)
    return high - (high - mass)
