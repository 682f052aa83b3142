"""Calibration of draft probabilities against acceptance: how likely the base accepts each node of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log
from typing import Self

import numpy as np

from ctcdraft.decoding.tree import TokenTree

LEAST_PROB, MOST_PROB = 1e-9, 1 - 1e-6  # path probabilities beyond count like these


@dataclass(frozen=True)
class AcceptanceModel:
    """The probability that a node is accepted with all nodes above it: a logistic regression.

    Inputs: 1, logit q, log d, logit q * log d, max(0, logit q), log r, recent, where q is the path probability under
    the draft, d the depth, r the node's rank by q in its tree, and `recent` the log ratio of accepted to expected draft
    tokens of the latest drafts, 0 at the beginning. Probable nodes have a slope of their own, for prompt lookup in a
    text that repeats itself; the rank matters where q is not exact, as EAGLE's.
    """

    weights: tuple[float, ...] = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)

    @staticmethod
    def inputs(path_probs_N: np.ndarray, depths_N: np.ndarray, ranks_N: np.ndarray, recent: float) -> np.ndarray:
        """Return the inputs_NX of nodes below the root."""
        probs_N = np.clip(path_probs_N, LEAST_PROB, MOST_PROB)
        logits_N, log_depths_N = np.log(probs_N / (1 - probs_N)), np.log(depths_N)
        more_N = logits_N * log_depths_N, np.maximum(logits_N, 0), np.log(ranks_N), np.full_like(logits_N, recent)
        return np.stack([np.ones_like(logits_N), logits_N, log_depths_N, *more_N], axis=1)

    def logits(self, tree: TokenTree) -> list[float]:
        """Return the logits of the nodes below the root, whatever was recently accepted; `recent` shifts all alike."""
        probs_N, depths_N = np.asarray(draft_path_probs(tree)), np.asarray(tree.host_depths[1:])
        logits = [inf]
        accepted_N = self.inputs(probs_N, depths_N, path_prob_ranks(probs_N), 0.0) @ np.asarray(self.weights)
        for parent, accepted in zip(tree.host_parents[1:], accepted_N.tolist(), strict=True):
            # Not above the parent's, whatever the regression yields. Parents come before their children.
            logits.append(min(logits[parent], accepted))
        return logits[1:]

    def least_path_prob(self, prob: float, recent: float, depth: int, nodes: int) -> float:
        """Return the path probability below which no node is accepted with probability `prob`.

        Of nodes up to this depth, in trees of so many nodes.
        """
        one, logit, log_depth, product, probable, log_rank, recently = self.weights
        if not 0 < prob < 1:
            return min(max(prob, 0.0), 1.0)
        bounds = []
        highest = max(0.0, log_rank * log(max(nodes - 1, 1)))  # of what a rank adds
        for x in (0.0, log(max(depth, 1))):  # the bound is monotone in log d: its least value is at an end
            if (slope := logit + product * x) <= 0:
                return 0.0  # less probable nodes would be accepted more often: nothing may be left out
            needed = log(prob / (1 - prob)) - one - log_depth * x - highest - recently * recent
            steep = slope if needed <= 0 else slope + probable  # path probabilities above 1/2
            bounds.append(needed / steep if steep > 0 else inf)
        return logistic(min(bounds))

    @classmethod
    def fit(cls, inputs_RX: np.ndarray, accepted_R: np.ndarray, rounds: int = 30) -> Self:
        """Return the regression of accepted_R (0 or 1) by Newton's method, with a weak pull towards the draft's own q.

        The pull decides where the data cannot: a drafter without probabilities, or one that never varies.
        """
        prior_X = np.asarray(cls().weights)

        def loss(weights_X: np.ndarray) -> float:
            logits_R = inputs_RX @ weights_X
            pull = 0.5 * np.square(weights_X - prior_X).sum()
            return float((np.logaddexp(0, logits_R) - accepted_R * logits_R).sum() + pull)

        weights_X, least = prior_X, loss(prior_X)
        for _ in range(rounds):
            probs_R = 1 / (1 + np.exp(-np.clip(inputs_RX @ weights_X, -500, 500)))
            gradient_X = inputs_RX.T @ (probs_R - accepted_R) + (weights_X - prior_X)
            curvature_XX = (inputs_RX * (probs_R * (1 - probs_R))[:, None]).T @ inputs_RX + np.eye(len(prior_X))
            step_X, size, best = np.linalg.solve(curvature_XX, gradient_X), 1.0, inf
            # Far from the minimum a whole step may go too far.
            while size > 1e-3 and (best := loss(weights_X - size * step_X)) > least:
                size /= 2
            if best >= least:
                break
            weights_X, least = weights_X - size * step_X, best
        return cls(tuple(float(weight) for weight in weights_X))


@dataclass(frozen=True)
class TreeNodes:
    """Draft nodes of one tree on the host, without the root, in an order in which any first n are a tree."""

    numbers: list[int]  # in the tree
    probs: list[float]  # acceptance probabilities, descending
    usual_probs: list[float]  # the same without regard to what was recently accepted

    @classmethod
    def of(cls, tree: TokenTree, model: AcceptanceModel, recent: float) -> Self:
        usual = model.logits(tree)
        shift = recent * model.weights[-1]
        probs = [logistic(logit + shift) for logit in usual]
        # A parent is no less probable than its child, and comes first: sorting keeps the order of equals.
        order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)
        return cls([n + 1 for n in order], [probs[n] for n in order], [logistic(usual[n]) for n in order])

    def expected_tokens(self, nodes: Sequence[int]) -> list[float]:
        """Return the expected tokens of a step that keeps the first n - 1 of these, for every n in `nodes`."""
        sums = list(accumulate(self.probs, initial=1.0))
        return [sums[min(n, len(sums)) - 1] for n in nodes]


def path_prob_ranks(path_probs_N: np.ndarray) -> np.ndarray:
    """Return the ranks by path probability, from 1, of equals the first one first:   .5 .2 .5   ->   1 3 2"""
    ranks_N = np.empty(len(path_probs_N), dtype=np.int64)
    ranks_N[np.argsort(-path_probs_N, kind="stable")] = np.arange(1, len(path_probs_N) + 1)
    return ranks_N


def logistic(logit: float) -> float:
    return 1 / (1 + exp(min(-logit, 700.0)))


def draft_path_probs(tree: TokenTree) -> list[float]:
    """Return the draft's path probabilities without the root; (1/2)^depth for a draft that has none."""
    if tree.path_probs_N is None:
        return [0.5**depth for depth in tree.host_depths[1:]]
    return tree.path_probs_N.tolist()[1:]
