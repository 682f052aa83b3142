"""Equal budgets: a dial of each entrant is turned until it costs what the reference costs.

parameters   trained numbers, counted
latency      draft time while prompts of the corpus are answered, all interleaved; where the clock is too unsteady to
             tell 5 %, operations and bytes of a draft instead

How long a tree takes depends on what a head has learned: a search goes deep where frames are sure. So what a size costs
that nobody has trained yet is what a trained head of the entrant costs (that of equal steps, or the one that is turned
again), and what the body of that size costs more or less than the body of that head, both untrained.

Where a dial has to stand, by arithmetic alone: numbers in, a whole number or a ratio with its interval out.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.config.build import build_drafter
from ctcdraft.corpus import prepared
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.errors import InputError
from ctcdraft.evaluation.profiling import profile_answer
from ctcdraft.evaluation.replay.tree_size import isotonic
from ctcdraft.training.run_directory import RunDirectory
from studies.comparison.config import LATENCY, PARAMETERS, ComparisonConfig, MethodSpec, SizeKey
from studies.comparison.draft_cost import CountedDrafter, geometric_mean
from studies.comparison.store import MATCHING, ResultStore

CANDIDATE_SIZES = 6  # sizes of a dial that are timed before one is chosen between them
REFERENCE, OWN, UNTRAINED = "the reference", "its own", "its own, untrained"


@dataclass(frozen=True)
class SizeMatch:
    """value: of the dial; None where the entrant stays as it is. ratio: its cost over the reference's. interval: of
    the ratio, where it was timed. how: in words. again: whether it was turned once more (confirming.py)."""

    key: str
    value: int | None
    ratio: float
    interval: tuple[float, float] | None
    how: str
    again: bool = False


def match_sizes(config: ComparisonConfig, store: ResultStore, arm: str) -> dict[str, SizeMatch]:
    """Every entrant's dial in an arm; found once, then read from the book."""
    there = store.read(MATCHING).get(arm, {})
    missing = [name for name in config.entrants if name not in there]
    if missing:
        bench = CostMeter(config, store)
        for name in missing:  # minutes each: a kill loses one of them
            there = store.add(MATCHING, arm, {**there, name: asdict(bench.match_method(config.entrants[name], arm))})
    return {name: SizeMatch(**there[name]) for name in config.entrants}


def train_config(config: ComparisonConfig, overrides: Sequence[str]) -> Any:
    """The config of train.py for these words."""
    from hydra import compose

    return compose("train", overrides=[*config.shared_overrides, *overrides])


