"""Equal budgets: the size of every method at which it costs what the reference costs.

A cost is counted parameters, or the draft time while prompts of the corpus are decoded, all methods interleaved. The
draft time depends on what a head has learned: a tree search goes deep where frames are confident. The cost of a size
that is not trained yet is therefore that of the method's head of equal steps, plus the difference between an untrained
head of that size and an untrained one of its own size. Once the heads of the arm are trained they are timed again, and
the page names those that missed the tolerance.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.config.drafters import build_drafter
from ctcdraft.corpus import prepared
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.errors import InputError
from ctcdraft.evaluation.profiling import profile_answer
from ctcdraft.evaluation.replay.tree_size import isotonic
from ctcdraft.models.aux_layers import resolve_aux_layers, view_of_layers
from ctcdraft.training.run_directory import RunDirectory
from studies.comparison.config import LATENCY, PARAMETERS, ComparisonConfig, MethodSpec, SizeKey
from studies.comparison.store import MATCHING, TRAINING, ResultStore

AFTER_TRAINING = "latency, once trained"  # beside the arms in matching.json
CANDIDATE_SIZES = 6  # sizes that are timed before one between them is chosen
DRAFT_TIME = "draft time, medians of interleaved repeats"
REFERENCE, OWN, UNTRAINED = "the reference", "its own", "its own, untrained"


@dataclass(frozen=True)
class SizeMatch:
    """The matched size of a method."""

    key: str
    value: int | None  # None: its own size
    ratio: float  # of its cost to the reference's
    interval: tuple[float, float] | None  # where the cost was timed
    how: str  # what was measured


def match_sizes(config: ComparisonConfig, store: ResultStore, arm: str) -> dict[str, SizeMatch]:
    """Return every method's size in an arm; each is searched once."""
    stored = store.read(MATCHING).get(arm, {})
    missing = [name for name in config.entrants if name not in stored]
    if missing:
        meter = CostMeter(config, store)
        for name in missing:  # minutes each, so each is stored at once
            stored = store.add(MATCHING, arm, {**stored, name: asdict(meter.match_method(config.entrants[name], arm))})
    keys = [field.name for field in fields(SizeMatch)]  # entries of earlier versions have more
    return {name: SizeMatch(**{key: stored[name][key] for key in keys}) for name in config.entrants}


def measure_trained_heads(config: ComparisonConfig, store: ResultStore) -> None:
    """Time the trained heads of the arm of equal draft time against the reference's."""
    timed = store.read(MATCHING).get(AFTER_TRAINING, {})
    entries = {
        entry["entrant"]: {**entry, "run": entry["same_as"] or name}
        for name, entry in store.read(TRAINING).items()
        if (entry["arm"], entry["seed"]) == (LATENCY, config.seed) and entry["entrant"] in config.entrants
    }
    made = [{name: one["overrides"] for name, one in part.items()} for part in (timed, entries)]
    if made[0] == made[1]:  # a head that was trained again is timed again, and with it all others
        return
    meter, sizes, heads = CostMeter(config, store), match_sizes(config, store, LATENCY), {}
    for name, entry in entries.items():
        size_key = config.entrants[name].size_keys.get(LATENCY) if sizes[name].value is not None else None
        heads[name] = meter.load_head(config.entrants[name], entry["run"], size_key, sizes[name].value)
    seconds, results = meter.draft_seconds(heads), {}
    for name, entry in entries.items():
        ratio, interval = ratio_of_medians(seconds[name], seconds[config.reference], config.seed)
        match = SizeMatch(sizes[name].key, sizes[name].value, ratio, interval, DRAFT_TIME)
        results[name] = asdict(match) | {"run": entry["run"], "overrides": entry["overrides"]}
    store.add(MATCHING, AFTER_TRAINING, results)


def train_config(config: ComparisonConfig, overrides: Sequence[str]) -> Any:
    """Return the config of train.py with the shared overrides and these."""
    from hydra import compose

    return compose("train", overrides=[*config.shared_overrides, *overrides])


