"""Times of a decoding step by tree size, for adaptive trees: the profiled loop, sizes in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.controls import RandomDrafter
from ctcdraft.drafters.tree_policy import AcceptanceModel, AdaptivePolicy, StepCosts, TreeNodes
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.profiling import profile_answer
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.tree_size import TreeSizeSearch, isotonic, typical
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

    def limit(self, recent: float, rate: float) -> int:
        return self.index

    def least_path_prob(self, recent: float, rate: float, depth: int) -> float:
        return self.least

    def size(self, nodes: TreeNodes, rate: float) -> int:
        super().size(nodes, rate)
        return self.index


def measure_step_costs(
    setup: EvaluationSetup, texts: Sequence[Tensor], sizing: TreeSizeSearch, names: Sequence[str], progress: Progress
) -> dict[str, StepCosts]:
    """Return the costs of every drafter's steps: everything but drafting once for all, on trees of exact sizes."""
    sizes = (1, *sizing.adaptive_nodes)
    full = RandomDrafter(setup.base, 2 * sizes[-1])
    baseline = setup.contestants[AUTOREGRESSIVE]
    arms = [(baseline, 1), *((full, nodes) for nodes in sizes[1:])]
    _, rest = measure_arms(setup, arms, texts, sizing, progress)
    rest_of = tuple(isotonic([1.0, *rest[1:]]))
    least = StepCosts(sizes, (0.0,) * len(sizes), rest_of).least_useful_prob(EXPECTED_RATE)
    costs = {}
    for name in names:
        timed = [(FixedSize.at(sizes, index, least), nodes) for index, nodes in enumerate(sizes)][1:]
        arms = [(baseline, 1), *((AdaptiveDrafter(setup.contestants[name], one), nodes) for one, nodes in timed)]
        draft, _ = measure_arms(setup, arms, texts, sizing, progress)
        costs[name] = StepCosts(sizes, (0.0, *isotonic(draft[1:])), rest_of)
    return costs


def measure_arms(
    setup: EvaluationSetup,
    arms: Sequence[tuple[Any, int]],
    texts: Sequence[Tensor],
    sizing: TreeSizeSearch,
    progress: Progress,
) -> tuple[list[float], list[float]]:
    """Return the times of drafting and of everything else per arm, in steps of the first arm."""
    max_tokens = sizing.max_timed_tokens(setup.settings.max_new_tokens)
    draft, rest = [0.0] * len(arms), [0.0] * len(arms)
    for prompt_L in texts:
        drafts: list[list[float]] = [[] for _ in arms]
        rests: list[list[float]] = [[] for _ in arms]
        for _ in range(sizing.repeats + 1):
            for arm, (drafter, nodes) in enumerate(arms):  # in turn: a device that slows down affects all
                settings = replace(setup.settings, nodes=nodes, max_new_tokens=max_tokens)
                times = profile_answer(setup.base, drafter, prompt_L, settings, setup.seed, frozenset())
                drafting = (times.seconds["draft"] + times.seconds["tree"]) / times.passes
                progress.advance()
                drafts[arm].append(drafting)
                rests[arm].append(times.seconds_per_pass - drafting)
        draft = [total + typical(each) for total, each in zip(draft, drafts, strict=True)]
        rest = [total + typical(each) for total, each in zip(rest, rests, strict=True)]
    unit = draft[0] + rest[0]
    return [one / unit for one in draft], [one / unit for one in rest]
