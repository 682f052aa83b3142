"""What every part of a pass costs, by context and by tree size. It measures time alone: of what is said, nothing.

Acceptance therefore never comes from here. A predicted speed-up takes it as given, from an evaluation or a paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings, Drafter
from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.decoding.verification import Verifier
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.evaluation import environment as machine_measures
from ctcdraft.evaluation.environment import environment, hardware_name
from ctcdraft.evaluation.evaluation import Contestant
from ctcdraft.evaluation.profiling import PASS_PARTS, PhaseTimes, profile_answer, relative_costs
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.meta import NullTokenizer

NO_STOP_TOKEN = -1  # no word of any base: random words may not end an answer


@dataclass(frozen=True)
class LatencyBenchmark:
    """What is measured. drafters: with random weights. tau: acceptance to predict with, by drafter's name.

    contexts: words the base has read before. nodes: sizes of the trees read. passes: of the whole loop, and
    repeats: of it, of every read and of the prefill; medians are reported.
    """

    name: str
    drafters: Sequence[Any]
    contexts: Sequence[int]
    nodes: Sequence[int]
    passes: int
    repeats: int
    tau: Mapping[str, float | None]

    def __post_init__(self) -> None:
        for key, values in (("contexts", self.contexts), ("nodes", self.nodes)):
            if not values:
                raise InputError(f"benchmark.{key}=[] leaves nothing to measure; give at least one")
            for value in values:
                check_int(value, f"benchmark.{key}")
        check_int(self.passes, "benchmark.passes")
        check_int(self.repeats, "benchmark.repeats")
        if not isinstance(self.tau, Mapping):
            raise InputError(f"benchmark.tau={self.tau} is nobody's; give it by drafter, as benchmark.tau.ctc=3.5")
        for name, tau in self.tau.items():
            if tau is not None and check_float(tau, f"benchmark.tau.{name}") < 1:
                raise InputError(f"benchmark.tau.{name}={tau}: a pass commits at least one token; give 1 or more")

    def usable_contexts(self, base: BaseLM, settings: DecodingSettings) -> list[int]:
        """The contexts behind which the loop's passes and the largest tree still find room."""
        behind = max(*self.nodes, self.passes + settings.nodes)
        found = [context for context in self.contexts if context + behind <= base.context_length]
        if not found:
            raise InputError(
                f"benchmark.contexts={list(self.contexts)}: behind none of them the {base.context_length} positions of "
                f"base {base.name} leave room for {behind} nodes; give shorter ones, or fewer benchmark.nodes"
            )
        return found

    def run(
        self, base: BaseLM, contestants: Mapping[str, Contestant], settings: DecodingSettings, seed: int
    ) -> dict[str, Any]:
        """The report: `rows`, one a drafter and context, `reads`, one a context, `machine` and `environment`."""
        where = hardware_name(base.device)
        found = measure_contexts(base, {name: one.drafter for name, one in contestants.items()}, settings, self, seed)
        labels = {
            "benchmark": self.name,
            "nodes": settings.nodes,
            "temperature": settings.temperature,
            "seed": seed,
            "hardware": where,
            "dtype": str(base.dtype).removeprefix("torch."),
        }
        rows = [
            {
                **row,
                **labels,
                "draft_parameters": contestants[row["drafter"]].parameters,
                "fingerprint": contestants[row["drafter"]].fingerprint,
            }
            for row in found.pop("drafters")
        ]
        random_weights = isinstance(base.tokenizer, NullTokenizer)
        circumstances = {
            "hardware": where,
            "base": base.name,
            "random_weights": random_weights,
            "reads": base.execution_mode,
            "contexts_left_out": [one for one in self.contexts if one not in self.usable_contexts(base, settings)],
        }
        return {"rows": rows, **found, "environment": {**environment(), **circumstances}}


