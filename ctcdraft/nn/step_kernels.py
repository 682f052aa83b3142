"""The decoding step of small draft heads, compiled by numba: the arithmetic of `SlotBlock.step` and `BlankHead`.

The products of ten rows by small matrices are faster here than in torch, whose calls cost more than the arithmetic: on
one thread of an AMD EPYC, after a forward pass of the base, 9 rows 160 -> 480 take 52 us against 99, and 6 rows
160 -> 4096 take 227 us against 594. numba keeps the machine code on disk: only the first use in an installation
compiles. Weights [inputs, outputs] are the transposed, column-major ones of torch.
"""

from __future__ import annotations

from math import sqrt, tanh
from typing import NamedTuple

import numpy as np

from ctcdraft.array_kernels import compiled, exponentiate, softmax, step_gru


class BlockWeights(NamedTuple):
    """Of a Llama block without biases and with SiLU. The norms of heads are empty where there are none."""

    attention_norm_D: np.ndarray
    query_DQ: np.ndarray
    key_DG: np.ndarray
    value_DG: np.ndarray
    out_QD: np.ndarray
    mlp_norm_D: np.ndarray
    gate_DI: np.ndarray
    up_DI: np.ndarray
    down_ID: np.ndarray
    query_norm_E: np.ndarray
    key_norm_E: np.ndarray


@compiled
def add_product(x_NI, weight_IO, sums_NO):
    """Add x @ weight to the sums."""
    inputs, outputs = weight_IO.shape
    paired = inputs - inputs % 4
    for i in range(0, paired, 4):  # four at once: each sum is then loaded and stored a quarter as often
        w0_O, w1_O, w2_O, w3_O = weight_IO[i], weight_IO[i + 1], weight_IO[i + 2], weight_IO[i + 3]
        for row in range(len(x_NI)):
            x0, x1, x2, x3 = x_NI[row, i], x_NI[row, i + 1], x_NI[row, i + 2], x_NI[row, i + 3]
            sums_O = sums_NO[row]
            for o in range(outputs):
                sums_O[o] += x0 * w0_O[o] + x1 * w1_O[o] + x2 * w2_O[o] + x3 * w3_O[o]
    for i in range(paired, inputs):
        for row in range(len(x_NI)):
            for o in range(outputs):
                sums_NO[row, o] += x_NI[row, i] * weight_IO[i, o]


@compiled
def product(x_NI, weight_IO):
    sums_NO = np.zeros((len(x_NI), weight_IO.shape[1]), np.float32)
    add_product(x_NI, weight_IO, sums_NO)
    return sums_NO


@compiled
def rms_norm(x_ND, weight_D, epsilon):
    normed_ND = np.empty_like(x_ND)
    for row in range(len(x_ND)):
        squares = np.float32(0)
        for d in range(len(weight_D)):
            squares += x_ND[row, d] * x_ND[row, d]
        scale = np.float32(1 / sqrt(squares / len(weight_D) + epsilon))
        for d in range(len(weight_D)):
            normed_ND[row, d] = x_ND[row, d] * scale * weight_D[d]
    return normed_ND


@compiled
def fuse_layers(states_KE, norms, mix_ID, epsilon):
    """Do `AuxStateFusion`. norms: the weights of the auxiliary layers' norms."""
    width = mix_ID.shape[1]
    normed_KI = np.empty((len(states_KE), len(mix_ID)), np.float32)
    for layer in range(len(norms)):
        first = layer * width
        layer_KD = states_KE[:, first + width : first + 2 * width]
        normed_KI[:, first : first + width] = rms_norm(layer_KD, norms[layer], epsilon)
    return states_KE[:, :width] + product(normed_KI, mix_ID)