class CostMeter:
    """Builds heads of any size on the base and measures their cost."""

    def __init__(self, config: ComparisonConfig, store: ResultStore) -> None:
        from hydra.utils import instantiate

        self.config, self.store = config, store
        # By method, because composing takes longer than building.
        self.configs = {name: train_config(config, method.overrides) for name, method in config.entrants.items()}
        train = self.configs[config.reference]
        if train.trainer.num_threads:
            torch.set_num_threads(train.trainer.num_threads)
        layers = dict.fromkeys(layer for one in self.configs.values() for layer in one.base.aux_layers)
        self.base = instantiate(train.base, aux_layers=list(layers)).for_inference()  # each head reads its own of them
        self.settings: DecodingSettings = replace(
            instantiate(train.decoding), nodes=config.reported_sizes[0], max_new_tokens=config.matching.tokens
        )
        self.prepared = Path(train.prepared)

    def build(self, method: MethodSpec, size_key: SizeKey | None = None, value: int | None = None) -> Any:
        from omegaconf import OmegaConf

        config = self.configs[method.name]
        if size_key is not None:
            config = config.copy()  # the composed one serves all sizes
            OmegaConf.update(config, size_key.key, value)
        torch.manual_seed(self.config.seed)
        layers = resolve_aux_layers(config.base.aux_layers, self.base.lm.config.num_hidden_layers)
        return build_drafter(config.drafter, view_of_layers(self.base, layers)).for_inference(self.base)

    def load_head(
        self, method: MethodSpec, run: str | None = None, size_key: SizeKey | None = None, value: Any = None
    ) -> Any:
        """Return the trained head of a run; by default the method's head of equal steps."""
        drafter = self.build(method, size_key, value)
        RunDirectory(self.store.run_folder(run or method.name)).load_head(drafter)
        return drafter

    @cached_property
    def prompts(self) -> list[Tensor]:
        """Prompts spread evenly over the corpus, of those with responses of enough tokens."""
        wanted, tokens = self.config.matching.prompts, self.config.matching.tokens
        rows = prepared.read_corpus(self.prepared, self.base.fingerprint()).rows
        long = [row for row in rows if row.spans[0][1] - row.spans[0][0] >= tokens]
        if len(long) < wanted:
            raise InputError(
                f"{len(long)} responses in {self.prepared} have {tokens} tokens, and drafts are timed on {wanted} of "
                "them; lower arena.matching.prompts or tokens, or leave `latency` out of arena.arms"
            )
        chosen = [long[number * len(long) // wanted] for number in range(wanted)]
        return [row.tokens_L[: row.spans[0][0]].long().to(self.base.device) for row in chosen]

    def match_method(self, method: MethodSpec, arm: str) -> SizeMatch:
        if method.name == self.config.reference:
            return SizeMatch("", None, 1.0, None, "the reference")
        reference, size_key = self.config.entrants[self.config.reference], method.size_keys.get(arm)
        if arm == PARAMETERS:
            return self.match_parameters(method, size_key, count_parameters(self.build(reference)))
        heads = {REFERENCE: self.load_head(reference), OWN: self.load_head(method)}
        if size_key is None:
            seconds = self.draft_seconds(heads)
            ratio, interval = ratio_of_medians(seconds[OWN], seconds[REFERENCE], self.config.seed)
            return SizeMatch("", None, ratio, interval, "timed as it is: it has no size to change")
        heads[UNTRAINED] = self.build(method)
        return self.match_draft_time(method, size_key, heads)

    def match_parameters(self, method: MethodSpec, size_key: SizeKey | None, target: float) -> SizeMatch:
        def ratio(size: int | None = None) -> float:
            return count_parameters(self.build(method, size_key, size)) / target

        if size_key is None:
            return SizeMatch("", None, ratio(), None, "parameters counted; it has no size to change")
        value = nearest_size(ratio, 1.0, size_key.least, size_key.most)
        return SizeMatch(size_key.key, value, ratio(value), None, "parameters counted")

    def match_draft_time(self, method: MethodSpec, size_key: SizeKey, heads: Mapping[str, Any]) -> SizeMatch:
        """Return the size whose draft takes as long as the reference's, interpolated between timed sizes."""
        values = geometric_sizes(size_key.least, size_key.most, CANDIDATE_SIZES)
        seconds = self.draft_seconds({**heads, **{str(size): self.build(method, size_key, size) for size in values}})
        # Noise can make a larger size look faster; isotonic, since interpolation needs costs that do not fall.
        medians = [statistics.median(extrapolated_seconds(seconds, str(size))) for size in values]
        value = interpolate_size(values, isotonic(medians), statistics.median(seconds[REFERENCE]))
        # The interpolated size itself was not timed; its ratio is measured and not interpolated.
        seconds = self.draft_seconds({**heads, str(value): self.build(method, size_key, value)})
        own = extrapolated_seconds(seconds, str(value))
        ratio, interval = ratio_of_medians(own, seconds[REFERENCE], self.config.seed)
        return SizeMatch(size_key.key, value, ratio, interval, DRAFT_TIME)

    def draft_seconds(self, drafters: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return the seconds of a draft, tree building included, one value per repeat."""
        medians: dict[str, list[float]] = {name: [] for name in drafters}
        rng = random.Random(self.config.seed)
        for repeat in range(self.config.matching.repeats + 1):  # the first one warms up
            drafting, steps = dict.fromkeys(drafters, 0.0), dict.fromkeys(drafters, 0)
            for prompt_L in self.prompts:
                # Interleaved in random order, so that a disturbance of the machine for a second hits one of each.
                for name in rng.sample(list(drafters), len(drafters)):
                    profile = profile_answer(self.base, drafters[name], prompt_L, self.settings, self.config.seed)
                    drafting[name] += profile.seconds["draft"] + profile.seconds["tree"]
                    steps[name] += profile.passes
            for name in medians if repeat else ():
                medians[name].append(drafting[name] / steps[name])
        return medians


def extrapolated_seconds(seconds: Mapping[str, Sequence[float]], size: str) -> list[float]:
    """Return the draft time of an untrained size, repeat by repeat."""
    # The trained head's plus the difference between the untrained heads.
    return [own + at - plain for own, at, plain in zip(seconds[OWN], seconds[size], seconds[UNTRAINED], strict=True)]


def count_parameters(drafter: Any) -> float:
    return float(sum(weight.numel() for weight in drafter.trainable_parameters()))


def nearest_size(cost: Callable[[int], float], target: float, least: int, most: int) -> int:
    """Return the integer whose cost, which grows with it, is nearest to the target."""
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < target else (low, middle)
    return min((low, high), key=lambda value: abs(cost(value) - target))


def geometric_sizes(least: int, most: int, count: int) -> list[int]:
    """1 .. 64, 4 of them   ->   1 4 16 64"""
    ratio = (most / least) ** (1 / max(count - 1, 1))
    return sorted({round(least * ratio**step) for step in range(count)})


def interpolate_size(values: Sequence[int], costs: Sequence[float], target: float) -> int:
    """Return the size at which the non-decreasing line through (values, costs) reaches the target.

    values 1 4, costs 10 16, target 12   ->   2
    """
    # Where even the smallest costs more than the target, the largest that costs no more than the smallest: a smaller
    # head would lose quality without drafting faster.
    return round(float(np.interp(max(target, costs[0]), costs, values)))


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], seed: int, draws: int = 2000
) -> tuple[float, tuple[float, float]]:
    """Return the ratio of two medians with its 95 % paired bootstrap interval over repeats."""
    pairs_R2 = np.stack([np.asarray(ours), np.asarray(theirs)], axis=1)
    sampled_DR = np.random.default_rng(seed).integers(len(pairs_R2), size=(draws, len(pairs_R2)))
    medians_D2 = np.median(pairs_R2[sampled_DR], axis=1)
    low, high = np.quantile(medians_D2[:, 0] / medians_D2[:, 1], [0.025, 0.975])
    whole = np.median(pairs_R2, axis=0)
    return float(whole[0] / whole[1]), (float(low), float(high))
