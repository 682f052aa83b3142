"""Attention of draft slots to a paged KV cache, compiled by numba: no copy of the text, no padding to the longest."""

from __future__ import annotations

import numpy as np

from ctcdraft.array_kernels import compiled, softmax

ROWS = 4  # queries that one pass over a key serves: it is then loaded a quarter as often


@compiled
def attend_pages(query_QGRE, own_QGTC, causal, cache_XC, table_QM, lengths_Q, places):
    """Return mixed_QGRE: see `PagedText.attend`.

    Args:
        own_QGTC, cache_XC: keys and values side by side, C = 2 E.
        places: rows of the cache from block to block, from slot to slot and from head to head, and slots of a block.
    """
    requests, groups, queries, width = query_QGRE.shape
    slots, (block_rows, slot_rows, head_rows, block_slots) = own_QGTC.shape[2], places
    padded = (queries + ROWS - 1) // ROWS * ROWS
    query_RE = np.zeros((padded, width), np.float32)
    mixed_QGRE = np.zeros_like(query_QGRE)
    for request in range(requests):
        length = lengths_Q[request]
        rows_L = np.empty(length, np.int64)
        weight_RM = np.empty((padded, length + slots), np.float32)
        for group in range(groups):
            for place in range(length):
                block = table_QM[request, place // block_slots]
                rows_L[place] = block * block_rows + place % block_slots * slot_rows + group * head_rows
            query_RE[:queries] = query_QGRE[request, group]
            own_TC = own_QGTC[request, group]
            score(query_RE, cache_XC, rows_L, weight_RM, 0)
            score(query_RE, own_TC, np.arange(slots), weight_RM, length)
            for row in range(queries):
                seen = length + (row % slots + 1 if causal else slots)
                weight_RM[row, seen:] = 0
                softmax(weight_RM[row, :seen])
            mixed_RE = mixed_QGRE[request, group]
            mix(weight_RM, cache_XC, rows_L, mixed_RE, 0)
            mix(weight_RM, own_TC, np.arange(slots), mixed_RE, length)
    return mixed_QGRE


@compiled
def score(query_RE, keys_XC, rows_L, weight_RM, first):
    """Write the products of all queries with the keys in these rows to columns from `first` on."""
    width = query_RE.shape[1]
    for place in range(len(rows_L)):
        key_E, column = keys_XC[rows_L[place]], first + place
        for row in range(0, len(query_RE), ROWS):
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for e in range(width):
                s0 += query_RE[row, e] * key_E[e]
                s1 += query_RE[row + 1, e] * key_E[e]
                s2 += query_RE[row + 2, e] * key_E[e]
                s3 += query_RE[row + 3, e] * key_E[e]
            weight_RM[row, column], weight_RM[row + 1, column] = s0, s1
            weight_RM[row + 2, column], weight_RM[row + 3, column] = s2, s3


@compiled
def mix(weight_RM, values_XC, rows_L, mixed_RE, first):
    """Add the values in these rows, times their weights in the columns from `first` on."""
    width, count = mixed_RE.shape[1], len(rows_L)
    paired = count - count % 4
    for place in range(0, paired, 4):  # four at once: each sum is then loaded and stored a quarter as often
        column = first + place
        v0_E, v1_E = values_XC[rows_L[place], width:], values_XC[rows_L[place + 1], width:]
        v2_E, v3_E = values_XC[rows_L[place + 2], width:], values_XC[rows_L[place + 3], width:]
        for row in range(len(mixed_RE)):
            w0, w1 = weight_RM[row, column], weight_RM[row, column + 1]
            w2, w3 = weight_RM[row, column + 2], weight_RM[row, column + 3]
            for e in range(width):
                mixed_RE[row, e] += w0 * v0_E[e] + w1 * v1_E[e] + w2 * v2_E[e] + w3 * v3_E[e]
    for place in range(paired, count):
        value_E = values_XC[rows_L[place], width:]
        for row in range(len(mixed_RE)):
            for e in range(width):
                mixed_RE[row, e] += weight_RM[row, first + place] * value_E[e]
