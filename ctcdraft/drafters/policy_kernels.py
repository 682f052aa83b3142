"""The choice of an adaptive tree's nodes, compiled by numba; `acceptance` and `tree_policy` have the slow twin."""

from __future__ import annotations

from math import exp, log

import numpy as np

from ctcdraft.array_kernels import exactly


@exactly
def acceptance_logits(probs_N, parents_N, depths_N, weights_X, least, most):
    """Return the logits of the nodes, as `AcceptanceModel.logits`, and write their depths. Node 0 is the root."""
    logits_N, ranks_N = np.empty(len(probs_N)), np.empty(len(probs_N), np.int64)
    logits_N[0], depths_N[0] = np.inf, 0
    order_N = np.argsort(-probs_N[1:], kind="mergesort")
    for rank in range(len(order_N)):
        ranks_N[order_N[rank] + 1] = rank + 1
    for node in range(1, len(probs_N)):
        parent = parents_N[node]
        depths_N[node] = depths_N[parent] + 1
        prob = probs_N[node] if probs_N[node] > least else least  # not a number counts as improbable
        log_depth, prob = log(depths_N[node]), min(prob, most)
        logit = log(prob / (1 - prob))
        accepted = weights_X[0] + weights_X[2] * log_depth + (weights_X[1] + weights_X[3] * log_depth) * logit
        accepted += weights_X[4] * max(0.0, logit) + weights_X[5] * log(ranks_N[node])
        logits_N[node] = min(logits_N[parent], accepted)
    return logits_N


@exactly
def logistic(logit):
    return 1 / (1 + exp(min(-logit, 700.0)))


@exactly
def best_nodes(probs_N, parents_N, weights_X, sizes_S, rest_S, recent, rate, limit, least, most):
    """Return the index of the best size, at most `limit`, its nodes_M in ascending order with their parents_M, the
    height of that tree, and the draft tokens that it is expected to have accepted, whatever was recently accepted."""
    nodes = len(probs_N)
    depths_N = np.empty(nodes, np.int64)
    logits_N = acceptance_logits(probs_N, parents_N, depths_N, weights_X, least, most)
    shift = recent * weights_X[6]
    negative_N = np.empty(nodes)
    for node in range(nodes):
        negative_N[node] = -logistic(logits_N[node] + shift)
    negative_N[0] = -2.0  # the root first
    order_N = np.argsort(negative_N, kind="mergesort")  # stable: parents come before their children
    best, best_value, tokens, taken = 0, -np.inf, 1.0, 1
    for size in range(limit + 1):
        while taken < min(sizes_S[size], nodes):
            tokens -= negative_N[order_N[taken]]
            taken += 1
        if tokens - rate * rest_S[size] > best_value:
            best, best_value = size, tokens - rate * rest_S[size]
    nodes_M = np.sort(order_N[: min(sizes_S[best], nodes)])
    place_N, parents_M = np.empty(nodes, np.int64), np.empty(len(nodes_M), np.int64)
    parents_M[0], place_N[0], height, expected = -1, 0, 0, 0.0
    for place in range(1, len(nodes_M)):
        node = nodes_M[place]
        place_N[node], parents_M[place] = place, place_N[parents_N[node]]
        height = max(height, depths_N[node])
        expected += logistic(logits_N[node])
    return best, nodes_M, parents_M, height, expected
