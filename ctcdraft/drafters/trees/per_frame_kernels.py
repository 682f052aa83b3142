"""The loops of `per_frame.compiled_per_frame_search`, compiled by numba: the most probable texts, best first.

A text is never more probable than its prefix, so the next best of all is always a child of one already in the tree.
Only candidates better than the worst of the best `nodes` are kept; `nodes` does not count the root. Probabilities of
frames are float32; masses, their products along a text, float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctcdraft.array_kernels import compiled, exactly, exponentiate
from ctcdraft.ctc.conditioned_kernels import step_memory, token_factors
from ctcdraft.ctc.search_kernels import replace_least


class FrameFeatures(NamedTuple):
    """Frames that a correction reads beside its memory (`FrameGRUCorrection`); without rows it reads none."""

    frame_TR: np.ndarray
    corrected_T: np.ndarray  # 1 or 0
    tokens_MR: np.ndarray


class Texts(NamedTuple):
    """The draft prefixes already in the tree, by row: row 0 is the root."""

    token_N: np.ndarray
    parent_N: np.ndarray
    level_N: np.ndarray
    mass_N: np.ndarray
    memory_NM: np.ndarray


class Candidates(NamedTuple):
    """Prefixes with one more token. The mass is -1 once it is in the tree."""

    token_Q: np.ndarray
    row_Q: np.ndarray
    mass_Q: np.ndarray


@compiled
def search(probs_TV, correction, features, memory_M, nodes, stops_S, depth, min_mass):
    """Return tokens_N, parents_N (-1: the root) and masses_N of the most probable texts above a mass."""
    texts = Texts(
        np.zeros(nodes + 1, np.int64), np.full(nodes + 1, -1), np.zeros(nodes + 1, np.int64), np.ones(nodes + 1),
        np.empty((nodes + 1, len(memory_M)), np.float32),
    )  # fmt: skip
    texts.memory_NM[0] = memory_M
    size = nodes * (nodes + 1)
    waiting = Candidates(np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size))
    best_masses_N = np.full(nodes, min_mass, np.float64)  # of all candidates, ascending
    best_V, count, row = np.empty(probs_TV.shape[1], np.float32), 0, 0
    while True:
        level, may_grow = texts.level_N[row], row == 0 or not (stops_S == texts.token_N[row]).any()
        if may_grow and level < depth and texts.mass_N[row] > best_masses_N[0]:
            if row > 0 and len(memory_M) > 0:
                parent_M = texts.memory_NM[texts.parent_N[row]]
                step_memory(correction, parent_M, texts.token_N[row], texts.memory_NM[row])
            next_probs(probs_TV[level], correction, features, level, texts.memory_NM[row], best_V)
            count = add_children(texts, row, best_V, best_masses_N, waiting, count)
        if row == nodes or count == 0:
            break
        first = np.argmax(waiting.mass_Q[:count])  # of equals the one that was found first
        if waiting.mass_Q[first] <= 0:
            break
        row += 1
        texts.token_N[row], texts.parent_N[row] = waiting.token_Q[first], waiting.row_Q[first]
        texts.level_N[row], texts.mass_N[row] = texts.level_N[waiting.row_Q[first]] + 1, waiting.mass_Q[first]
        waiting.mass_Q[first] = -1
    return texts.token_N[1 : row + 1], texts.parent_N[1 : row + 1] - 1, texts.mass_N[1 : row + 1]


@compiled
def next_probs(probs_V, correction, features, level, memory_M, next_V):
    """Write the next-token distribution of a text, given its frame's without correction."""
    if len(memory_M) == 0:
        next_V[:] = 1
    elif len(features.frame_TR) == 0:
        token_factors(memory_M, correction.out_RV, next_V)
    else:
        token_factors(frame_features(features, level, memory_M), correction.out_RV, next_V)
    total = np.float32(0)
    for v in range(len(next_V)):
        next_V[v] *= probs_V[v]
        total += next_V[v]
    share = np.float32(1) / total if total > 0 else np.float32(0)
    for v in range(len(next_V)):
        next_V[v] *= share


@compiled
def frame_features(features, level, memory_M):
    """Return corrected * SiLU(frame + tokens @ memory), as `FrameGRUCorrection.features` does."""
    sum_R = features.frame_TR[level].copy()
    for m in range(len(memory_M)):
        for r in range(len(sum_R)):
            sum_R[r] += memory_M[m] * features.tokens_MR[m, r]
    sigmoid_R = -sum_R
    exponentiate(sigmoid_R)
    for r in range(len(sum_R)):
        sum_R[r] *= features.corrected_T[level] / (np.float32(1) + sigmoid_R[r])
    return sum_R


@exactly
def add_children(texts, row, next_V, best_masses_N, waiting, count):
    """Add the tokens that may follow a text in the tree to the candidates, and return how many there are."""
    mass, most = texts.mass_N[row], len(best_masses_N)
    tokens_S, probs_S, found = np.empty(most, np.int64), np.empty(most, np.float32), 0
    least = best_masses_N[0] / mass
    for v in range(len(next_V)):
        if next_V[v] > least:
            place = min(found, most - 1)
            while place > 0 and probs_S[place - 1] < next_V[v]:
                tokens_S[place], probs_S[place] = tokens_S[place - 1], probs_S[place - 1]
                place -= 1
            tokens_S[place], probs_S[place] = v, next_V[v]
            found = min(found + 1, most)
            if found == most:
                least = max(least, np.float64(probs_S[most - 1]))
    for s in range(found):
        child_mass = mass * min(np.float64(probs_S[s]), 1.0)  # rounding must not lift a child above its parent
        if child_mass > best_masses_N[0]:
            replace_least(best_masses_N, child_mass)
            waiting.token_Q[count], waiting.row_Q[count], waiting.mass_Q[count] = tokens_S[s], row, child_mass
            count += 1
    return count
