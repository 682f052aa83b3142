"""Latency benchmark: the time of every part of a decoding step, by context length and by tree size.

It needs no questions and no trained weights: the text is random tokens, so acceptance is not measured. A predicted
speed-up takes the acceptance length from the config.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Drafter, step_execution, uses_fixed_shapes
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.controls import FullTree
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.evaluation import environment as machine
from ctcdraft.evaluation.contestants import Contestant
from ctcdraft.evaluation.environment import HardwareLimits
from ctcdraft.evaluation.profiling import (
    PASS_PARTS,
    PhaseTimes,
    profile_answer,
    profile_generation,
    relative_costs,
)
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.meta import NullTokenizer


@dataclass(frozen=True)
class LatencyBenchmark:
    """Settings of the benchmark, as in configs/benchmark/latency.yaml."""

    name: str
    drafters: Sequence[Any]  # their names; built with random weights
    contexts: Sequence[int]  # tokens in the KV cache before a measurement
    nodes: Sequence[int]  # sizes of the trees that are read
    passes: int  # decoding steps of each run of the loop
    repeats: int  # of every measurement; medians are reported
    tau: Mapping[str, float | None]  # acceptance length to predict a speed-up with, by the drafter's name

    def __post_init__(self) -> None:
        for key, values in (("contexts", self.contexts), ("nodes", self.nodes)):
            if not values:
                raise InputError(f"benchmark.{key}=[] leaves nothing to measure; give at least one")
            for value in values:
                check_int(value, f"benchmark.{key}")
        check_int(self.passes, "benchmark.passes")
        check_int(self.repeats, "benchmark.repeats")
        if not isinstance(self.tau, Mapping):
            raise InputError(f"benchmark.tau must be given by drafter, as benchmark.tau.ctc=3.5, got {self.tau}")
        for name, tau in self.tau.items():
            if tau is not None and check_float(tau, f"benchmark.tau.{name}") < 1:
                raise InputError(f"benchmark.tau.{name} must be >= 1, as every step commits a token, got {tau}")

    def usable_contexts(self, base: BaseLM, settings: DecodingSettings) -> list[int]:
        """Return the contexts that leave positions for the decoding steps and for the largest tree."""
        needed = max(*self.nodes, self.passes + 1 + settings.nodes)
        usable = [context for context in self.contexts if context + needed <= base.context_length]
        if not usable:
            raise InputError(
                f"benchmark.contexts={list(self.contexts)}: base {base.name} has {base.context_length} positions, and "
                f"none leaves {needed} of them for trees; give shorter ones, or fewer benchmark.nodes"
            )
        return usable

    def run(
        self, base: BaseLM, contestants: Mapping[str, Contestant], settings: DecodingSettings, seed: int
    ) -> dict[str, Any]:
        """Return the report: `rows` by drafter and context, `reads` by context, `machine` and `environment`."""
        hardware, usable = machine.hardware_name(base.device), self.usable_contexts(base, settings)
        drafters = {name: contestant.drafter for name, contestant in contestants.items()}
        measured = measure_contexts(base, drafters, settings, self, seed)
        for row in measured["drafters"]:
            row |= {
                "benchmark": self.name,
                "nodes": settings.nodes,
                "temperature": settings.temperature,
                "seed": seed,
                "hardware": hardware,
                "dtype": str(base.dtype).removeprefix("torch."),
                "draft_parameters": contestants[row["drafter"]].parameters,
                "fingerprint": contestants[row["drafter"]].fingerprint,
            }
        circumstances = {
            **machine.environment(),
            "hardware": hardware,
            "base": base.name,
            "random_weights": isinstance(base.tokenizer, NullTokenizer),
            "reads": base.execution_mode,
            "contexts_left_out": [context for context in self.contexts if context not in usable],
        }
        return {"rows": measured.pop("drafters"), **measured, "environment": circumstances}


def measure_contexts(
    base: BaseLM, drafters: Mapping[str, Drafter], settings: DecodingSettings, latency: LatencyBenchmark, seed: int
) -> dict[str, Any]:
    """Return `reads` (prefill, step and v(n) by context), `drafters` (c, v and o of each) and `machine`."""
    limits = HardwareLimits.measure_on(base)
    reads, rows = [], []
    for context in latency.usable_contexts(base, settings):
        rng = torch.Generator().manual_seed(seed)
        text_L = torch.randint(base.vocabulary, (context,), generator=rng).to(base.device)
        timer = ReadTimer(base, text_L, latency, settings)
        # Reads alternate with runs of the loop, so that a device that slows down meanwhile slows down both.
        times, nodes = median_full_passes(base, drafters, settings, text_L, latency, timer.measure)
        reads.append(timer.row(limits, times[AUTOREGRESSIVE].seconds_per_pass))
        for name, drafter in drafters.items():
            searches = hasattr(drafter, "frame_tree") and not uses_fixed_shapes(base, drafter, settings)
            row = drafter_row(name, times, nodes[name], searches, latency.tau.get(name), limits)
            steps = step_execution(base, drafter, settings)
            rows.append({"drafter": name, "context": context, "steps": steps, **row})
    return {"machine": vars(limits), "reads": reads, "drafters": rows}


def median_full_passes(
    base: BaseLM,
    drafters: Mapping[str, Drafter],
    settings: DecodingSettings,
    text_L: Tensor,
    latency: LatencyBenchmark,
    after_repeat: Callable[[], object],
) -> tuple[dict[str, PhaseTimes], dict[str, float]]:
    """Return the median repeat of every drafter, by seconds per step, and its trees' mean number of nodes."""
    # Room for a whole tree after the last step: trees are cut at the end of an answer, so most of a few steps would be.
    roomy = replace(settings, max_new_tokens=latency.passes + 1 + settings.nodes)
    runs: dict[str, list[PhaseTimes]] = {name: [] for name in drafters}
    nodes: dict[str, float] = {}
    for _ in range(latency.repeats + 1):
        for name, drafter in drafters.items():
            times, generation = profile_generation(base, drafter, text_L, roomy, 0, latency.passes)
            runs[name].append(times)
            nodes[name] = statistics.mean(step.nodes for step in generation.passes)
        after_repeat()
    # A whole repeat, so that its parts add up; the first one is a warm-up.
    ordered = {name: sorted(times[1:], key=lambda each: each.seconds_per_pass) for name, times in runs.items()}
    return {name: times[len(times) // 2] for name, times in ordered.items()}, nodes


class ReadTimer:
    """Seconds of the prefill and of single tree forward passes after it; the first round is a warm-up."""

    def __init__(self, base: BaseLM, text_L: Tensor, latency: LatencyBenchmark, settings: DecodingSettings) -> None:
        self.base, self.text_L, self.passes, self.full = base, text_L, latency.passes, FullTree()
        self.settings = replace(settings, max_new_tokens=latency.passes * max(latency.nodes))
        self.prefill_seconds: list[float] = []
        self.seconds: dict[int, list[float]] = {nodes: [] for nodes in latency.nodes}
        self.kv_bytes_per_token = 0

    def measure(self) -> None:
        device, context = self.base.device, len(self.text_L)
        cache = self.base.new_cache(context + max(self.seconds))
        self.prefill_seconds.append(machine.time_call(device, partial(self.base.read, self.text_L, cache)))
        self.kv_bytes_per_token = cache.bytes_held() // context
        for nodes, seconds in self.seconds.items():
            settings = replace(self.settings, nodes=nodes)
            if uses_fixed_shapes(self.base, self.full, settings):
                times = profile_answer(self.base, self.full, self.text_L, settings, 0, self.passes)
                seconds.append(times.seconds["read"] / times.passes)
                continue
            parents = [node // 4 - 1 for node in range(nodes - 1)]  # any tree: only its size matters for the time
            tree = TokenTree.from_lists(self.text_L[-1], [0] * (nodes - 1), parents)
            seconds.append(machine.time_call(device, partial(self.base.read_tree, tree, cache)))
            cache.crop(context)

    def row(self, limits: HardwareLimits, step: float) -> dict[str, Any]:
        """Return the medians of this context; v(n) is in units of `step`, the seconds of an autoregressive step."""
        context = len(self.text_L)
        medians = {nodes: statistics.median(seconds[1:]) for nodes, seconds in self.seconds.items()}
        least = {nodes: limits.min_seconds(self.kv_bytes_per_token * (context + nodes), nodes) for nodes in medians}
        return {
            "context": context,
            "seconds_prefill": statistics.median(self.prefill_seconds[1:]),
            "seconds_step": step,
            "seconds_read": {str(nodes): seconds for nodes, seconds in medians.items()},
            "v": {str(nodes): seconds / step for nodes, seconds in medians.items()},
            "roof_share": {str(nodes): least[nodes] / seconds for nodes, seconds in medians.items()},
        }


def drafter_row(
    name: str, times: Mapping[str, PhaseTimes], nodes: float, searches: bool, tau: float | None, limits: HardwareLimits
) -> dict[str, Any]:
    """Return the costs of one drafter. searches: whether building the tree is timed by itself."""
    ours, step = times[name], times[AUTOREGRESSIVE].seconds_per_pass
    costs = relative_costs(times, name) or {}
    c_search = ours.seconds["tree"] / ours.passes / step if searches else None
    given = 1.0 if name == AUTOREGRESSIVE else tau
    return {
        "tree_nodes": nodes,
        "tau": None,  # acceptance on random tokens means nothing
        "tau_given": given,
        **costs,
        "c_head": costs["c"] - (c_search or 0.0),
        "c_search": c_search,
        "tau_to_break_even": sum(costs.values()),
        "predicted_speedup": None if given is None else given / sum(costs.values()),
        "tokens_per_second_predicted": None if given is None else given / ours.seconds_per_pass,
        "time": {part: ours.seconds[part] / ours.passes for part in PASS_PARTS} | {"prefill": ours.seconds["prefill"]},
        "roof_share": limits.min_seconds(ours.kv_bytes / ours.passes, nodes) * ours.passes / ours.seconds["read"],
    }
