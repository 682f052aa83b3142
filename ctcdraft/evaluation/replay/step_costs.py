"""Times of a decoding step by tree size: the profiled loop, sizes in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.controls import RandomDrafter
from ctcdraft.drafters.tree_policy import AdaptivePolicy, StepCosts
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.profiling import PhaseTimes, profile_answer
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.progress import Progress

EXPECTED_RATE = 1.5  # tokens per autoregressive step, for the least probable node that a timed search looks for


@dataclass(frozen=True)
class FixedSize(AdaptivePolicy):
    """The policy that keeps one size, to time an adaptive drafter: what its choice takes is a part of drafting."""

    index: int = 0
    least: float = 0.0  # path probability at which searches stop, as they do where sizes are chosen

    @classmethod
    def at(cls, sizes: tuple[int, ...], index: int, least: float) -> FixedSize:
        ones = (1.0,) * len(sizes)
        return cls(StepCosts(sizes, (0.0,) * len(sizes), ones), AcceptanceModel(), ones, ones, 1.0, index, least)

    def limit(self, recent: float) -> int:
        return self.index

    def least_path_prob(self, recent: float, rate: float, depth: int) -> float:
        return self.least


class FilledTrees:
    """A drafter whose trees are filled up to exactly `nodes` nodes with children of the root.

    On a CPU, where trees are cut to exact sizes. So forward passes of the base are timed between drafts of this
    drafter, whose weights displace those of the base from the processor's caches.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        tree, memory = self.drafter.draft(context, memory, rng)
        missing = context.nodes - len(tree)
        if missing <= 0 or context.depth < 1 or tree.draft_probs_NV is not None or not tree.tokens_N.is_cpu:
            return tree, memory
        tokens_N, parents_N = (F.pad(column_N, (0, missing)) for column_N in (tree.tokens_N, tree.parents_N))
        return TokenTree(tokens_N, parents_N, max(tree.height, 1)), memory


def measure_step_costs(timed: TimedSteps, sizes: Sequence[int], names: Sequence[str]) -> dict[str, StepCosts]:
    """Return the costs of every drafter's steps. sizes: of adaptive trees, besides 1."""
    sizes, contestants = (1, *sizes), timed.setup.contestants
    full, baseline = RandomDrafter(timed.setup.base, 2 * sizes[-1]), contestants[AUTOREGRESSIVE]
    # Searches stop at a probability that depends on these times: measured once, with random trees.
    _, rest = timed.measure([(baseline, 1), *((full, nodes) for nodes in sizes[1:])])
    least = StepCosts(sizes, (0.0,) * len(sizes), rest_times(rest)).least_useful_prob(EXPECTED_RATE)
    costs = {}
    for name in names:
        fixed = [(FixedSize.at(sizes, index, least), nodes) for index, nodes in enumerate(sizes)][1:]
        filled = [(FilledTrees(AdaptiveDrafter(contestants[name], one)), nodes) for one, nodes in fixed]
        draft, rest = timed.measure([(baseline, 1), *filled])
        costs[name] = StepCosts(sizes, (0.0, *isotonic(draft[1:])), rest_times(rest))
    return costs


def rest_times(rest: Sequence[float]) -> tuple[float, ...]:
    """Return non-decreasing times of which none is below that of autoregression, 1: less is noise."""
    return 1.0, *(max(1.0, time) for time in isotonic(rest[1:]))


@dataclass(frozen=True)
class TimedSteps:
    """The decoding steps behind some texts, to be timed with several drafters."""

    setup: EvaluationSetup
    texts: Sequence[Tensor]
    steps: int  # of each
    repeats: int  # after one that warms up
    progress: Progress

    def measure(self, arms: Sequence[tuple[Any, int]]) -> tuple[list[float], list[float]]:
        """Return the times of drafting and of everything else, in steps of the first arm. arms: drafter, tree size.

        Every run is divided by the first arm's run of the same repeat, because the speed of a shared machine changes
        from second to second; the results are medians over the repeats, averaged over the texts.
        """
        draft, rest = [0.0] * len(arms), [0.0] * len(arms)
        for prompt_L in self.texts:
            drafts: list[list[float]] = [[] for _ in arms]
            rests: list[list[float]] = [[] for _ in arms]
            for repeat in range(self.repeats + 1):
                unit = 0.0
                for arm, (drafter, nodes) in enumerate(arms):
                    times = self.profile(drafter, prompt_L, nodes)
                    self.progress.advance()
                    unit = unit or times.seconds_per_pass
                    if repeat:  # the first one only warms up
                        drafting = (times.seconds["draft"] + times.seconds["tree"]) / times.passes
                        drafts[arm].append(drafting / unit)
                        rests[arm].append((times.seconds_per_pass - drafting) / unit)
            draft = [total + median(each) / len(self.texts) for total, each in zip(draft, drafts, strict=True)]
            rest = [total + median(each) / len(self.texts) for total, each in zip(rest, rests, strict=True)]
        return draft, rest

    def profile(self, drafter: Any, prompt_L: Tensor, nodes: int) -> PhaseTimes:
        """Return the times of one run of the loop. Its length limit is far, which would make its last trees shallow."""
        settings = replace(self.setup.settings, nodes=nodes, max_new_tokens=(self.steps + 1) * nodes + 1)
        return profile_answer(self.setup.base, drafter, prompt_L, settings, self.setup.seed, self.steps)


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing values (pool adjacent violators):   1 3 2 4   ->   1 2.5 2.5 4"""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, m), (right, n) = pools[-2:]
            pools[-2:] = [((left * m + right * n) / (m + n), m + n)]
    return [value for value, count in pools for _ in range(count)]
