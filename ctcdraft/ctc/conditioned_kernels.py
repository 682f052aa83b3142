"""The loops of `best_first.compiled_conditioned_search`, compiled by numba, for a GRU or Markov logit correction.

No prefix is more probable than its parent: once `nodes` candidates are known, only those better than the worst of the
best `nodes` can have children among these, and every such child raises the bar. Prefixes are expanded in order of
probability while that holds. The frames and their factors are float32, the masses of candidates float64.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np

from ctcdraft.array_kernels import compiled, exactly, exponentiate, log_softmax, step_gru
from ctcdraft.ctc.best_first import TIE_TOLERANCE
from ctcdraft.ctc.candidate_kernels import (
    Expanded,
    add_candidate,
    best_nodes,
    enlarged,
    new_candidates,
    next_entry,
)
from ctcdraft.ctc.search_kernels import replace_least


class Correction(NamedTuple):
    """A logit correction: after token v the memory is row v of the projected inputs table_VG (Markov: recurrent_GR is
    empty) or a GRU cell's next one. out_RV multiplies the memory, or features of it (`FrameGRUCorrection`)."""

    table_VG: np.ndarray
    recurrent_GR: np.ndarray
    bias_G: np.ndarray
    out_RV: np.ndarray


class Frames(NamedTuple):
    log_probs_TC: np.ndarray
    probs_TV: np.ndarray
    blank_T: np.ndarray  # float64


@compiled
def search(frames, correction, memory_R, nodes, stops_S, depth, merges, min_mass):
    """Return tokens_N, parents_N and masses_N of `compiled_conditioned_search`."""
    size, steps, rows = 64 * (nodes + 1), len(frames.blank_T), nodes + 1
    found = new_candidates(size)
    masses_3RT = np.empty((3, rows, steps))
    memory_KR = np.empty((rows, len(memory_R)), np.float32)
    memory_KR[0] = memory_R
    expanded = Expanded(np.zeros(rows, np.int64), masses_3RT[0], masses_3RT[1], masses_3RT[2], memory_KR)
    best_masses_N = np.full(nodes, min_mass, np.float64)  # of all candidates, ascending
    factor_V = np.empty(frames.probs_TV.shape[1], np.float32)
    count, row, entry = 1, 0, 0  # entry 0 is the empty prefix
    while nodes > 0 and depth > 0:
        expanded.entry_R[row] = entry
        expand(frames, correction, found, expanded, row, factor_V, merges)
        tokens_S = select(frames, expanded, row, factor_V, best_masses_N)
        if count + len(tokens_S) > len(found.mass_Q):
            found = enlarged(found, count, count + len(tokens_S))
        for token in tokens_S:
            factor, begins_T = factor_V[token], np.empty(steps)
            mass = begin_masses(frames, found, expanded, row, token, factor, merges, begins_T)
            mass = min(mass, found.mass_Q[entry])  # rounding must not lift a child above its parent
            if mass > 0 and mass * TIE_TOLERANCE >= best_masses_N[0]:
                replace_least(best_masses_N, mass)
                ends = found.level_Q[entry] + 1 == depth or (stops_S == token).any()
                # Its children begin after it does, so none begins where it begins in the last frame.
                rest = 0.0 if ends else mass - begins_T[steps - 1]
                add_candidate(found, count, token, row, found.level_Q[entry] + 1, mass, factor, rest)
                count += 1
        entry = next_entry(found, expanded, count, best_masses_N[0])
        row += 1
        if entry < 0 or row == rows:
            break
    return best_nodes(found, expanded, count, nodes, min_mass)


@compiled
def best_chains(logits_QTC, correction, memory_QR, stops_S, depth, merges):
    """Return tokens_QK and masses_QK of `compiled_conditioned_chains`."""
    requests = len(logits_QTC)
    tokens_QK, masses_QK = np.zeros((requests, depth), np.int64), np.zeros((requests, depth))
    for q in range(requests):
        log_probs_TC, probs_TV, _ = log_softmax(logits_QTC[q])
        frames = Frames(log_probs_TC, probs_TV, np.exp(log_probs_TC[:, -1].astype(np.float64)))
        tokens_QK[q], masses_QK[q] = best_chain(frames, correction, memory_QR[q], stops_S, depth, merges)
    return tokens_QK, masses_QK


@compiled
def best_chain(frames, correction, memory_R, stops_S, depth, merges):
    """Return tokens_K and masses_K of one request. Row k is the prefix of k tokens, and its entry."""
    steps = len(frames.blank_T)
    found = new_candidates(depth + 1)
    masses_3RT = np.empty((3, depth, steps))
    memory_KR = np.empty((depth, len(memory_R)), np.float32)
    memory_KR[0] = memory_R
    expanded = Expanded(np.arange(depth), masses_3RT[0], masses_3RT[1], masses_3RT[2], memory_KR)
    factor_V, begins_T = np.empty(frames.probs_TV.shape[1], np.float32), np.empty(steps)
    tokens_K, masses_K = np.zeros(depth, np.int64), np.zeros(depth)
    for row in range(depth):
        expand(frames, correction, found, expanded, row, factor_V, merges)
        bound_V, last = mass_bounds(frames, expanded, row, factor_V), found.token_Q[row]
        if merges and row > 0:  # the bound of a token that repeats the last one is too large
            bound_V[last] = begin_masses(frames, found, expanded, row, last, factor_V[last], merges, begins_T)
        token = np.argmax(bound_V)
        mass = begin_masses(frames, found, expanded, row, token, factor_V[token], merges, begins_T)
        tokens_K[row], masses_K[row] = token, min(mass, found.mass_Q[row])
        if (stops_S == token).any():
            break
        add_candidate(found, row + 1, token, row, row + 1, masses_K[row], factor_V[token], 0.0)
    return tokens_K, masses_K


