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
from dataclasses import asdict, dataclass
from functools import cached_property
from math import exp
from typing import Any, Self

import numpy as np

from ctcdraft.drafters.acceptance import AcceptanceModel, TreeNodes
from ctcdraft.errors import InputError, check_float, check_int, first_line

MAX_NODES = 4096  # of trees that a file asks for: the cache has a row for each
MAX_WEIGHT = 1e3  # of an acceptance model: beyond, probabilities are 0 or 1, and far beyond not a number
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
        return rate * self.least_time_per_node

    @cached_property
    def least_time_per_node(self) -> float:
        # Not the least slope between two sizes: that is 0 wherever noise made two measured times equal.
        sizes = zip(self.nodes[1:], self.rest[1:], strict=True)
        return min((max(0.0, time - self.rest[0]) / (nodes - 1) for nodes, time in sizes), default=1.0)


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
        return first_greatest(self.speeds(exp(recent))) if self.pays else 0

    def speeds(self, gain: float) -> list[float]:
        """Return the expected tokens per time of every size, where `gain` times as many draft tokens are accepted."""
        return [(1 + accepted * gain) / time for accepted, time in self.steps]

    @cached_property
    def steps(self) -> list[tuple[float, float]]:
        """Of every size the draft tokens that are expected to be accepted, and the time."""
        steps = zip(self.limit_tokens, self.limit_time, self.costs.draft, strict=True)
        return [(tokens - 1, rest + draft) for tokens, rest, draft in steps]

    @cached_property
    def pays(self) -> bool:
        """Whether the drafter is ever worth its time."""
        usual = self.speeds(1.0)
        return max(usual) >= (1 + LEAST_GAIN) * usual[0]

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The weights of the acceptance model, the sizes and their times without drafting."""
        return np.asarray(self.model.weights), np.asarray(self.costs.nodes), np.asarray(self.costs.rest)

    def least_path_prob(self, recent: float, rate: float, depth: int) -> float:
        """Return the path probability under the draft below which no node up to this depth is worth its time."""
        prob, nodes = self.costs.least_useful_prob(rate), self.costs.nodes[-1]
        return self.model.least_path_prob(prob, recent, depth, nodes)

    def size(self, nodes: TreeNodes, rate: float, limit: int) -> int:
        """Return the index of the size, at most `limit`, to keep of a drafted tree."""
        steps = zip(nodes.expected_tokens(self.costs.nodes), self.costs.rest, strict=True)
        return first_greatest([tokens - rate * time for tokens, time in steps][: limit + 1])

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"model": self.model.weights}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the policy of a file; raise InputError where it is damaged."""
        try:
            costs = StepCosts.from_json(values["costs"])
            model = AcceptanceModel(
                finite_numbers(values["model"], len(AcceptanceModel().weights), least=-MAX_WEIGHT, most=MAX_WEIGHT)
            )
            tokens = finite_numbers(values["limit_tokens"], len(costs.nodes), least=1)
            time = finite_numbers(values["limit_time"], len(costs.nodes), above=0)
            return cls(costs, model, tokens, time, check_float(values["rate"], "rate", above=0))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the policy of adaptive trees is damaged ({first_line(error)}); remove it") from error


def first_greatest(values: Sequence[float]) -> int:
    return values.index(max(values))


def finite_numbers(values: Sequence[Any], count: int, **bounds: Any) -> tuple[float, ...]:
    if len(values) != count:
        raise ValueError(f"{count} numbers are needed, got {len(values)}")
    return tuple(check_float(value, "each number", **bounds) for value in values)