@dataclass(frozen=True)
class HardwareLimits:
    """What there is to reach. bandwidth: bytes a second of a copy. rate: operations a second of a product."""

    weight_bytes: int
    weights: int  # multiplied by every node that is read
    bandwidth: float
    rate: float

    @classmethod
    def measure_on(cls, base: BaseLM) -> HardwareLimits:
        bandwidth, rate = machine_measures.copy_bandwidth(base.device), machine_measures.matmul_rate(base)
        return cls(machine_measures.weight_bytes(base), machine_measures.count_matmul_weights(base), bandwidth, rate)

    def min_seconds(self, kv_bytes: float, nodes: float) -> float:
        """Seconds below which no read of `nodes` nodes can come: it streams, or it multiplies, whichever is longer."""
        return max((self.weight_bytes + kv_bytes) / self.bandwidth, 2 * self.weights * nodes / self.rate)


def measure_contexts(
    base: BaseLM, drafters: Mapping[str, Drafter], settings: DecodingSettings, latency: LatencyBenchmark, seed: int
) -> dict[str, Any]:
    """`reads`: prefill, step and v(n) by context; `drafters`: c, v and o of each; `machine`."""
    machine = HardwareLimits.measure_on(base)
    reads, rows = [], []
    for context in latency.usable_contexts(base, settings):
        text_L = torch.randint(base.vocabulary, (context,), generator=torch.Generator().manual_seed(seed))
        text_L = text_L.to(base.device)
        timer = ReadTimer(base, text_L, latency.nodes)
        # In turns with whole passes: a machine that slows down meanwhile must not make a read longer than its pass.
        spent, nodes = median_full_passes(base, drafters, settings, text_L, latency, timer.measure)
        reads.append(timer.row(machine, spent[AUTOREGRESSIVE].seconds_per_pass))
        for name, drafter in drafters.items():
            searches = hasattr(drafter, "paths")
            rows.append(drafter_row(name, context, spent, nodes[name], searches, latency.tau.get(name), machine))
    return {"machine": vars(machine), "reads": reads, "drafters": rows}