@compiled
def expand(frames, correction, found, expanded, row, factor_V, merges):
    """Compute a prefix's memory, the factors of its tokens, the scale of its frames and its forward masses."""
    entry, steps = expanded.entry_R[row], len(frames.blank_T)
    token, parent = found.token_Q[entry], found.row_Q[entry]
    if row > 0:
        step_memory(correction, expanded.memory_KR[parent], token, expanded.memory_KR[row])
    token_factors(expanded.memory_KR[row], correction.out_RV, factor_V)
    begins_T = np.zeros(steps)
    if row > 0:
        begin_masses(frames, found, expanded, parent, token, found.factor_Q[entry], merges, begins_T)
    in_blank, in_label = (1.0, 0.0) if row == 0 else (0.0, 0.0)
    for frame in range(steps):
        probs_V, total = frames.probs_TV[frame], np.float32(0)
        for v in range(len(factor_V)):
            total += factor_V[v] * probs_V[v]
        scale = 1 / np.float64(total + np.float32(frames.blank_T[frame]))
        repeat = 0.0
        if merges and row > 0:
            repeat = exp(np.float64(frames.log_probs_TC[frame, token])) * factor_V[token] * scale
        expanded.blank_RT[row, frame], expanded.label_RT[row, frame] = in_blank, in_label
        expanded.scale_RT[row, frame] = scale
        in_blank = (in_blank + in_label) * (frames.blank_T[frame] * scale)
        in_label = begins_T[frame] + in_label * repeat


@compiled
def token_factors(features_R, out_RV, factor_V):
    """Write exp(features_R @ out_RV), by which the probabilities of all tokens are multiplied."""
    factor_V[:] = 0
    paired = len(features_R) - len(features_R) % 4
    for r in range(0, paired, 4):
        m0, m1, m2, m3 = features_R[r], features_R[r + 1], features_R[r + 2], features_R[r + 3]
        out0_V, out1_V, out2_V, out3_V = out_RV[r], out_RV[r + 1], out_RV[r + 2], out_RV[r + 3]
        for v in range(len(factor_V)):
            factor_V[v] += m0 * out0_V[v] + m1 * out1_V[v] + m2 * out2_V[v] + m3 * out3_V[v]
    for r in range(paired, len(features_R)):
        for v in range(len(factor_V)):
            factor_V[v] += features_R[r] * out_RV[r, v]
    exponentiate(factor_V)


@compiled
def step_memory(correction, memory_R, token, next_R):
    """Write the memory after one more token: see the steps of the corrections."""
    inputs_G = correction.table_VG[token]
    if len(correction.recurrent_GR) == 0:
        next_R[:] = inputs_G
    else:
        step_gru(memory_R, inputs_G, correction.recurrent_GR, correction.bias_G, next_R)


@exactly
def begin_masses(frames, found, expanded, row, token, factor, merges, begins_T):
    """Write the mass with which each frame begins a token after a prefix, and return their sum."""
    repeats = merges and row > 0 and token == found.token_Q[expanded.entry_R[row]]
    mass = 0.0
    for frame in range(len(begins_T)):
        before = expanded.blank_RT[row, frame]
        if not repeats:
            before += expanded.label_RT[row, frame]
        p = exp(np.float64(frames.log_probs_TC[frame, token]))
        begins_T[frame] = before * p * (np.float64(factor) * expanded.scale_RT[row, frame])
        mass += begins_T[frame]
    return mass


@compiled
def mass_bounds(frames, expanded, row, factor_V):
    """Return the masses of a prefix with one more token, too large for one that repeats the last token."""
    bound_V = np.zeros(len(factor_V), np.float32)
    for frame in range(len(frames.blank_T)):
        begin = np.float32(
            (expanded.blank_RT[row, frame] + expanded.label_RT[row, frame]) * expanded.scale_RT[row, frame]
        )
        probs_V = frames.probs_TV[frame]
        for v in range(len(bound_V)):
            bound_V[v] += begin * probs_V[v]
    for v in range(len(bound_V)):
        bound_V[v] *= factor_V[v]
    return bound_V


@compiled
def select(frames, expanded, row, factor_V, best_masses_N):
    """Return the tokens that may follow a prefix in the tree, ascending: see `select_candidates`."""
    bound_V = mass_bounds(frames, expanded, row, factor_V)
    least = best_masses_N[0] * (1 - 1e-5)  # the bounds are as exact as the frames are
    if row == 0:
        # One more than there are nodes: the bound of a token that repeats the last one is too large.
        best_M = np.zeros(len(best_masses_N) + 1)
        for v in range(len(bound_V)):
            if bound_V[v] > best_M[0]:
                replace_least(best_M, np.float64(bound_V[v]))
        least = best_M[0] * (1 - 1e-5)
    tokens_S, count = np.empty(len(bound_V), np.int64), 0
    for v in range(len(bound_V)):
        if bound_V[v] > least:
            tokens_S[count] = v
            count += 1
    return tokens_S[:count]
