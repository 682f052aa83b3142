"""Choice of the tree size (decoding.nodes=auto): replayed acceptance length over measured cost of a decoding step.

Acceptance: the base model decodes calibration prompts once, the largest tree is drafted after every token, and the
decoding steps of all sizes are replayed (replay/drafts.py). Cost: the profiled loop, sizes in turn. No question of the
benchmark is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import prefill
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.drafters.tree_policy import StepCosts
from ctcdraft.errors import InputError, check_int, first_line
from ctcdraft.evaluation.benchmarks import Benchmark, project_prompts
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.output_dir import refuse_differences
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.drafts import (
    TokenIds,
    record_base_answer,
    refuse_unreplayable,
    replay_drafts,
)
from ctcdraft.evaluation.replay.step_costs import TimedSteps, isotonic
from ctcdraft.evaluation.runner import sample_evenly, turn_prompt
from ctcdraft.models.fingerprint import text_hash
from ctcdraft.progress import Progress


@dataclass(frozen=True)
class TreeSizeSearch:
    """Settings of the search, the config's `sizing`."""

    nodes: Sequence[int]  # candidate sizes, ascending
    path: str | None  # prompts in this project's format; null: the questions of the benchmark beyond benchmark.limit
    prompts: int  # number of them, for acceptance
    timed: int  # of these, for the cost of a decoding step
    timed_steps: int  # of the loop, in every timed run
    repeats: int  # of each timed answer, after one that warms up
    adaptive_nodes: Sequence[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])  # of adaptive trees, besides 1
    shown: int = 16  # questions of the benchmark for the reliability of adaptive trees
    costs: Mapping[str, Sequence[float]] | None = None  # nodes, draft, rest of every drafter's steps; null: measured

    def __post_init__(self) -> None:
        for name, sizes in (("nodes", self.nodes), ("adaptive_nodes", self.adaptive_nodes)):
            if not sizes or sorted({check_int(n, f"sizing.{name}", least=2) for n in sizes}) != list(sizes):
                raise InputError(f"sizing.{name} must be ascending sizes >= 2, each once, got {list(sizes)}")
        try:
            StepCosts.from_json({"nodes": [1], "draft": [0], "rest": [1]} if self.costs is None else self.costs)
        except (InputError, KeyError, TypeError, ValueError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else f"is wrong: {first_line(error)}"
            needed = "nodes from 1 in ascending order, and as many times in draft and rest"
            raise InputError(f"sizing.costs {reason}; it needs {needed}, or null") from error

    def steps_to_time(self, setup: EvaluationSetup, prompts: Sequence[Tensor], progress: Progress) -> TimedSteps:
        """Return the decoding steps to time: the first ones of some answers, of which the first reads the prompt."""
        return TimedSteps(setup, prompts[: self.timed], self.timed_steps, self.repeats, progress)

    def progress(self, texts: int, drafters: int, arms: int, shown: int = 0) -> Progress:
        """Return the count of answers that a search decodes, replays, and times in so many arms."""
        timed = min(self.timed, texts) * (self.repeats + 1) * arms
        return Progress((texts + shown) * (1 + drafters) + timed, "answers for tree sizes", first=texts + shown)

    def calibration_prompts(self, benchmark: Benchmark) -> list[Prompt]:
        """Return the prompts to calibrate on, by their first turns; none begins a question of the evaluation."""
        questions = {prompt.turns[0] for prompt in benchmark.prompts}
        prompts = benchmark.rest if self.path is None else project_prompts(self.path, "sizing", None).prompts
        usable = [prompt for prompt in prompts if prompt.turns[0] not in questions]
        if not usable:
            where = f"benchmark {benchmark.name}" if self.path is None else self.path
            raise InputError(
                f"tree sizes cannot be chosen: all prompts of {where} are questions of the evaluation; lower "
                "benchmark.limit=, give others as sizing.path=, or a number as decoding.nodes="
            )
        return sample_evenly(usable, self.prompts)


def size_rows(nodes: Sequence[int], taus: Sequence[float], costs: Sequence[float]) -> list[dict[str, float]]:
    """Return a row of sizes.json for every tree size. costs: of a decoding step, in autoregressive steps."""
    return [
        {"nodes": size, "tau": float(tau), "cost": cost, "predicted_speedup": float(tau) / cost}
        for size, tau, cost in zip(nodes, taus, costs, strict=True)
    ]


def best_size(sizes: Sequence[Mapping[str, float]]) -> Any:
    return max(sizes, key=lambda size: size["predicted_speedup"])["nodes"]


def choose_fixed(
    setup: EvaluationSetup, sizing: TreeSizeSearch, prompts: Sequence[Prompt], questions: Sequence[Prompt] = ()
) -> dict[str, Any]:
    """Return the choice for every drafter whose tree size can be chosen. questions: of the evaluation, not needed."""
    settings, seed = setup.settings, setup.seed
    refuse_unreplayable(settings)
    texts = [turn_prompt(setup.base, prompt, [])[0] for prompt in prompts]
    names = setup.drafter_names
    for name in names:
        for prompt_L in texts:
            refuse_unnested_trees(setup, name, prompt_L, sizing.nodes)
    progress = sizing.progress(len(texts), len(names), arms=len(names) * (1 + len(sizing.nodes)))
    answers = []
    for number, prompt_L in enumerate(texts):
        answers.append(record_base_answer(setup.base, prompt_L, settings, seed + number))
        progress.advance()
    timed = sizing.steps_to_time(setup, texts, progress)
    choices = {}
    for name in names:
        replayed = []
        for number, answer in enumerate(answers):
            replayed.append(replay_drafts(setup.contestants[name], answer, sizing.nodes, seed + number))
            progress.advance()
        steps_by_size = [[step for by_size in replayed for step in by_size[nodes]] for nodes in sizing.nodes]
        taus = [sum(step.committed for step in steps) / len(steps) if steps else 1.0 for steps in steps_by_size]
        drafter = setup.contestants[name]
        arms = [(setup.contestants[AUTOREGRESSIVE], 1), *((drafter, nodes) for nodes in sizing.nodes)]
        times = map(sum, zip(*timed.measure(arms), strict=True))
        costs = isotonic(list(times)[1:])  # a larger tree that takes less time is noise
        sizes = size_rows(sizing.nodes, taus, costs)
        choices[name] = {"chosen": best_size(sizes), "sizes": sizes}
    return choices


def load_or_choose_sizes(
    stored: Mapping[str, Any] | None,
    setup: EvaluationSetup,
    sizing: TreeSizeSearch,
    benchmark: Benchmark,
    of: Mapping[str, Any],
    choose: Callable[..., dict[str, Any]] = choose_fixed,
) -> dict[str, Any]:
    """Return the stored sizes, or choose them and return them with the settings of the evaluation they are `of`."""
    of = {**of, "sizing": {key: value for key, value in vars(sizing).items() if key != "path"}}
    if stored is not None:
        # Times vary, so a resumed evaluation and other shards would choose other sizes, and their records differ.
        refuse_differences(stored["of"], of, "the tree sizes here were chosen where")
        if asked := set(stored["prompts"]) & {text_hash(prompt.turns[0]) for prompt in benchmark.prompts}:
            raise InputError(
                f"{len(asked)} questions of this evaluation are prompts that its tree sizes were chosen on; lower "
                "benchmark.limit= to what it was, or give another folder as out="
            )
        return dict(stored)
    prompts = sizing.calibration_prompts(benchmark)
    hashes = [text_hash(prompt.turns[0]) for prompt in prompts]
    return {"of": of, "prompts": hashes, "sizes": choose(setup, sizing, prompts, benchmark.prompts)}


def node_paths(tokens: TokenIds, parents: TokenIds) -> list[TokenIds]:
    """Return the tokens from the root to every node:   tokens 5 6 7, parents -1 0 1   ->   (), 6, 6 7"""
    paths: list[TokenIds] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@torch.inference_mode()
def refuse_unnested_trees(setup: EvaluationSetup, name: str, prompt_L: Tensor, sizes: Sequence[int]) -> None:
    """Raise InputError if a smaller tree here, such as a merged one, is not the first nodes of the largest."""
    base, settings = setup.base, setup.settings
    noise = GumbelNoise(setup.seed) if settings.temperature > 0 else None
    context = prefill(base, base.new_cache(len(prompt_L) + 1), prompt_L, settings, noise)
    trees = []
    for nodes in sizes if context.remaining_tokens > 0 else ():
        rng = torch.Generator(prompt_L.device).manual_seed(setup.seed)
        tree, _ = setup.contestants[name].draft(replace(context, nodes=nodes), None, rng)
        trees.append(node_paths(tree.tokens_N.tolist(), tree.parents_N.tolist()))
    for nodes, paths in zip(sizes, trees, strict=False):
        if not set(paths) <= set(trees[-1][:nodes]):
            raise InputError(
                f"decoding.nodes=auto: the tree of {nodes} nodes that {name} drafts is not part of its tree of "
                f"{sizes[-1]}, so its acceptance cannot be replayed; give a number as decoding.nodes="
            )