def median_full_passes(
    base: BaseLM,
    drafters: Mapping[str, Drafter],
    settings: DecodingSettings,
    text_L: Tensor,
    latency: LatencyBenchmark,
    beside: Callable[[], object],
) -> tuple[dict[str, PhaseTimes], dict[str, float]]:
    """Of every drafter the repeat whose pass was the median one: the parts of one and the same run add up. And how
    many nodes its trees had, in the mean: in random words prompt lookup finds next to nothing.

    There is room for whole trees behind the last pass too: where an answer ends, trees are cut, and a few passes
    would be little else. beside: called once a repeat.
    """
    roomy = replace(settings, max_new_tokens=latency.passes + settings.nodes)
    runs: dict[str, list[PhaseTimes]] = {name: [] for name in drafters}
    nodes: dict[str, float] = {}
    for _ in range(latency.repeats + 1):
        for name, drafter in drafters.items():
            ending = FixedLengthVerifier(settings.verify, latency.passes)
            runs[name].append(profile_answer(base, drafter, text_L, replace(roomy, verify=ending), 0, {NO_STOP_TOKEN}))
            nodes[name] = statistics.mean(ending.nodes[1:])
        beside()
    medians = {
        name: sorted(found[1:], key=lambda one: one.seconds_per_pass)[(len(found) - 1) // 2]
        for name, found in runs.items()
    }
    return medians, nodes


class FixedLengthVerifier:
    """A verifier that lets an answer end with its `passes`-th pass, whatever was said, and counts the nodes of every
    tree. The prefill asks it first."""

    def __init__(self, verify: Verifier, passes: int) -> None:
        self.verify = verify
        self.remaining_passes = passes + 1
        self.nodes: list[int] = []

    def __call__(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        verdict = self.verify(tree, log_probs_NV, noise, root_position)
        self.remaining_passes -= 1
        self.nodes.append(len(tree))
        return (
            verdict if self.remaining_passes else replace(verdict, bonus=torch.full_like(verdict.bonus, NO_STOP_TOKEN))
        )


class ReadTimer:
    """Seconds of the prefill and of lone reads behind it, round by round; the first round counts for nothing."""

    def __init__(self, base: BaseLM, text_L: Tensor, sizes: Sequence[int]) -> None:
        self.base = base
        self.text_L = text_L
        self.prefill_seconds: list[float] = []
        self.seconds: dict[int, list[float]] = {nodes: [] for nodes in sizes}
        self.kv_bytes_per_token = 0  # of keys and values

    def measure(self) -> None:
        context = len(self.text_L)
        cache = self.base.new_cache(context + max(self.seconds))  # given back: there may be but one to lend
        self.prefill_seconds.append(time_call(self.base, partial(self.base.read, self.text_L, cache)))
        self.kv_bytes_per_token = cache.bytes_held() // context
        for nodes, taken in self.seconds.items():
            tree = four_ary_tree(self.text_L[-1], nodes)
            taken.append(time_call(self.base, partial(self.base.read_tree, tree, cache)))
            cache.crop(context)

    def row(self, machine: HardwareLimits, step: float) -> dict[str, Any]:
        """v(n) in whole autoregressive passes, as in every report."""
        context = len(self.text_L)
        medians = {nodes: statistics.median(taken[1:]) for nodes, taken in self.seconds.items()}
        least = {nodes: machine.min_seconds(self.kv_bytes_per_token * (context + nodes), nodes) for nodes in medians}
        return {
            "context": context,
            "seconds_prefill": statistics.median(self.prefill_seconds[1:]),
            "seconds_step": step,
            "seconds_read": {str(nodes): taken for nodes, taken in medians.items()},
            "v": {str(nodes): taken / step for nodes, taken in medians.items()},
            "roof_share": {str(nodes): least[nodes] / taken for nodes, taken in medians.items()},
        }


def drafter_row(
    name: str,
    context: int,
    spent: Mapping[str, PhaseTimes],
    nodes: float,
    searches: bool,
    tau: float | None,
    machine: HardwareLimits,
) -> dict[str, Any]:
    """One drafter behind one context. tau is null: random words accept nothing that would mean anything.

    searches: whether frames become a tree apart from the head. Who grows a tree word by word asks its head at every
    word, and has no search to tell from it.
    """
    ours, whole_pass = spent[name], spent[AUTOREGRESSIVE].seconds_per_pass
    costs = relative_costs(spent, name) or {}
    c_search = ours.seconds["tree"] / ours.passes / whole_pass if searches else None
    given = 1.0 if name == AUTOREGRESSIVE else tau
    return {
        "drafter": name,
        "context": context,
        "tree_nodes": nodes,
        "tau": None,
        "tau_given": given,
        **costs,
        "c_head": costs["c"] - (c_search or 0.0),
        "c_search": c_search,
        "tau_to_break_even": sum(costs.values()),
        "predicted_speedup": None if given is None else given / sum(costs.values()),
        "tokens_per_second_predicted": None if given is None else given / ours.seconds_per_pass,
        "time": {part: ours.seconds[part] / ours.passes for part in PASS_PARTS} | {"prefill": ours.seconds["prefill"]},
        "roof_share": machine.min_seconds(ours.kv_bytes / ours.passes, nodes) * ours.passes / ours.seconds["read"],
    }


def four_ary_tree(root: Tensor, nodes: int) -> TokenTree:
    """A tree of this size, four children a node: what is read does not matter, only how much."""
    return TokenTree.from_lists(root, [0] * (nodes - 1), [node // 4 - 1 for node in range(nodes - 1)])


def time_call(base: BaseLM, call: Callable[[], object]) -> float:
    def wait() -> None:
        if base.device.type == "cuda":
            torch.cuda.synchronize(base.device)

    wait()
    began = perf_counter()
    call()
    wait()
    return perf_counter() - began
