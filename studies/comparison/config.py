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
    """A method to train.

    Args:
        overrides: arguments of train.py.
        readings: ways to build a tree from its draft, as in RUN@READING; null is the head's own.
        size_keys: the size to match, by arm; an arm without one leaves the head as it is.
        rival: whether it may be the best rival, which is trained with more seeds.
        factors: its levels of the factors of a grid.
    """

    name: str
    overrides: tuple[str, ...]
    readings: tuple[str | None, ...] = (None,)
    size_keys: Mapping[str, SizeKey] = field(default_factory=dict)
    rival: bool = False
    factors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LearningRateGrid:
    """Learning rates, each tried for `share` of the steps and ranked by tau on `prompts` held-out prompts.

    A small share misleads: after a tenth of the steps Medusa's heads preferred four times the rate that was best for
    all of them (tau 1.43 instead of 1.64), and EAGLE's rates could not be distinguished.

    Args:
        beyond: how many more rates are tried while the best one is at an edge of the grid.
    """

    values: tuple[float, ...]
    share: float
    prompts: int
    beyond: int = 0


@dataclass(frozen=True)
class ReplayConfig:
    """tau of every tree size, replayed along the baseline's responses.

    Args:
        temperatures: 0 for the heads of all arms, others for those of the arms in `sampled`.
        checked: number of questions that the decoding loop checks.
    """

    nodes: tuple[int, ...]
    temperatures: tuple[float, ...]
    checked: int
    sampled: tuple[str, ...] = (STEPS,)


@dataclass(frozen=True)
class TimingConfig:
    """Timed greedy evaluations of the heads of `arms` and of `others`, methods without training. `overrides` are
    further arguments of evaluate.py."""

    nodes: tuple[int, ...]
    arms: tuple[str, ...]
    others: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class MatchingConfig:
    """How draft times are matched: `prompts` prompts of the corpus are decoded with `tokens` tokens each, all of it
    `repeats` times; ratios within `tolerance` count as equal."""

    tolerance: float
    prompts: int
    tokens: int
    repeats: int


@dataclass(frozen=True)
class ExtraSeeds:
    """More seeds at equal steps for `entrants` and, with `best_rival`, for the rival with the best held-out tau; with
    `in_time` also at equal training time. Heads of further seeds are replayed and not timed."""

    seeds: tuple[int, ...]
    entrants: tuple[str, ...]
    best_rival: bool
    in_time: bool = False


@dataclass(frozen=True)
class ComparisonConfig:
    """A whole comparison.

    Args:
        base: overrides of train.py and evaluate.py; corpus, train, evaluate: overrides of one of them, for all methods.
        reference: the method whose budget the others are matched to.
        seconds: training time in the arm of equal training time; None: that of the reference.
        small: number of base layers that the draft model starts from; None where no method needs one.
        pairs: (method, baseline) pairs whose differences are reported.
        readings_as: in a grid, the labels of the readings, in their order.
        group: prefix of the names of evaluations; the cell in a grid.
        clock: which seconds of training count.
        raw_config: the YAML node: `comparison_config(**raw_config)` is this comparison.
    """

    title: str
    out: Path
    stages: tuple[str, ...]
    base: tuple[str, ...]
    corpus: tuple[str, ...]
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    steps: int
    seed: int
    extra_seeds: ExtraSeeds
    arms: tuple[str, ...]
    reference: str
    seconds: float | None
    small: int | None
    entrants: Mapping[str, MethodSpec]
    learning_rates: LearningRateGrid
    matching: MatchingConfig
    benchmarks: Mapping[str, tuple[str, ...]]
    replay: ReplayConfig
    timing: TimingConfig
    pairs: tuple[tuple[str, str], ...]
    readings_as: tuple[str, ...]
    group: str
    clock: str
    command: str
    raw_config: Mapping[str, Any]

    @property
    def shared_overrides(self) -> tuple[str, ...]:
        """Overrides of train.py that all methods share: base, corpus, optimizer, schedule."""
        return (*self.base, *self.corpus, *self.train)

    @property
    def reported_sizes(self) -> tuple[int, ...]:
        """Tree sizes of the tables that do not show all replayed ones: the timed sizes, if any were timed."""
        return self.timing.nodes or self.replay.nodes

    @property
    def trial_steps(self) -> int:
        return max(1, round(self.steps * self.learning_rates.share))


def comparison_config(**raw: Any) -> ComparisonConfig:
    """Return the `arena` node of a config as a checked ComparisonConfig. Raises InputError."""
    original, node = deepcopy(raw), lists_to_tuples(raw)
    methods = [  # null removes a method from a preset
        method_spec(str(spec.pop("name", key)), spec) for key, spec in node["entrants"].items() if spec is not None
    ]
    parts = {"extra_seeds": ExtraSeeds, "learning_rates": LearningRateGrid, "matching": MatchingConfig}
    parts |= {"replay": ReplayConfig, "timing": TimingConfig}
    node |= {key: kind(**lists_to_tuples(raw[key])) for key, kind in parts.items()}
    node["out"] = Path(raw["out"])
    node["entrants"] = {method.name: method for method in methods}
    node["benchmarks"] = {
        name: tuple(overrides) for name, overrides in raw["benchmarks"].items() if overrides is not None
    }
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
    if config.seconds is None or {PARAMETERS, LATENCY} & set(config.arms):
        refuse_unknown("reference", (config.reference,), names)
    if config.arms[:1] != (STEPS,):
        raise InputError(
            f"arena.arms must begin with `steps`, to which the others are matched, got {list(config.arms)}"
        )
    refuse_unknown("replay.sampled", config.replay.sampled, config.arms)


def refuse_unknown(key: str, values: Sequence[str], known: Sequence[str]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        raise InputError(f"arena.{key} must name some of {', '.join(known)}, got {unknown[0]}")
