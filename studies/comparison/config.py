"""The rules of a comparison, from its YAML: who enters, what is equal, what is asked. It knows words, no objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError, check_float, check_int

STEPS, PARAMETERS, LATENCY, TIME = ARMS = ("steps", "parameters", "latency", "time")
STAGES = ("train", "measure", "page")


@dataclass(frozen=True)
class SizeKey:
    """What widens or narrows an entrant: a key of train.py over whole numbers."""

    key: str
    least: int
    most: int


@dataclass(frozen=True)
class MethodSpec:
    """Somebody to train. words: of train.py. readings: other ways to read the head, RUN@READING; null is its own.
    dials: by arm; an arm without one leaves the entrant as it is. rival: whether it counts when a best rival is
    looked for. factors: what this entrant stands for in a grid."""

    name: str
    words: tuple[str, ...]
    readings: tuple[str | None, ...] = (None,)
    dials: Mapping[str, SizeKey] = field(default_factory=dict)
    rival: bool = False
    factors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LearningRateGrid:
    """Learning rates to choose from, each tried for `share` of the steps and judged by tau on `prompts` prompts that
    are trained on by nobody. beyond: how many more may be tried past an edge that is the best.

    A small share is short-sighted: after a tenth of the steps Medusa's heads liked four times the rate that was best
    for all of them (1.43 tokens a pass in place of 1.64), and EAGLE's rates could not be told apart."""

    values: tuple[float, ...]
    share: float
    prompts: int
    beyond: int = 0


@dataclass(frozen=True)
class ReplayConfig:
    """tau of every tree size, on `benchmarks`: greedy in all arms, above temperature 0 in those of `sampled`.
    checked: questions that the loop decodes as well."""

    nodes: tuple[int, ...]
    temperatures: tuple[float, ...]
    checked: int
    sampled: tuple[str, ...] = (STEPS,)


@dataclass(frozen=True)
class TimingConfig:
    """Greedy evaluations with clocks. arms: whose heads are timed. others: contestants without training. outside: rows
    of other people's code. words: of evaluate.py, in these evaluations alone."""

    nodes: tuple[int, ...]
    arms: tuple[str, ...]
    others: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class MatchingConfig:
    """How budgets are matched. While drafts are timed, so many prompts of the corpus are answered with so many tokens
    each, all of it `repeats` times."""

    tolerance: float
    prompts: int
    tokens: int
    repeats: int


@dataclass(frozen=True)
class ExtraSeeds:
    """More seeds, at equal steps: for these entrants and, where best_rival is set, for whoever that is. in_time: at
    equal training time, too, where that is an arm. They are replayed, not timed."""

    seeds: tuple[int, ...]
    entrants: tuple[str, ...]
    best_rival: bool
    in_time: bool = False


@dataclass(frozen=True)
class ComparisonConfig:
    """base: its words, for train.py and evaluate.py alike. corpus, train, evaluate: words for all.
    reference: the entrant that the others are matched to. seconds: of training in the arm of equal time; None: as
    long as the reference took. small: layers of the base that a draft model begins with; None where nobody needs one.
    pairs: whose differences are told. readings_as: in a grid, what the entrants' readings are, in their order.
    group: names this part of the evaluations, in a grid the cell. clock: which seconds of training count.
    said: all of this as the config says it: `rules(**said)` are these rules."""

    title: str
    out: Path
    stages: tuple[str, ...]
    base: tuple[str, ...]
    corpus: tuple[str, ...]
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    steps: int
    seed: int
    again: ExtraSeeds
    arms: tuple[str, ...]
    reference: str
    seconds: float | None
    small: int | None
    entrants: Mapping[str, MethodSpec]
    rates: LearningRateGrid
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
        """Words of train.py that are the same for all: base, corpus, optimiser, schedule."""
        return (*self.base, *self.corpus, *self.train)

    @property
    def reported_sizes(self) -> tuple[int, ...]:
        """Of trees, where not all that were replayed are told: those that were timed, if any were."""
        return self.timing.nodes or self.replay.nodes

    @property
    def trial_steps(self) -> int:
        return max(1, round(self.steps * self.rates.share))


def comparison_config(**raw: Any) -> ComparisonConfig:
    """The `arena` node of a config, checked. Raises InputError."""
    raw_copy = deepcopy(raw)
    entrants = {}
    for key, node in raw.pop("entrants").items():
        if node is None:  # left out of a preset
            continue
        one = method_spec(str(node.pop("name", key)), node)
        entrants[one.name] = one
    values: Any = {
        **lists_to_tuples(raw),
        "out": Path(raw["out"]),
        "entrants": entrants,
        "again": ExtraSeeds(**lists_to_tuples(raw["again"])),
        "rates": LearningRateGrid(**lists_to_tuples(raw["rates"])),
        "matching": MatchingConfig(**lists_to_tuples(raw["matching"])),
        "replay": ReplayConfig(**lists_to_tuples(raw["replay"])),
        "timing": TimingConfig(**lists_to_tuples(raw["timing"])),
        "benchmarks": {name: tuple(words) for name, words in raw["benchmarks"].items() if words is not None},
        "pairs": tuple((more, less) for more, less in raw["pairs"]),
        "said": raw_copy,
    }
    made = ComparisonConfig(**values)
    refuse_impossible(made)
    return made


def method_spec(name: str, node: Mapping[str, Any]) -> MethodSpec:
    node = dict(node)
    dials = {arm: SizeKey(**dial) for arm, dial in (node.pop("dials", None) or {}).items() if dial is not None}
    factors = {key: level for key, level in (node.pop("factors", None) or {}).items() if level is not None}
    return MethodSpec(name, dials=dials, factors=factors, **lists_to_tuples(node))


def lists_to_tuples(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in node.items()}


def refuse_impossible(made: ComparisonConfig) -> None:
    check_int(made.steps, "arena.steps")
    check_int(made.replay.checked, "arena.replay.checked")
    if not 0 < check_float(made.rates.share, "arena.rates.share") < 1:
        raise InputError(f"arena.rates.share={made.rates.share}: the share of the steps lies between 0 and 1")
    if not made.rates.values:
        raise InputError("arena.rates.values=[]: there is no learning rate to train with; give at least one")
    refuse_unknown("stages", made.stages, STAGES)
    refuse_unknown("arms", (*made.arms, *made.timing.arms), ARMS)
    refuse_unknown("clock", (made.clock,), ("processor", "wall"))
    names = tuple(made.entrants)
    refuse_unknown("again.entrants", made.again.entrants, names)
    refuse_unknown("pairs", tuple(side.partition("@")[0] for pair in made.pairs for side in pair), names)
    if made.seconds is None or {PARAMETERS, LATENCY} & set(made.arms):
        refuse_unknown("reference", (made.reference,), names)
    if made.arms[:1] != (STEPS,):
        raise InputError(f"arena.arms={list(made.arms)}: the first is `steps`, which the others are matched to")
    refuse_unknown("replay.sampled", made.replay.sampled, made.arms)


def refuse_unknown(key: str, named: Sequence[str], benchmark_hashes: Sequence[str]) -> None:
    strangers = [name for name in named if name not in benchmark_hashes]
    if strangers:
        raise InputError(f"arena.{key} names {strangers[0]}, which is none of {', '.join(benchmark_hashes)}")
