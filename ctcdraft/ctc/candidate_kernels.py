"""Candidates of the compiled search over label-conditioned frames, and their ranking."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctcdraft.array_kernels import exactly
from ctcdraft.ctc.best_first import VELTKAMP_FACTOR


class Candidates(NamedTuple):
    """Prefixes that may be selected."""

    token_Q: np.ndarray
    row_Q: np.ndarray  # of the parent
    level_Q: np.ndarray
    node_Q: np.ndarray  # -1 where it is not selected
    mass_Q: np.ndarray
    rank_Q: np.ndarray  # the mass, rounded
    factor_Q: np.ndarray  # of the token after the parent
    rest_Q: np.ndarray  # bound on the mass of its children; 0 once it is expanded


class Expanded(NamedTuple):
    """Prefixes whose frames were computed, by row: row 0 is the empty one."""

    entry_R: np.ndarray  # in the candidates
    blank_RT: np.ndarray  # mass before each frame of the prefix, ending in a blank
    label_RT: np.ndarray  # and ending in its last token
    scale_RT: np.ndarray  # see PrefixStates.factors
    memory_KR: np.ndarray


@exactly
def new_candidates(size):
    ids_4Q, values_4Q = np.full((4, size), -1), np.zeros((4, size))
    ids_4Q[2, 0] = 0
    values_4Q[0, 0] = 1.0
    return Candidates(
        ids_4Q[0], ids_4Q[1], ids_4Q[2], ids_4Q[3], values_4Q[0], values_4Q[1], values_4Q[2], values_4Q[3]
    )


@exactly
def enlarged(found, count, least_size):
    larger = new_candidates(2 * least_size)
    larger.token_Q[:count], larger.row_Q[:count] = found.token_Q[:count], found.row_Q[:count]
    larger.level_Q[:count], larger.mass_Q[:count] = found.level_Q[:count], found.mass_Q[:count]
    larger.rank_Q[:count], larger.factor_Q[:count] = found.rank_Q[:count], found.factor_Q[:count]
    larger.rest_Q[:count] = found.rest_Q[:count]
    return larger


@exactly
def add_candidate(found, entry, token, row, level, mass, factor, rest):
    high = mass * VELTKAMP_FACTOR
    found.mass_Q[entry], found.rank_Q[entry] = mass, high - (high - mass)
    found.token_Q[entry], found.row_Q[entry], found.level_Q[entry] = token, row, level
    found.factor_Q[entry], found.rest_Q[entry] = factor, rest


@exactly
def ranks_before(found, expanded, one, other):
    """Return whether an entry ranks before another: by mass, depth, the parent's rank, token id."""
    while found.rank_Q[one] == found.rank_Q[other] and found.level_Q[one] == found.level_Q[other]:
        if found.row_Q[one] == found.row_Q[other]:
            return found.token_Q[one] < found.token_Q[other]
        one, other = expanded.entry_R[found.row_Q[one]], expanded.entry_R[found.row_Q[other]]
    if found.rank_Q[one] == found.rank_Q[other]:
        return found.level_Q[one] < found.level_Q[other]
    return found.rank_Q[one] > found.rank_Q[other]


@exactly
def next_entry(found, expanded, count, least):
    """Return the first in rank of those that may have children above the least mass, -1 if there is none."""
    first = -1
    for entry in range(1, count):
        if found.rest_Q[entry] > least and (first < 0 or ranks_before(found, expanded, entry, first)):
            first = entry
    if first >= 0:
        found.rest_Q[first] = 0.0
    return first


@exactly
def best_nodes(found, expanded, count, nodes, min_mass):
    """Return tokens_N, parents_N and masses_N of the entries that rank first."""
    best_N, selected = np.empty(nodes, np.int64), 0
    while selected < nodes:
        first = -1
        for entry in range(1, count):
            if found.node_Q[entry] < 0 and (first < 0 or ranks_before(found, expanded, entry, first)):
                first = entry
        if first < 0 or found.mass_Q[first] < min_mass:
            break
        best_N[selected] = first
        found.node_Q[first] = selected
        selected += 1
    best_N = best_N[:selected]
    parents_N = np.empty(selected, np.int64)
    for node in range(selected):
        parents_N[node] = found.node_Q[expanded.entry_R[found.row_Q[best_N[node]]]]
    return found.token_Q[best_N], parents_N, found.mass_Q[best_N]
