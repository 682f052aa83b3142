"""The `arena` node of a config as checked dataclasses: methods, budgets, evaluations and pairs to compare.

Field names are the keys of configs/experiment/arena.yaml. "Overrides" are arguments of train.py or evaluate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError, check_float, check_int

STEPS, PARAMETERS, LATENCY, TIME = ARMS = ("steps", "parameters", "latency", "time")
STAGES = ("train", "measure", "page")
CLOCKS = ("processor", "wall")


@dataclass(frozen=True)
class SizeKey:
    """An integer config key of train.py that widens or deepens a head, and the range it is searched in."""

    key: str
    least: int
    most: int


@dataclass(frozen=True)
class MethodSpec:
    """A method to train with these overrides of train.py."""

    name: str
    overrides: tuple[str, ...]
    readings: tuple[str | None, ...] = (None,)  # trees built from its draft, as in RUN@READING; None is the head's own
    size_keys: Mapping[str, SizeKey] = field(default_factory=dict)  # by arm; without one the arm leaves the head as is
    rival: bool = False  # may be the best rival, which is trained with more seeds
    factors: Mapping[str, Any] = field(default_factory=dict)  # its levels of the factors of a grid


@dataclass(frozen=True)
class LearningRateGrid:
    """Learning rates, each tried for `share` of the steps and ranked by tau on `prompts` held-out prompts."""

    values: tuple[float, ...]
    # A small share misleads: after a tenth of the steps Medusa's heads preferred four times the rate that was best for
    # all of them (tau 1.43 instead of 1.64), and EAGLE's rates could not be distinguished.
    share: float
    prompts: int
    beyond: int = 0  # how many more rates are tried while the best one is at an edge of the grid


@dataclass(frozen=True)
class ReplayConfig:
    """tau of every tree size, replayed along the baseline's responses."""

    nodes: tuple[int, ...]
    temperatures: tuple[float, ...]  # 0 for the heads of all arms, others for those of the arms in `sampled`
    checked: int  # number of questions that the decoding loop checks
    sampled: tuple[str, ...] = (STEPS,)


@dataclass(frozen=True)
class TimingConfig:
    """Timed greedy evaluations of the heads of `arms` and of `others`, methods without training."""

    nodes: tuple[int, ...]
    arms: tuple[str, ...]
    others: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class MatchingConfig:
    """Timing of drafts: `tokens` tokens of each of `prompts` prompts of the corpus, all of it `repeats` times."""

    tolerance: float  # ratios within it count as equal
    prompts: int
    tokens: int
    repeats: int


@dataclass(frozen=True)
class ExtraSeeds:
    """More seeds at equal steps; their heads are replayed and not timed."""

    seeds: tuple[int, ...]
    entrants: tuple[str, ...]
    best_rival: bool  # also the rival with the best held-out tau
    in_time: bool = False  # also at equal training time


@dataclass(frozen=True)
class ComparisonConfig:
    """A whole comparison; corpus, train and evaluate are overrides for all methods."""

    title: str
    out: Path
    stages: tuple[str, ...]
    base: tuple[str, ...]  # overrides of train.py and evaluate.py
    corpus: tuple[str, ...]
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    steps: int
    seed: int
    extra_seeds: ExtraSeeds
    arms: tuple[str, ...]
    reference: str  # the method whose budget the others are matched to
    seconds: float | None  # training time in the arm of equal training time; None: that of the reference
    small: int | None  # base layers that the draft model starts from; None where no method needs one
    entrants: Mapping[str, MethodSpec]
    learning_rates: LearningRateGrid
    matching: MatchingConfig
    benchmarks: Mapping[str, tuple[str, ...]]
    replay: ReplayConfig
    timing: TimingConfig
    pairs: tuple[tuple[str, str], ...]  # (method, baseline), whose differences are reported
    readings_as: tuple[str, ...]  # labels of the readings of a grid, in their order
    group: str  # prefix of the names of evaluations: the cell in a grid
    clock: str  # which seconds of training count
    command: str
    raw_config: Mapping[str, Any]  # the YAML node: `comparison_config(**raw_config)` is this comparison

    @property
    def shared_overrides(self) -> tuple[str, ...]:
        return (*self.base, *self.corpus, *self.train)

    @property
    def reported_sizes(self) -> tuple[int, ...]:
        # In tables that do not show all replayed sizes.
        return self.timing.nodes or self.replay.nodes

    @property
    def trial_steps(self) -> int:
        return max(1, round(self.steps * self.learning_rates.share))


def comparison_config(**raw: Any) -> ComparisonConfig:
    """Return the `arena` node of a config, checked. Raises InputError."""
    original, node = deepcopy(raw), lists_to_tuples(raw)
    methods = [  # null removes a method from a preset
        method_spec(str(spec.pop("name", key)), spec) for key, spec in node["entrants"].items() if spec is not None
    ]
    parts = {"extra_seeds": ExtraSeeds, "learning_rates": LearningRateGrid, "matching": MatchingConfig}
    parts |= {"replay": ReplayConfig, "timing": TimingConfig}
    node |= {key: kind(**lists_to_tuples(raw[key])) for key, kind in parts.items()}
    node["out"] = Path(raw["out"])
    node["entrants"] = {method.name: method for method in methods}
    node["benchmarks"] = {name: tuple(own) for name, own in raw["benchmarks"].items() if own is not None}
    node["pairs"] = tuple(map(tuple, raw["pairs"]))
    config = ComparisonConfig(**node, raw_config=original)
    refuse_impossible(config)
    return config


def method_spec(name: str, node: Mapping[str, Any]) -> MethodSpec:
    node = dict(node)
    size_keys = {arm: SizeKey(**key) for arm, key in (node.pop("size_keys", None) or {}).items() if key is not None}
    factors = {key: level for key, level in (node.pop("factors", None) or {}).items() if level is not None}
    return MethodSpec(name, size_keys=size_keys, factors=factors, **lists_to_tuples(node))


def lists_to_tuples(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in node.items()}


def refuse_impossible(config: ComparisonConfig) -> None:
    check_int(config.steps, "arena.steps")
    check_int(config.replay.checked, "arena.replay.checked")
    if not 0 < check_float(config.learning_rates.share, "arena.learning_rates.share") < 1:
        raise InputError(f"arena.learning_rates.share must be between 0 and 1, got {config.learning_rates.share}")
    if not config.learning_rates.values:
        raise InputError("arena.learning_rates.values must hold at least one learning rate, got []")
    refuse_unknown("stages", config.stages, STAGES)
    refuse_unknown("arms", (*config.arms, *config.timing.arms), ARMS)
    refuse_unknown("clock", (config.clock,), CLOCKS)
    names = tuple(config.entrants)
    refuse_unknown("extra_seeds.entrants", config.extra_seeds.entrants, names)
    refuse_unknown("pairs", tuple(side.partition("@")[0] for pair in config.pairs for side in pair), names)
    # A given training time needs no reference, counted or timed budgets do.
    if config.seconds is None or {PARAMETERS, LATENCY} & set(config.arms):
        refuse_unknown("reference", (config.reference,), names)
    if config.arms[:1] != (STEPS,):
        raise InputError(f"arena.arms must begin with `steps`, to which the others are matched, got {[*config.arms]}")
    refuse_unknown("replay.sampled", config.replay.sampled, config.arms)


def refuse_unknown(key: str, values: Sequence[str], known: Sequence[str]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        raise InputError(f"arena.{key} must name some of {', '.join(known)}, got {unknown[0]}")
