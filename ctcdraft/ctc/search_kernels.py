"""The loops of `best_first.compiled_search` over arrays, compiled by numba.

numba keeps the machine code on disk: only the first search of an installation compiles.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np
from numba import njit

from ctcdraft.ctc.best_first import TIE_TOLERANCE, VELTKAMP_FACTOR


class Candidates(NamedTuple):
    """Tokens W, the one with the largest sum over all frames first."""

    token_W: np.ndarray
    probs_WT: np.ndarray
    total_W: np.ndarray


class Found(NamedTuple):
    """Prefixes by row, row 0 the empty one and row n + 1 node n, with its forward masses: before every frame."""

    token_R: np.ndarray
    parent_R: np.ndarray  # a row
    level_R: np.ndarray
    mass_R: np.ndarray
    ends_in_blank_RT: np.ndarray
    any_ending_RT: np.ndarray


class Queue(NamedTuple):
    """Prefixes that may be selected, unordered."""

    mass_Q: np.ndarray
    rank_Q: np.ndarray  # the mass, rounded
    row_Q: np.ndarray  # of the parent
    choice_Q: np.ndarray  # the token's index among the candidates


@njit(cache=True)
def search(log_probs_TC, best_TR, blank, nodes, tokens_per_frame, stops_S, depth, min_mass):
    """Return tokens_N, parents_N and masses_N of `compiled_search`. best_TR: the best classes of every frame."""
    choices = candidates(log_probs_TC, best_TR, blank, tokens_per_frame)
    frames, rows = len(log_probs_TC), nodes + 1
    size = rows * len(choices.token_W)  # every prefix that is expanded may queue all tokens; nothing checks the bounds
    blank_T = np.empty(frames)
    for frame in range(frames):
        blank_T[frame] = exp(np.float64(log_probs_TC[frame, blank]))
    best_masses_N = np.full(nodes, min_mass)  # of all candidates so far, ascending
    queue = Queue(np.empty(size), np.empty(size), np.empty(size, np.int64), np.empty(size, np.int64))
    ids_3R, masses_2RT = np.zeros((3, rows), np.int64), np.zeros((2, rows, frames))
    found = Found(ids_3R[0], ids_3R[1], ids_3R[2], np.ones(rows), masses_2RT[0], masses_2RT[1])
    found.token_R[0] = -1
    masses_2RT[:, 0, 0] = 1.0
    for frame in range(1, frames):
        masses_2RT[:, 0, frame] = masses_2RT[0, 0, frame - 1] * blank_T[frame - 1]
    row, waiting = 0, 0
    while nodes > 0 and depth > 0:
        if found.level_R[row] < depth and not (stops_S == found.token_R[row]).any():
            waiting = expand(found, row, choices, queue, waiting, best_masses_N)
        if waiting == 0 or row == nodes:
            break
        first = most_probable(queue, waiting, found, choices.token_W)
        if queue.mass_Q[first] < min_mass:
            break
        row, waiting = row + 1, waiting - 1
        append_prefix(found, row, queue.row_Q[first], choices, queue.choice_Q[first], queue.mass_Q[first], blank_T)
        move(queue, waiting, first)
    return found.token_R[1 : row + 1], found.parent_R[1 : row + 1] - 1, found.mass_R[1 : row + 1]


@njit(cache=True)
def candidates(log_probs_TC, best_TR, blank, tokens_per_frame):
    """Return the union of every frame's best tokens."""
    frames = len(best_TR)
    chosen_X, count = np.empty(frames * tokens_per_frame, np.int64), 0
    for frame in range(frames):
        of_frame = 0
        for token in best_TR[frame]:
            if token != blank and of_frame < tokens_per_frame:
                chosen_X[count], count, of_frame = token, count + 1, of_frame + 1
    token_W = np.unique(chosen_X[:count])
    probs_WT, total_W = np.empty((len(token_W), frames)), np.zeros(len(token_W))
    for choice, token in enumerate(token_W):
        for frame in range(frames):
            probs_WT[choice, frame] = exp(np.float64(log_probs_TC[frame, token]))
            total_W[choice] += probs_WT[choice, frame]
    order_W = np.argsort(-total_W)
    return Candidates(token_W[order_W], probs_WT[order_W], total_W[order_W])


