"""The search of `listening.py`, a few texts at a time, the most probable first: for few nodes on a CPU. It knows no
tree.

What a text makes of the frames takes a product over all words, so fewer texts are asked than a level has: of those 14,
at 16 nodes, four or five have children in the tree. Masses are added up in plain Python, where a handful of them costs
less than one operation on a tensor.
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

# Texts that are asked together: with fewer, what every asking costs by itself is paid more often. Beside a level at a
# time (150 drafts of a head on the embedded base, 16 nodes, one thread of an AMD EPYC with other work): 2 take 1.14 of
# the time, 3 0.88, 4 0.82, 6 0.74, 8 0.70 to 0.74, 10 and 14 0.78.
EXPANSION_BATCH = 8


@dataclass(frozen=True, slots=True)
class ExpandedPrefix:
    """A text, and what the frames say behind it. place: compares as its place in line; number: in the order of asking;
    found: its number among the candidates, -1 for the empty text. blanked_T, said_T: the frames before t collapse to
    just this text, and the last of them is a blank (or there is none) / is its own word."""

    rank_key: tuple
    number: int
    candidate_index: int
    token: int | None
    max_mass: float
    ends_in_blank_T: FrameMasses
    ends_in_label_T: FrameMasses
    scale_T: FrameMasses


@dataclass(frozen=True, slots=True)
class PrefixCandidate:
    """A text that may come in. probs_T: of its last word, in frames that hear nothing; begins_T: the mass with which
    each frame begins that word behind the text above. mass: its probability as a prefix."""

    rank_key: tuple
    parent: ExpandedPrefix
    depth: int
    token: int
    probs_T: FrameMasses
    begin_masses_T: FrameMasses
    mass: float


def best_first_conditioned_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_words: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
) -> tuple[list[int], list[int]]:
    """What `listening_search` finds, as lists: words_N, and parents_N with -1 below the empty text.

    No text is more probable than the one above it: once `nodes` candidates are known, only those better than the worst
    of the best `nodes` can have better children than that, and every child that comes in raises the bar. Below a text
    that is just as probable as the worst nobody looks: of several that tie for the last places others may be taken.
    """
    probs_TV, blank_T = log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].double().exp().tolist()
    depth = len(log_probs_TC) if depth is None else min(depth, len(log_probs_TC))
    factor_KV, scale_KT = states.factors()
    new, count = [empty_prefix(blank_T, scale_KT[0].tolist())], 1
    found: list[PrefixCandidate] = []
    queue: list[tuple[tuple, int]] = []
    best_masses = [0.0] * nodes  # of all candidates, as a heap
    while nodes > 0 and depth > 0:
        for one in expand_prefixes(log_probs_TC, probs_TV, factor_KV, new, best_masses, topology.merges_repeats):
            if one.depth < depth and one.token not in stop_words:
                heapq.heappush(queue, (one.rank_key, len(found)))
            found.append(one)
        chosen = pop_promising(queue, found, best_masses[0])
        if not chosen:
            break
        some = [found[number] for number in chosen]
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
    return rank_candidates(found, nodes)


def empty_prefix(blank_T: FrameMasses, scale_T: FrameMasses) -> ExpandedPrefix:
    """Blanks so far, and never a word."""
    blanked_T = [1.0]
    for silent, scale in zip(blank_T[:-1], scale_T[:-1], strict=True):
        blanked_T.append(blanked_T[-1] * (silent * scale))
    return ExpandedPrefix((), 0, -1, None, 1.0, blanked_T, [0.0] * len(blank_T), scale_T)


def expand_prefixes(
    log_probs_TC: Tensor,
    token_probs_TV: Tensor,
    factor_KV: Tensor,
    texts: Sequence[ExpandedPrefix],
    best_masses: list[float],
    merges: bool,
) -> Iterator[PrefixCandidate]:
    """Of these texts, those that may come in; best_masses goes along with them."""
    opens = [
        [(b + s) * scale for b, s, scale in zip(t.ends_in_blank_T, t.ends_in_label_T, t.scale_T, strict=True)]
        for t in texts
    ]
    bound_KV = (
        torch.tensor(opens, dtype=token_probs_TV.dtype, device=token_probs_TV.device) @ token_probs_TV
    ) * factor_KV
    first = texts[0].token is None  # then nothing is known yet that a child would have to beat
    parent_R, token_R = select_candidates(bound_KV, len(best_masses), None if first else best_masses[0])
    columns_RT = log_probs_TC[:, token_R].T.double().exp().tolist()
    candidates_found = zip(
        parent_R.tolist(), token_R.tolist(), columns_RT, factor_KV[parent_R, token_R].tolist(), strict=True
    )
    for parent, token, probs_T, factor in candidates_found:
        above = texts[parent]
        repeats = merges and token == above.token
        begins_T = [
            (ends_in_blank if repeats else ends_in_blank + ends_in_label) * p * (factor * scale)
            for ends_in_blank, ends_in_label, p, scale in zip(
                above.ends_in_blank_T, above.ends_in_label_T, probs_T, above.scale_T, strict=True
            )
        ]
        mass = min(sum(begins_T), above.max_mass)  # rounding must not lift a child above its parent
        if mass > 0 and mass * TIE_TOLERANCE >= best_masses[0]:
            heapq.heappushpop(best_masses, mass)
            depth = above.rank_key[1] + 1 if above.rank_key else 1
            yield PrefixCandidate(
                (-round_mantissa(mass), depth, above.rank_key, token), above, depth, token, probs_T, begins_T, mass
            )


def pop_promising(queue: list[tuple[tuple, int]], found: Sequence[PrefixCandidate], least: float) -> list[int]:
    """The next ones to ask, of those whose children may come in; they leave the queue."""
    some: list[int] = []
    while queue and len(some) < EXPANSION_BATCH and found[queue[0][1]].mass > least:
        some.append(heapq.heappop(queue)[1])
    return some


def expand_candidate(
    one: PrefixCandidate, number: int, found: int, own: float, scale_T: FrameMasses, blank_T: FrameMasses, merges: bool
) -> ExpandedPrefix:
    """A frame begins its word, frames hold it, blanks follow. own: what the text makes of its own last word."""
    ends_in_blank, ends_in_label = 0.0, 0.0
    blanked_T, said_T = [], []
    for begins, p, silent, scale in zip(one.begin_masses_T, one.probs_T, blank_T, scale_T, strict=True):
        blanked_T.append(ends_in_blank)
        said_T.append(ends_in_label)
        repeat = p * own * scale if merges else 0.0
        ends_in_blank, ends_in_label = (
            (ends_in_blank + ends_in_label) * (silent * scale),
            begins + ends_in_label * repeat,
        )
    return ExpandedPrefix(one.rank_key, number, found, one.token, one.mass, blanked_T, said_T, scale_T)


def rank_candidates(found: Sequence[PrefixCandidate], nodes: int) -> tuple[list[int], list[int]]:
    best = sorted(range(len(found)), key=lambda number: found[number].rank_key)[:nodes]
    node = {number: row for row, number in enumerate(best)} | {-1: -1}
    return [found[number].token for number in best], [node[found[number].parent.candidate_index] for number in best]