@compiled
def start_gru(anchor_1D, first_DR, first_bias_R, inputs_G, recurrent_GR, bias_G):
    """Do `GRUCorrection.start`, given the root's projected inputs."""
    memory_1R = product(anchor_1D, first_DR)
    for r in range(len(first_bias_R)):
        memory_1R[0, r] = tanh(memory_1R[0, r] + first_bias_R[r])
    next_1R = np.empty_like(memory_1R)
    step_gru(memory_1R[0], inputs_G, recurrent_GR, bias_G, next_1R[0])
    return next_1R


@compiled
def rotate(x_E, cos_E, sin_E, rotated_E):
    """Do `apply_rotary` on one head."""
    half = len(x_E) // 2
    for e in range(half):
        rotated_E[e] = x_E[e] * cos_E[e] + x_E[e + half] * sin_E[e]
        rotated_E[e + half] = x_E[e + half] * cos_E[e + half] + x_E[e] * sin_E[e + half]


@compiled
def start_slots(states_KE, project_DD, root_RD, root_norm_D, root_project_DD, slots_TD, epsilon):
    """Return projected text_KD and the slots before the first block. root_RD: R is 0 for a body without the root."""
    text_KD, slots_TD = product(states_KE[:, : len(project_DD)], project_DD), slots_TD.copy()
    root_1D = text_KD[-1:].copy()
    if len(root_RD):
        add_product(rms_norm(root_RD, root_norm_D, epsilon), root_project_DD, root_1D)
    for slot in range(len(slots_TD)):
        slots_TD[slot] += root_1D[0]
    return text_KD, slots_TD


@compiled
def start_block(states_KE, fc_ID, text_norm_D, root_1D, mask_D, rows, epsilon):
    """Return the text_KD and the first rows_RD of `DFlashBody`."""
    text_KD = rms_norm(product(states_KE[:, states_KE.shape[1] - len(fc_ID) :], fc_ID), text_norm_D, epsilon)
    rows_RD = np.empty((rows, len(mask_D)), np.float32)
    rows_RD[0] = root_1D[0]
    rows_RD[1:] = mask_D
    return text_KD, rows_RD


@compiled
def start_pairs(states_KE, fc_ID, mask_D, mask_state_1I, masks):
    """Return the pairs of `PEagleBody`, of the new text and of the masks."""
    inputs, width = fc_ID.shape
    text, first = len(states_KE), states_KE.shape[1] - width
    pairs_NE = np.empty((text + masks, 2 * width), np.float32)
    pairs_NE[:text, :width] = states_KE[:, first:]
    pairs_NE[:text, width:] = product(states_KE[:, first - inputs : first], fc_ID)
    pairs_NE[text:, :width] = mask_D
    pairs_NE[text:, width:] = product(mask_state_1I, fc_ID)[0]
    return pairs_NE


@compiled
def norm_inputs(x_NE, weight_E, width, epsilon):
    """Normalise each of the vectors of this width that are side by side."""
    normed_NE = np.empty_like(x_NE)
    for first in range(0, x_NE.shape[1], width):
        one = slice(first, first + width)
        normed_NE[:, one] = rms_norm(x_NE[:, one], weight_E[one], epsilon)
    return normed_NE


@compiled
def norm_head(x_E, weight_E, epsilon):
    """Normalise a head in place, where it has a norm."""
    if len(weight_E):
        squares = np.float32(0)
        for e in range(len(x_E)):
            squares += x_E[e] * x_E[e]
        scale = np.float32(1 / sqrt(squares / len(x_E) + epsilon))
        for e in range(len(x_E)):
            x_E[e] *= scale * weight_E[e]


