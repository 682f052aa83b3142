"""Policies of adaptive tree sizes: measured step times and calibrated acceptance probabilities, and what follows.

A decoding step of n nodes takes a measured time and commits 1 + sum of p tokens in expectation, p the probability that
a node is accepted with all nodes above it. Where r tokens per unit of time are reached on average, the best size
maximises

    1 + sum of p - r * time(n)

so a node joins while its p exceeds r times what it adds to the time. The drafter's path probabilities are calibrated
against acceptance, with the acceptance of recent drafts as a second input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log
from typing import Any, Self

import numpy as np

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import check_float, check_int

MAX_NODES = 4096  # of trees that a file asks for: the cache has a row for each
LEAST_PROB, MOST_PROB = 1e-9, 1 - 1e-6  # path probabilities beyond count like these
LEAST_GAIN = 0.05  # of speed, about the error of calibrations: a drafter that is expected to gain less never drafts


@dataclass(frozen=True)
class StepCosts:
    """Measured times of a decoding step by tree size, in autoregressive steps."""

    nodes: tuple[int, ...]  # ascending; the first is 1, a step without a draft
    draft: tuple[float, ...]  # time of drafting a tree of at most so many nodes; 0 for the first
    rest: tuple[float, ...]  # time of everything else: reading the tree, verification, cache

    @classmethod
    def from_json(cls, values: Mapping[str, Sequence[float]]) -> Self:
        nodes = tuple(check_int(size, "nodes") for size in values["nodes"])
        if nodes != tuple(sorted({1, *nodes})) or nodes[-1] > MAX_NODES:
            raise ValueError(f"nodes must be ascending sizes from 1 to at most {MAX_NODES}, got {list(nodes)}")
        draft = finite_numbers(values["draft"], len(nodes), least=0)
        return cls(nodes, draft, finite_numbers(values["rest"], len(nodes), above=0))

    def least_useful_prob(self, rate: float) -> float:
        """Return the mean acceptance probability below which the nodes of no tree are worth their time.

        A bound on the mean of a tree's nodes, which searches use as one on every node: some that would pay are missed.
        """
        # Not the least slope between two sizes: that is 0 wherever noise made two measured times equal.
        sizes = zip(self.nodes[1:], self.rest[1:], strict=True)
        return rate * min((max(0.0, time - self.rest[0]) / (nodes - 1) for nodes, time in sizes), default=1.0)


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


@dataclass(frozen=True)
class AdaptivePolicy:
    """Calibration and costs of one drafter, and the decisions that follow.

    limit_tokens, limit_time: per size, the tokens and the time (without drafting) that a step is expected to have if at
    most so many nodes are drafted.
    """

    costs: StepCosts
    model: AcceptanceModel
    limit_tokens: tuple[float, ...]
    limit_time: tuple[float, ...]
    rate: float  # tokens per autoregressive step that are reached on the calibration texts: the predicted speed-up

    @classmethod
    def of(cls, costs: StepCosts, model: AcceptanceModel, trees: Sequence[TreeNodes]) -> Self:
        """Return the policy for a drafter with these calibration trees of the largest size."""
        if not trees:  # the calibration texts end at once: draft tokens count as never accepted
            return cls.uncut(costs, (1.0,) * len(costs.nodes), model)
        expected = np.stack([tree.expected_tokens(costs.nodes) for tree in trees])  # steps x sizes
        rest, draft, rate = np.asarray(costs.rest), np.asarray(costs.draft), 1.0
        tokens, times = [1.0], [rest[0]]
        for _ in range(20):  # the best rate is a fixed point: r = tokens / time of the steps that are best for r
            best = [(expected[:, : size + 1] - rate * rest[: size + 1]).argmax(1) for size in range(len(rest))]
            tokens = [float(expected[np.arange(len(trees)), chosen].mean()) for chosen in best]
            times = [float(rest[chosen].mean()) for chosen in best]
            rate = max(t / (r + c) for t, r, c in zip(tokens, times, draft, strict=True))
        return cls(costs, model, tuple(tokens), tuple(times), float(rate))

    @classmethod
    def uncut(cls, costs: StepCosts, taus: Sequence[float], model: AcceptanceModel) -> Self:
        """Return the policy for a drafter whose trees are not cut, with these tokens per step of every size."""
        rate = max(tau / (draft + rest) for tau, draft, rest in zip(taus, costs.draft, costs.rest, strict=True))
        return cls(costs, model, tuple(map(float, taus)), costs.rest, float(rate))

    def limit(self, recent: float) -> int:
        """Return the index of the size expected to be fastest before a draft; 0, none, for gains below LEAST_GAIN."""
        # Not compared with the rate of earlier steps, which would skip drafts that gain less than usual.
        usual = self.speeds(1.0)
        return first_greatest(self.speeds(exp(recent))) if max(usual) >= (1 + LEAST_GAIN) * usual[0] else 0

    def speeds(self, gain: float) -> list[float]:
        """Return the expected tokens per time of every size, where `gain` times as many draft tokens are accepted."""
        steps = zip(self.limit_tokens, self.limit_time, self.costs.draft, strict=True)
        return [(1 + (tokens - 1) * gain) / (rest + draft) for tokens, rest, draft in steps]

    def least_path_prob(self, recent: float, rate: float, depth: int) -> float:
        """Return the path probability under the draft below which no node up to this depth is worth its time."""
        prob, nodes = self.costs.least_useful_prob(rate), self.costs.nodes[-1]
        return self.model.least_path_prob(prob, recent, depth, nodes)

    def size(self, nodes: TreeNodes, rate: float, limit: int) -> int:
        """Return the index of the size, at most `limit`, to keep of a drafted tree."""
        steps = zip(nodes.expected_tokens(self.costs.nodes), self.costs.rest, strict=True)
        return first_greatest([tokens - rate * time for tokens, time in steps][: limit + 1])

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "costs": vars(self.costs), "model": self.model.weights}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the policy of a file; raise KeyError, TypeError or ValueError where it is damaged."""
        costs = StepCosts.from_json(values["costs"])
        model = AcceptanceModel(finite_numbers(values["model"], len(AcceptanceModel().weights)))
        tokens = finite_numbers(values["limit_tokens"], len(costs.nodes), least=1)
        time = finite_numbers(values["limit_time"], len(costs.nodes), above=0)
        return cls(costs, model, tokens, time, check_float(values["rate"], "rate", above=0))


def first_greatest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def finite_numbers(values: Sequence[Any], count: int, **bounds: Any) -> tuple[float, ...]:
    if len(values) != count:
        raise ValueError(f"{count} numbers are needed, got {len(values)}")
    return tuple(check_float(value, "each number", **bounds) for value in values)
