"""Loops that several modules of compiled loops share, compiled by numba."""

from __future__ import annotations

from math import exp, log, tanh

import numpy as np
from numba import njit

# Sums in any order and fused multiply-adds, but infinities and NaNs as they are.
compiled = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
exactly = njit(cache=True, nogil=True, error_model="numpy")
LEAST = np.float32(-80)  # its exponential is no denormal number


@exactly
def exponentiate(x_V):
    """Replace x by exp x, x clamped to [-80, 80]; vectorised, with an error of one or two units in the last place."""
    bits_V = np.empty(len(x_V), np.int32)
    for v in range(len(x_V)):
        x = min(max(x_V[v], LEAST), np.float32(80))
        # x = power log 2 + r: log 2 in two parts, a Taylor polynomial in r, and the power as exponent bits.
        power = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
        r = (x - power * np.float32(0.693359375)) + power * np.float32(2.12194440e-4)
        y = np.float32(1 / 5040)
        y = y * r + np.float32(1 / 720)
        y = y * r + np.float32(1 / 120)
        y = y * r + np.float32(1 / 24)
        y = y * r + np.float32(1 / 6)
        y = y * r + np.float32(1 / 2)
        x_V[v] = (y * r) * r + r + np.float32(1)
        bits_V[v] = (np.int32(power) + np.int32(127)) << np.int32(23)
    scale_V = bits_V.view(np.float32)
    for v in range(len(x_V)):
        x_V[v] *= scale_V[v]


@compiled
def softmax(x_M):
    """Replace x by its softmax."""
    most, total = np.float32(-np.inf), np.float32(0)
    for m in range(len(x_M)):
        most = max(most, x_M[m])
    for m in range(len(x_M)):
        x_M[m] -= most
    exponentiate(x_M)
    for m in range(len(x_M)):
        total += x_M[m]
    share = np.float32(1) / total
    for m in range(len(x_M)):
        x_M[m] *= share


@compiled
def log_softmax(logits_TC):
    """Return log_probs_TC, and as probabilities probs_TV of all classes but the last, and blank_T of the last."""
    frames, last = len(logits_TC), logits_TC.shape[1] - 1
    log_probs_TC, blank_T = np.empty_like(logits_TC), np.empty(frames, np.float32)
    probs_TV = np.empty((frames, last), np.float32)
    for frame in range(frames):
        logits_C, log_probs_C, probs_V = logits_TC[frame], log_probs_TC[frame], probs_TV[frame]
        most = logits_C[last]
        for v in range(last):
            most = max(most, logits_C[v])
        for v in range(last):
            probs_V[v] = logits_C[v] - most
        exponentiate(probs_V)
        blank = np.float32(exp(logits_C[last] - most))
        total = blank
        for v in range(last):
            total += probs_V[v]
        share, normaliser = np.float32(1) / total, most + np.float32(log(total))
        for v in range(last):
            # Not the clamped value: a token that is impossible stays so.
            probs_V[v] *= share if logits_C[v] - most > LEAST else np.float32(0)
        for v in range(last + 1):
            log_probs_C[v] = logits_C[v] - normaliser
        blank_T[frame] = blank * share
    return log_probs_TC, probs_TV, blank_T


@compiled
def step_gru(memory_R, inputs_G, recurrent_GR, bias_G, next_R):
    """Write a GRU cell's next memory, given its projected inputs: see `GRUCorrection.step`."""
    rank = len(memory_R)
    recurrent_G = np.empty(len(inputs_G), np.float32)
    for g in range(len(inputs_G)):
        sum_g = np.float32(0)
        for r in range(rank):
            sum_g += recurrent_GR[g, r] * memory_R[r]
        recurrent_G[g] = sum_g + bias_G[g]
    for r in range(rank):
        reset = 1 / (1 + exp(-(inputs_G[r] + recurrent_G[r])))
        update = 1 / (1 + exp(-(inputs_G[rank + r] + recurrent_G[rank + r])))
        new = tanh(inputs_G[2 * rank + r] + reset * recurrent_G[2 * rank + r])
        next_R[r] = new + update * (memory_R[r] - new)