class CostMeter:
    """Builds entrants on the base and says what they cost."""

    def __init__(self, config: ComparisonConfig, store: ResultStore) -> None:
        from hydra.utils import instantiate

        self.config, self.store = config, store
        train = train_config(config, ())
        self.configs: dict[str, Any] = {}  # by entrant: a search builds each of them many times
        if train.trainer.threads:
            torch.set_num_threads(train.trainer.threads)
        self.base = instantiate(train.base).for_inference()
        self.settings: DecodingSettings = replace(
            instantiate(train.decoding), nodes=config.reported_sizes[0], max_new_tokens=config.matching.tokens
        )
        self.prepared = Path(train.prepared)

    def build(self, method: MethodSpec, size_key: SizeKey | None = None, value: int | None = None) -> Any:
        from omegaconf import OmegaConf

        if method.name not in self.configs:
            self.configs[method.name] = train_config(self.config, method.words)
        config = self.configs[method.name]
        if size_key is not None:
            config = config.copy()
            OmegaConf.update(config, size_key.key, value)
        torch.manual_seed(self.config.seed)
        return build_drafter(config.drafter, self.base).for_inference(self.base)

    def load_head(
        self, method: MethodSpec, run: str | None = None, size_key: SizeKey | None = None, value: Any = None
    ) -> Any:
        """The head of a run; None: its head of equal steps."""
        drafter = self.build(method, size_key, value)
        RunDirectory(self.store.run_folder(run or method.name)).load_head(drafter)
        return drafter

    @cached_property
    def prompts(self) -> list[Tensor]:
        """Spread evenly over the corpus, of those that the base answers with as many tokens as are wanted."""
        wanted, tokens = self.config.matching.prompts, self.config.matching.tokens
        rows = prepared.read_corpus(self.prepared, self.base.fingerprint()).rows
        long = [number for number, row in enumerate(rows) if int(row.mask_L.sum()) >= tokens]
        if len(long) < wanted:
            raise InputError(
                f"{len(long)} answers in {self.prepared} have {tokens} tokens, and drafts are timed on {wanted} of "
                "them; lower arena.matching.prompts or tokens, or leave `latency` out of arena.arms"
            )
        chosen = [rows[long[number * len(long) // wanted]] for number in range(wanted)]
        return [row.tokens_L[: int(row.mask_L.int().argmax())].long().to(self.base.device) for row in chosen]

    def match_method(self, method: MethodSpec, arm: str) -> SizeMatch:
        if method.name == self.config.reference:
            return SizeMatch("", None, 1.0, None, "the reference")
        reference = self.config.entrants[self.config.reference]
        dial = method.dials.get(arm)
        if arm == PARAMETERS:
            return self.match_by_count(
                method, dial, count_parameters, count_parameters(self.build(reference)), "parameters counted"
            )
        heads = {REFERENCE: self.load_head(reference), OWN: self.load_head(method)}
        if dial is None:
            taken = self.draft_seconds(heads)
            ratio, interval = ratio_of_medians(taken[OWN], taken[REFERENCE], self.config.seed)
            return SizeMatch("", None, ratio, interval, "timed as it is: it has no dial")
        heads[UNTRAINED] = self.build(method)
        value, ratio, interval = self.match_by_time(method, dial, heads)
        if interval[1] - interval[0] <= 2 * self.config.matching.tolerance * ratio:
            return SizeMatch(dial.key, value, ratio, interval, "draft time, medians of interleaved repeats")
        how = (
            f"operations and bytes of a draft, because the clock told {ratio:.2f} [{interval[0]:.2f}, "
            f"{interval[1]:.2f}] only"
        )
        plain, own = self.draft_work(heads[UNTRAINED]), self.draft_work(heads[OWN])

        def at(size: int) -> float:
            return geometric_mean(own + self.draft_work(self.build(method, dial, size)) - plain)

        return match_by_cost(dial, at, geometric_mean(self.draft_work(heads[REFERENCE])), how)

    def match_by_count(
        self, method: MethodSpec, size_key: SizeKey | None, cost: Callable[[Any], float], wanted: float, how: str
    ) -> SizeMatch:
        if size_key is None:
            return SizeMatch("", None, cost(self.build(method)) / wanted, None, f"{how}; it has no dial")
        return match_by_cost(size_key, lambda value: cost(self.build(method, size_key, value)), wanted, how)

    def rematch(self, method: MethodSpec, run: str, before: SizeMatch, ratio: float) -> SizeMatch:
        """From a head that was trained at one value on, which takes `ratio` of the reference's draft time."""
        dial, reference = method.dials[LATENCY], self.config.entrants[self.config.reference]
        heads = {
            REFERENCE: self.load_head(reference),
            OWN: self.load_head(method, run, dial, before.value),
            UNTRAINED: self.build(method, dial, before.value),
        }
        how = f"draft time of the trained head of {before.value}, {ratio:.2f}, and what bodies differ by"
        return SizeMatch(dial.key, *self.match_by_time(method, dial, heads), how, again=True)

    def match_by_time(
        self, method: MethodSpec, size_key: SizeKey, heads: Mapping[str, Any]
    ) -> tuple[int, float, tuple[float, float]]:
        """The value whose draft takes as long as the reference's, between sizes that were timed in turns with it; and
        how long a draft of that value takes, over the reference's."""
        values = geometric_sizes(size_key.least, size_key.most, CANDIDATE_SIZES)
        taken = self.draft_seconds({**heads, **{str(value): self.build(method, size_key, value) for value in values}})
        medians = [statistics.median(extrapolated_seconds(taken, str(value))) for value in values]
        value = interpolate_size(values, isotonic(medians), statistics.median(taken[REFERENCE]))
        taken = self.draft_seconds({**heads, str(value): self.build(method, size_key, value)})
        return value, *ratio_of_medians(extrapolated_seconds(taken, str(value)), taken[REFERENCE], self.config.seed)

    def draft_seconds(self, drafters: Mapping[str, Any]) -> dict[str, list[float]]:
        """Of a draft, tree building included, one number a repeat. All take turns at every prompt, in an order of its
        own each time: what slows the machine for a second slows one prompt of everybody's."""
        taken: dict[str, list[float]] = {name: [] for name in drafters}
        rng = random.Random(self.config.seed)
        for repeat in range(self.config.matching.repeats + 1):  # the first one warms up
            drafting, passes = dict.fromkeys(drafters, 0.0), dict.fromkeys(drafters, 0)
            for prompt_L in self.prompts:
                for name in rng.sample(list(drafters), len(drafters)):
                    spent = profile_answer(self.base, drafters[name], prompt_L, self.settings, self.config.seed)
                    drafting[name] += spent.seconds["draft"] + spent.seconds["tree"]
                    passes[name] += spent.passes
            for name in taken if repeat else ():
                taken[name].append(drafting[name] / passes[name])
        return taken

    def draft_work(self, drafter: Any) -> Any:
        """Operations of a draft, and bytes that its products read and write, while the prompts are answered."""
        weighed = CountedDrafter(drafter)
        for prompt_L in self.prompts:
            generate(self.base, weighed, prompt_L, self.settings, self.base.stop_token_ids, self.config.seed)
        return weighed.total / weighed.drafts


def match_by_cost(size_key: SizeKey, cost: Callable[[int], float], wanted: float, how: str) -> SizeMatch:
    value = nearest_size(cost, wanted, size_key.least, size_key.most)
    return SizeMatch(size_key.key, value, cost(value) / wanted, None, how)


def extrapolated_seconds(taken: Mapping[str, Sequence[float]], size: str) -> list[float]:
    """Seconds of a size that was not trained, repeat by repeat: what bodies differ by, on top of the trained head."""
    return [own + at - plain for own, at, plain in zip(taken[OWN], taken[size], taken[UNTRAINED], strict=True)]


def count_parameters(drafter: Any) -> float:
    return float(sum(weight.numel() for weight in drafter.trainable_parameters()))


def nearest_size(cost: Callable[[int], float], wanted: float, least: int, most: int) -> int:
    """The whole number whose cost, which grows with it, is nearest to what is wanted."""
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < wanted else (low, middle)
    return min((low, high), key=lambda value: abs(cost(value) - wanted))


def geometric_sizes(least: int, most: int, count: int) -> list[int]:
    """1 .. 64, 4 of them   ->   1 4 16 64"""
    ratio = (most / least) ** (1 / max(count - 1, 1))
    return sorted({round(least * ratio**step) for step in range(count)})


def interpolate_size(values: Sequence[int], costs: Sequence[float], wanted: float) -> int:
    """The value at which the line through (values, costs), which never falls, comes to what is wanted.

    values 1 4, costs 10 16, wanted 12   ->   2

    Where even the least costs more than is wanted, the greatest that costs no more than the least: what is dear by
    itself is not to be made worse as well.
    """
    return round(float(np.interp(max(wanted, costs[0]), costs, values)))


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], seed: int, samples_drafts: int = 2000
) -> tuple[float, tuple[float, float]]:
    """With its 95 % interval over repeats, drawn in pairs: what disturbs a repeat disturbs both."""
    pairs_R2 = np.stack([np.asarray(ours), np.asarray(theirs)], axis=1)
    drawn_DR = np.random.default_rng(seed).integers(len(pairs_R2), size=(samples_drafts, len(pairs_R2)))
    medians_D2 = np.median(pairs_R2[drawn_DR], axis=1)
    low, high = np.quantile(medians_D2[:, 0] / medians_D2[:, 1], [0.025, 0.975])
    whole = np.median(pairs_R2, axis=0)
    return float(whole[0] / whole[1]), (float(low), float(high))
