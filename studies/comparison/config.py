"""The config of the comparison, comparison.yaml and the overrides of the command line, as checked dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.config.command_line import quote_paths
from ctcdraft.errors import InputError, check_float, check_int, first_line
from ctcdraft.hardware import HardwareSpec

FACTORS = ("body", "objective", "correction")
Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Base:
    """Overrides that name a base model, those of its corpus, and drafters without training that fit it alone."""

    base: Overrides
    corpus: Overrides
    untrained: Overrides = ()


@dataclass(frozen=True)
class Ladder:
    """All learning rates are tried at 1x, all heads trained at every budget, and the chosen ones repeated at one."""

    extensions: int
    budgets: tuple[int, ...]
    repeated: int
    best: int
    always: tuple[str, ...]
    converged: float
    again: Mapping[str, float]


@dataclass(frozen=True)
class Cell:
    """A cell of the crossed table: the levels of its factors, its overrides, and its trees as (name, option)."""

    levels: Mapping[str, str]
    overrides: Overrides
    trees: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "-".join(self.levels[factor] for factor in FACTORS)


@dataclass(frozen=True)
class Crossed:
    """The crossed table; the fields are those of comparison.yaml, where the cells are one by one."""

    minutes: float
    trial: float
    cells: tuple[Cell, ...]
    tuned_on: Mapping[str, str]
    also_tuned: Mapping[str, str]
    unlike: Sequence[str]
    deciding: Mapping[str, Sequence[str]]
    again: Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """Evaluations of trained heads: replays of all, timed loops (by name) of those at the longest budget."""

    heads: int
    benchmarks: Mapping[str, Overrides]
    evaluate: Overrides
    nodes: tuple[int, ...]
    checked: int
    timed: Mapping[str, Overrides]
    crossed: Mapping[str, Overrides]
    loops: Mapping[str, Overrides]
    again: tuple[str, ...]
    trees: Mapping[str, tuple[str, ...]]
    untrained: tuple[str, ...]


@dataclass(frozen=True)
class Counted:
    """The shape at which draft cost is predicted, its hardware, sizes of single heads there, and that of the trees."""

    base: Overrides
    dtype: str
    plan: HardwareSpec
    sizes: Mapping[str, Mapping[str, int]]
    nodes: int


@dataclass(frozen=True)
class Comparison:
    """The whole config; overrides are arguments of train.py and evaluate.py."""

    out: Path
    results: Path
    hours: float | None
    plan: bool
    publish: bool
    bases: Mapping[str, Base]
    train: Overrides
    minutes: float
    pace: int
    warmup: float
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    ladder: Ladder
    entrants: Mapping[str, Overrides]
    crossed: Crossed | None
    measure: Measure
    counted: Counted
    claims: tuple[tuple[str, str], ...]
    claim_seeds: tuple[int, ...]

    @property
    def first_base(self) -> str:
        return next(iter(self.bases))


def load_config(overrides: Sequence[str]) -> Comparison:
    """Return comparison.yaml with the overrides of a command line; raise InputError for what is wrong with them."""
    try:
        with initialize_config_dir(str(Path(__file__).resolve().parent), version_base=None):
            node = OmegaConf.to_container(compose("comparison", list(quote_paths(overrides))), resolve=True)
        assert isinstance(node, dict)
        config = comparison(**{str(key): value for key, value in node.items()})
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(f"{first_line(error)}; studies/comparison/comparison.yaml has all keys") from error
    except (TypeError, KeyError) as error:
        raise InputError(f"a key of the comparison is missing or unknown: {error}; see comparison.yaml") from error
    refuse_impossible(config)
    return config


def comparison(**node: Any) -> Comparison:
    parts = {"ladder": Ladder, "measure": Measure}
    node |= {key: kind(**with_tuples(node[key])) for key, kind in parts.items()}
    node["crossed"] = node["crossed"] and crossed(**with_tuples(node["crossed"]))
    counted = with_tuples(node["counted"])
    node["counted"] = Counted(**{**counted, "plan": HardwareSpec.of(counted["plan"])})
    node["bases"] = {name: Base(**base) for name, base in with_tuples(node)["bases"].items()}
    return Comparison(**with_tuples(node) | {"out": Path(node["out"]), "results": Path(node["results"])})


def crossed(train: Overrides, trees: Mapping[str, Mapping[str, str]], **node: Any) -> Any:
    cells = []
    for levels in product(*(node[factor].items() for factor in FACTORS)):
        names = dict(zip(FACTORS, (name for name, _ in levels), strict=True))
        own = [override for _, overrides in levels for override in overrides]
        options = [(tree, of[names["objective"]]) for tree, of in trees.items() if names["objective"] in of]
        cells.append(Cell(names, (*train, *own), tuple(options)))
    rest = {key: value for key, value in node.items() if key not in FACTORS}
    return Crossed(**rest, cells=tuple(cells))


def with_tuples(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node with tuples for lists; below the first level null removes an entry."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items() if each is not None}
        return tuple(map(plain, value)) if isinstance(value, list) else value

    return {key: plain(value) for key, value in node.items()}


def refuse_impossible(config: Comparison) -> None:
    check_int(config.pace, "pace")
    check_float(config.minutes, "minutes", above=0)
    check_float(config.warmup, "warmup", least=0, most=1)
    check_int(config.measure.heads, "measure.heads")
    if config.ladder.repeated not in config.ladder.budgets:
        budgets = ", ".join(map(str, config.ladder.budgets))
        raise InputError(f"ladder.repeated must be one of ladder.budgets ({budgets}), got {config.ladder.repeated}")
    for key in ("bases", "seeds", "learning_rates"):
        if not getattr(config, key):
            raise InputError(f"{key}= must name at least one, got none")
    for key, names in (
        ("ladder.always", config.ladder.always),
        ("ladder.again", tuple(config.ladder.again)),
        ("measure.again", config.measure.again),
        ("claims", sum(config.claims, ())),
    ):
        for name in names:
            if name not in config.entrants:
                raise InputError(f"{key} must name some of {', '.join(config.entrants)}, got {name}")
    for factor in config.crossed.deciding if config.crossed is not None else ():
        if factor not in FACTORS:
            raise InputError(f"crossed.deciding must name levels of {', '.join(FACTORS)}, got {factor}")