@njit(cache=True)
def expand(found, row, choices, queue, waiting, best_masses_N):
    """Queue the children of a prefix that may be selected, update best_masses_N, and return the queue's length."""
    max_mass = found.mass_R[row]
    for choice in range(len(choices.token_W)):
        if choices.total_W[choice] * max_mass * TIE_TOLERANCE < best_masses_N[0]:
            break
        repeats = choices.token_W[choice] == found.token_R[row]
        begin_T = found.ends_in_blank_RT[row] if repeats else found.any_ending_RT[row]
        mass = 0.0
        for frame in range(len(begin_T)):
            mass += begin_T[frame] * choices.probs_WT[choice, frame]
        mass = min(mass, max_mass)
        if mass > 0 and mass * TIE_TOLERANCE >= best_masses_N[0]:
            replace_least(best_masses_N, mass)
            high = mass * VELTKAMP_FACTOR
            queue.mass_Q[waiting], queue.rank_Q[waiting] = mass, high - (high - mass)
            queue.row_Q[waiting], queue.choice_Q[waiting] = row, choice
            waiting += 1
    return waiting


@njit(cache=True)
def replace_least(best_masses_N, mass):
    """Replace the least of ascending masses if this one is larger."""
    place = 0
    while place < len(best_masses_N) and best_masses_N[place] < mass:
        if place > 0:
            best_masses_N[place - 1] = best_masses_N[place]
        place += 1
    if place > 0:
        best_masses_N[place - 1] = mass


@njit(cache=True)
def most_probable(queue, waiting, found, token_W):
    """Return the entry that ranks first: by mass, then depth, then the parent's rank, then token id."""
    first = 0
    for other in range(1, waiting):
        if queue.rank_Q[other] < queue.rank_Q[first]:
            continue
        before = queue.rank_Q[other] > queue.rank_Q[first]
        if not before:
            # Rows are in the order of ranks: a prefix never ranks above its parent, so later ones rank lower.
            row, best = queue.row_Q[other], queue.row_Q[first]
            levels = found.level_R[row] - found.level_R[best]
            before = levels < 0 or (levels == 0 and row < best)
            before |= row == best and token_W[queue.choice_Q[other]] < token_W[queue.choice_Q[first]]
        if before:
            first = other
    return first


@njit(cache=True)
def append_prefix(found, row, parent, choices, choice, mass, blank_T):
    """Write a prefix with its forward masses: a frame begins the token, frames repeat it, blanks follow."""
    token = choices.token_W[choice]
    found.token_R[row], found.parent_R[row] = token, parent
    found.level_R[row], found.mass_R[row] = found.level_R[parent] + 1, mass
    begin_T = found.ends_in_blank_RT[parent] if token == found.token_R[parent] else found.any_ending_RT[parent]
    ends_in_blank, ends_in_label = 0.0, 0.0
    for frame in range(len(blank_T)):
        either = ends_in_blank + ends_in_label
        found.ends_in_blank_RT[row, frame], found.any_ending_RT[row, frame] = ends_in_blank, either
        ends_in_blank = either * blank_T[frame]
        ends_in_label = (begin_T[frame] + ends_in_label) * choices.probs_WT[choice, frame]


@njit(cache=True)
def move(queue, source, target):
    """Move an entry of the queue."""
    queue.mass_Q[target], queue.rank_Q[target] = queue.mass_Q[source], queue.rank_Q[source]
    queue.row_Q[target], queue.choice_Q[target] = queue.row_Q[source], queue.choice_Q[source]
