"""How many nodes a tree should have: measured cost against acceptance replayed. It asks no question of a benchmark.

acceptance   the base says its text alone, the largest tree is drafted behind every token of it, and the passes that
             any size would have taken are walked afterwards (replay.py).
cost         the loop with a stopwatch, for every size in turns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import prefill
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings, Drafter
from ctcdraft.errors import InputError, check_int
from ctcdraft.evaluation.benchmarks import project_prompts
from ctcdraft.evaluation.output_dir import describe_differences, describe_resume
from ctcdraft.evaluation.profiling import profile_answer
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.drafts import TokenIds, record_base_answer, refuse_unreplayable, replay_drafts
from ctcdraft.evaluation.runner import EvaluationSetup, turn_prompt
from ctcdraft.evaluation.settings import OVERWRITE_ADVICE
from ctcdraft.evaluation.stock_generate import StockGenerate
from ctcdraft.models.base_model import BaseLM
from ctcdraft.progress import Progress


@dataclass(frozen=True)
class TreeSizeSearch:
    """What to choose from, and on what. nodes: sizes, ascending. path: prompts as this project writes them, of which
    some `prompts` are asked that are no question of the benchmark. timed: how many of them are timed, for at most
    `timed_tokens` each."""

    nodes: Sequence[int]
    path: str
    prompts: int
    timed: int
    timed_tokens: int
    repeats: int

    def __post_init__(self) -> None:
        for key in ("prompts", "timed", "timed_tokens", "repeats"):
            check_int(getattr(self, key), f"sizing.{key}")
        if not self.nodes or sorted({check_int(n, "sizing.nodes", least=2) for n in self.nodes}) != list(self.nodes):
            raise InputError(f"sizing.nodes={list(self.nodes)} must be sizes from 2 up, ascending, each once")

    def max_timed_tokens(self, most: int) -> int:
        """Return the tokens of a timed answer, where any other has `most`."""
        return max(2, min(most, self.timed_tokens))

    def max_tokens(self, texts: int, drafters: int, most: int) -> int:
        """Return how many tokens a choice takes at most: the base's own answers, and each drafter's replayed and timed
        ones."""
        timed = min(self.timed, texts) * (self.repeats + 1) * (1 + len(self.nodes))
        return texts * most + drafters * (texts * most + timed * self.max_timed_tokens(most))

    def calibration_prompts(self, benchmark: Sequence[Prompt]) -> list[Prompt]:
        """Prompts to calibrate on; none of them is asked afterwards."""
        questions = {prompt.turns for prompt in benchmark}
        found = [one for one in project_prompts(self.path, "sizing", None).prompts if one.turns not in questions]
        if not found:
            raise InputError(
                f"decoding.nodes=auto: all prompts of {self.path} are questions of the benchmark; leave some "
                "to it by benchmark.limit=, give others as sizing.path=, or a number as decoding.nodes="
            )
        # Not the first ones: files begin with all prompts of one kind.
        return random.Random(0).sample(found, min(self.prompts, len(found)))


@dataclass(frozen=True)
class SizeResult:
    """One size of one drafter. tau: on the calibration's text, exactly; cost: of a pass, in whole autoregressive
    passes; it is made never to fall with the size, since a larger tree that takes less time is noise."""

    nodes: int
    tau: float
    cost: float

    @property
    def predicted_speedup(self) -> float:
        return self.tau / self.cost


@dataclass(frozen=True)
class SizeChoice:
    """All sizes of one drafter, and the best of them."""

    sizes: tuple[SizeResult, ...]

    @property
    def best(self) -> SizeResult:
        return max(self.sizes, key=lambda size: size.predicted_speedup)

    def to_json(self) -> dict[str, Any]:
        table = [{**vars(size), "predicted_speedup": size.predicted_speedup} for size in self.sizes]
        return {"chosen": self.best.nodes, "sizes": table}


def choose_sizes(
    base: BaseLM,
    drafters: Mapping[str, Drafter],
    settings: DecodingSettings,
    sizing: TreeSizeSearch,
    prompts: Sequence[Prompt],
    seed: int,
) -> dict[str, SizeChoice]:
    """The tree size of every drafter that has one."""
    refuse_unreplayable(settings)
    texts = [turn_prompt(base, prompt, [])[0] for prompt in prompts]
    mine = {name: drafter for name, drafter in drafters.items() if has_tree_size(name, drafter)}
    for name, drafter in mine.items():
        for prompt_L in texts:
            refuse_unnested_trees(base, name, drafter, prompt_L, settings, sizing.nodes, seed)
    whole_text = settings.max_new_tokens
    left = sizing.max_tokens(len(texts), len(mine), whole_text)
    progress = Progress(left, "tokens (at most) for tree sizes", first=len(texts) * whole_text)
    answers = []
    for number, prompt_L in enumerate(texts):
        answers.append(record_base_answer(base, prompt_L, settings, seed + number))
        progress.advance(whole_text)
    found = {}
    for name, drafter in mine.items():
        walked = []
        for number, answer in enumerate(answers):
            walked.append(replay_drafts(drafter, answer, sizing.nodes, seed + number))
            progress.advance(whole_text)
        passes = [[step for one in walked for step in one[nodes]] for nodes in sizing.nodes]
        timed = texts[: sizing.timed]
        costs = measure_costs(base, drafter, drafters[AUTOREGRESSIVE], timed, settings, sizing, seed, progress)
        taus = [sum(step.committed for step in steps) / len(steps) if steps else 1.0 for steps in passes]
        found[name] = SizeChoice(tuple(map(SizeResult, sizing.nodes, taus, costs)))
    return found


def load_or_choose_sizes(
    stored: Mapping[str, Any] | None,
    setup: EvaluationSetup,
    sizing: TreeSizeSearch,
    benchmark: Sequence[Prompt],
    of: Mapping[str, Any],
) -> dict[str, Any]:
    """What `choose` finds, `of` what it was found; or the same as `stored`: who goes on, or shares the work, shall not
    choose anew, and what was chosen for anything else shall not pass for it."""
    of = {**of, "sizing": {key: value for key, value in vars(sizing).items() if key != "path"}}
    if stored is not None:
        if unlike := describe_differences(stored["of"], of):
            raise InputError(
                f"the tree sizes here were chosen where {unlike}; {describe_resume(stored['of'], of)}, "
                f"{OVERWRITE_ADVICE}"
            )
        return dict(stored)
    prompts = sizing.calibration_prompts(benchmark)
    chosen = choose_sizes(setup.base, setup.contestants, setup.settings, sizing, prompts, setup.seed)
    return {"of": of, "sizes": {name: choice.to_json() for name, choice in chosen.items()}}


def has_tree_size(name: str, drafter: Any) -> bool:
    """Autoregression has no size to choose, and rows of others choose for themselves."""
    return name != AUTOREGRESSIVE and not isinstance(drafter, StockGenerate)


def node_paths(tokens: TokenIds, parents: TokenIds) -> list[TokenIds]:
    """What every node says from the root on:   words 5 6 7, parents -1 0 1   ->   (), 6, 6 7"""
    paths: list[TokenIds] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@torch.inference_mode()
def refuse_unnested_trees(
    base: BaseLM,
    name: str,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    sizes: Sequence[int],
    seed: int,
) -> None:
    """Raise InputError where a small tree behind this text is not the beginning of the largest: what it would have
    accepted cannot be replayed. Chains that share the nodes are so, and cascades."""
    noise = GumbelNoise(seed) if settings.temperature > 0 else None
    context = prefill(base, base.new_cache(len(prompt_L) + 1), prompt_L, settings, noise)
    trees = []
    for nodes in sizes if context.remaining_tokens > 0 else ():
        rng = torch.Generator(prompt_L.device).manual_seed(seed)
        tree, _ = drafter.draft(replace(context, nodes=nodes), None, rng)
        trees.append(node_paths(tree.tokens_N.tolist(), tree.parents_N.tolist()))
    for nodes, nodes_of_tree in zip(sizes, trees, strict=False):
        if not set(nodes_of_tree) <= set(trees[-1][:nodes]):
            raise InputError(
                f"decoding.nodes=auto: the tree of {nodes} nodes that {name} drafts is not the beginning of its tree "
                f"of {sizes[-1]}, so its acceptance cannot be replayed; give a number as decoding.nodes="
            )


def measure_costs(
    base: BaseLM,
    drafter: Drafter,
    autoregressive: Drafter,
    texts: Sequence[Tensor],
    settings: DecodingSettings,
    sizing: TreeSizeSearch,
    seed: int,
    progress: Progress,
) -> list[float]:
    """Of a pass by size, in whole autoregressive passes. All take turns, and of each text the fastest repeat counts:
    what disturbs a machine only ever adds time, and a median of few still has some of it."""
    settings = replace(settings, max_new_tokens=sizing.max_timed_tokens(settings.max_new_tokens))
    sides = [(autoregressive, 1), *((drafter, nodes) for nodes in sizing.nodes)]
    seconds = [0.0] * len(sides)
    for prompt_L in texts:
        best = [inf] * len(sides)
        for _ in range(sizing.repeats + 1):  # the first one warms up and is seldom the fastest
            for side, (one, nodes) in enumerate(sides):
                spent = profile_answer(base, one, prompt_L, replace(settings, nodes=nodes), seed, frozenset())
                best[side] = min(best[side], spent.seconds_per_pass)
                progress.advance(settings.max_new_tokens)
        seconds = [total + least for total, least in zip(seconds, best, strict=True)]
    return isotonic([taken / seconds[0] for taken in seconds[1:]])


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall (pool adjacent violators):   1 3 2 4   ->   1 2.5 2.5 4"""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, m), (right, n) = pools[-2:]
            pools[-2:] = [((left * m + right * n) / (m + n), m + n)]
    return [value for value, count in pools for _ in range(count)]