@compiled
def step_block(text_KD, slots_TD, weights, rotation, cache, start, causal, norm_text, epsilon):
    """Return the slots after `SlotBlock.step`. cache: keys and values [G, rows, E], written from row `start` on."""
    text, slots, width = len(text_KD), len(slots_TD), len(weights.mlp_norm_D)
    normed_TD = norm_inputs(slots_TD, weights.attention_norm_D, width, epsilon)
    if norm_text:
        text_KD = norm_inputs(text_KD, weights.attention_norm_D, width, epsilon)
    rows_ND = np.concatenate((text_KD, normed_TD))
    key_NG, value_NG = product(rows_ND, weights.key_DG), product(rows_ND, weights.value_DG)
    groups, head_width = len(cache[0]), cache[0].shape[2]
    for row in range(text + slots):
        for group in range(groups):
            own = slice(group * head_width, (group + 1) * head_width)
            cos_E, sin_E = rotation[0][start + row], rotation[1][start + row]
            norm_head(key_NG[row, own], weights.key_norm_E, epsilon)
            rotate(key_NG[row, own], cos_E, sin_E, cache[0][group, start + row])
            cache[1][group, start + row] = value_NG[row, own]
    query_TQ = product(rows_ND[text:], weights.query_DQ)
    mixed_TQ = np.zeros_like(query_TQ)
    queries_per_group = query_TQ.shape[1] // head_width // groups
    for slot in range(slots):
        row = start + text + slot
        seen = row + 1 if causal else start + text + slots
        for head in range(query_TQ.shape[1] // head_width):
            own, group = slice(head * head_width, (head + 1) * head_width), head // queries_per_group
            query_E = np.empty(head_width, np.float32)
            norm_head(query_TQ[slot, own], weights.query_norm_E, epsilon)
            rotate(query_TQ[slot, own], rotation[0][row], rotation[1][row], query_E)
            attend(query_E, cache[0][group, :seen], cache[1][group, :seen], mixed_TQ[slot, own])
    slots_TD = slots_TD[:, slots_TD.shape[1] - width :].copy()
    add_product(mixed_TQ, weights.out_QD, slots_TD)
    normed_TD = rms_norm(slots_TD, weights.mlp_norm_D, epsilon)
    gate_TI, up_TI = product(normed_TD, weights.gate_DI), product(normed_TD, weights.up_DI)
    for slot in range(slots):
        gate_I, up_I, exp_I = gate_TI[slot], up_TI[slot], -gate_TI[slot]
        exponentiate(exp_I)
        for i in range(len(gate_I)):
            gate_I[i] = gate_I[i] / (np.float32(1) + exp_I[i]) * up_I[i]
    add_product(gate_TI, weights.down_ID, slots_TD)
    return slots_TD


@compiled
def attend(query_E, keys_ME, values_ME, mixed_E):
    """Add softmax(keys @ query) @ values to mixed_E."""
    scale = np.float32(1 / sqrt(len(query_E)))
    weight_M = np.empty(len(keys_ME), np.float32)
    for m in range(len(keys_ME)):
        score = np.float32(0)
        for e in range(len(query_E)):
            score += query_E[e] * keys_ME[m, e]
        weight_M[m] = score * scale
    softmax(weight_M)
    for m in range(len(keys_ME)):
        for e in range(len(query_E)):
            mixed_E[e] += weight_M[m] * values_ME[m, e]


@compiled
def class_logits(states_TD, lm_head_VD, blank_D, blank_bias):
    """Return logits_TC of tokens and blank."""
    frames, vocabulary = len(states_TD), len(lm_head_VD)
    logits_TC = np.empty((frames, vocabulary + 1), np.float32)
    for token in range(vocabulary + 1):
        row_D = lm_head_VD[token] if token < vocabulary else blank_D
        threes = frames - frames % 3
        for frame in range(0, threes, 3):  # three at once: the row is then read a third as often
            first, second, third = np.float32(0), np.float32(0), np.float32(0)
            for d in range(len(row_D)):
                first += states_TD[frame, d] * row_D[d]
                second += states_TD[frame + 1, d] * row_D[d]
                third += states_TD[frame + 2, d] * row_D[d]
            logits_TC[frame, token], logits_TC[frame + 1, token], logits_TC[frame + 2, token] = first, second, third
        for frame in range(threes, frames):
            last = np.float32(0)
            for d in range(len(row_D)):
                last += states_TD[frame, d] * row_D[d]
            logits_TC[frame, token] = last
    logits_TC[:, vocabulary] += blank_bias
    return logits_TC
