"""The search of `prefix.py` one prefix at a time, in plain Python: for few nodes on a CPU. It knows no tree.

There a vectorised level costs its twenty operations however little is in them, and a few hundred additions cost less.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import mul

from torch import Tensor

from ctcdraft.ctc.prefix_search import check_blank

# The ranking's precision: masses that agree in 29 significant bits count as equal, as in `prefix.py`.
VELTKAMP_FACTOR = 2.0**24 + 1
TIE_TOLERANCE = 1 + 1e-8  # more than that rounding, so that a bound cuts nothing that could still tie

FrameMasses = Sequence[float]  # one a frame


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A text, and how probable it is that the frames before t collapse to just it, for every t.

    blanked_T: the last of them is a blank, or there is none. either_T: that, or its own word. room: its probability
    as a prefix. place: compares as its place in line among equally long ones; number: of the node, -1 for no text.
    """

    ends_in_blank_T: FrameMasses
    any_ending_T: FrameMasses
    token: int | None
    max_mass: float
    rank_key: tuple
    number: int


def best_first_search(
    log_probs_TC: Tensor,
    blank: int,
    nodes: int,
    words_per_frame: int,
    stop_words: Collection[int] = (),
    depth: int | None = None,
) -> tuple[list[int], list[int]]:
    """What `prefix_search` finds, ties included, as lists: words_N, and parents_N with -1 below the empty prefix.

    No prefix is more probable than its parent, so the next best of all is always a child of one found already:

        frames a 1/2 b 1/4 blank 1/4, twice       candidates            taken
                                                  a 5/8    b 5/16       a
                                                  b 5/16   a b 1/8      b
                                                  a b 1/8  b a 1/8      a b
    """
    probs = token_probabilities(log_probs_TC, blank, words_per_frame)
    blank_T = probs.pop(blank)
    by_total_mass = sorted(((sum(probs_T), token, probs_T) for token, probs_T in probs.items()), reverse=True)
    frames = len(blank_T)
    depth = frames if depth is None else min(depth, frames)
    tokens: list[int] = []
    parents: list[int] = []
    best_masses = [0.0] * nodes  # of all candidates so far, as a heap: below the least of them nothing can come in
    queue: list[tuple] = []
    silence_T = [1.0]
    for p in blank_T[:-1]:
        silence_T.append(silence_T[-1] * p)
    parent = PrefixNode(silence_T, silence_T, None, 1.0, (), -1)
    level = 1
    while nodes > 0 and depth > 0:
        if level <= depth and parent.token not in stop_words:
            for total, token, probs_T in by_total_mass:
                if total * parent.max_mass * TIE_TOLERANCE < best_masses[0]:
                    break  # a frame begins a word only behind the parent: its room times what all frames give the word
                opens_T = parent.ends_in_blank_T if token == parent.token else parent.any_ending_T
                # Rounding must not lift a child above its parent: it would come first.
                mass = min(sum(map(mul, opens_T, probs_T)), parent.max_mass)
                if mass > 0 and mass * TIE_TOLERANCE >= best_masses[0]:
                    heapq.heappushpop(best_masses, mass)
                    heapq.heappush(queue, (-round_mantissa(mass), level, parent.rank_key, token, mass, parent))
        if not queue or len(tokens) == nodes:
            break
        rank, level, place, token, mass, above = heapq.heappop(queue)
        parent = extend_prefix(above, token, probs[token], blank_T, mass, (rank, place, token), len(tokens))
        tokens.append(token)
        parents.append(above.number)
        level += 1
    return tokens, parents


def extend_prefix(
    parent: PrefixNode,
    token: int,
    probs_T: FrameMasses,
    blank_T: FrameMasses,
    mass: float,
    rank_key: tuple,
    number: int,
) -> PrefixNode:
    """The text with one word more: a frame begins the word, frames hold it, blanks follow."""
    ends_in_blank, ends_in_label = 0.0, 0.0
    blanked_T, either_T = [], []
    begin_T = parent.ends_in_blank_T if token == parent.token else parent.any_ending_T
    for opens, p, silent in zip(begin_T, probs_T, blank_T, strict=True):
        blanked_T.append(ends_in_blank)
        either_T.append(ends_in_blank + ends_in_label)
        ends_in_blank, ends_in_label = (ends_in_blank + ends_in_label) * silent, (opens + ends_in_label) * p
    return PrefixNode(blanked_T, either_T, token, mass, rank_key, number)


def token_probabilities(log_probs_TC: Tensor, blank: int, words_per_frame: int) -> dict[int, list[float]]:
    """probs_T, float64, of every frame's best words and of the blank: two transfers, whatever the number of frames."""
    check_blank(log_probs_TC, blank)
    size = min(words_per_frame + 1, log_probs_TC.shape[1])  # one more than asked for, in the blank's place
    chosen = {blank}
    for best in log_probs_TC.topk(size, dim=1).indices.tolist():
        chosen.update([token for token in best if token != blank][:words_per_frame])
    classes = list(chosen)
    columns = log_probs_TC[:, classes].T.double().exp().tolist()
    return dict(zip(classes, columns, strict=True))


def round_mantissa(mass: float) -> float:
    """The 29 leading bits, by what is lost in a sum (Veltkamp 1968)."""
    high = mass * VELTKAMP_FACTOR
    return high - (high - mass)
