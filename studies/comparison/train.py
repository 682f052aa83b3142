"""Trains whoever is missing, by train.py: learning rates, arms, seeds. It knows words and seconds, no weights.

rates    every entrant tries every rate for a share of the steps; the best tau on prompts held out of training wins
steps    all see the same batches as often
...      the other arms change one dial of an entrant (matching.py), or its steps, and nothing else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from ctcdraft.drafters.draft_model import save_first_layers
from ctcdraft.errors import InputError
from ctcdraft.training.sweep import read_job
from studies.comparison.config import LATENCY, PARAMETERS, STEPS, TIME, ComparisonConfig, MethodSpec
from studies.comparison.matching import SizeMatch, match_sizes, train_config
from studies.comparison.rematch import measure_trained_heads, rematch
from studies.comparison.store import TRAINING, Entry, ResultStore, run_script


@dataclass(frozen=True)
class TrainingSpec:
    """One head to train: an entrant, in an arm, with a seed."""

    entrant: MethodSpec
    arm: str
    seed: int
    steps: int
    rate: float
    dial: tuple[str, int] | None = None


def run_name(config: ComparisonConfig, method: str, arm: str, seed: int) -> str:
    """ctc, ctc.time, ctc.time.s1"""
    parts = [method, *([arm] if arm != STEPS else []), *([f"s{seed}"] if seed != config.seed else [])]
    return ".".join(parts)


def train_overrides(config: ComparisonConfig, name: str, store: ResultStore, one: TrainingSpec) -> list[str]:
    return [
        *config.shared_overrides, *one.entrant.words,
        *([f"{one.dial[0]}={one.dial[1]}"] if one.dial is not None else []),
        f"trainer.learning_rate={one.rate:g}", f"trainer.steps={one.steps}", f"trainer.probe_every={one.steps}",
        f"trainer.probe_prompts={config.rates.prompts}", f"seed={one.seed}", f"drafter.name={name}",
        f"run={store.run_folder(name)}", "overwrite=true",
        *([f"data_seed={config.seed}"] if one.seed != config.seed else []),  # the corpus stays what it is
    ]  # fmt: skip


def train_all(config: ComparisonConfig, store: ResultStore) -> None:
    """Every head of every arm that is not there yet."""
    if config.small is not None:
        save_first_layers(train_config(config, ()).base.path, config.small, store.out / "small")
    rates = {name: best_rate(config, store, entrant) for name, entrant in config.entrants.items()}
    for name, entrant in config.entrants.items():
        train_head(config, store, TrainingSpec(entrant, STEPS, config.seed, config.steps, rates[name]))
    for arm in config.arms:
        if arm in (PARAMETERS, LATENCY):
            matched = match_sizes(config, store, arm)
            for name, entrant in config.entrants.items():
                train_in_arm(
                    config, store, TrainingSpec(entrant, arm, config.seed, config.steps, rates[name]), matched.get(name)
                )
            if arm == LATENCY:
                measure_trained_heads(config, store)
                for name, dial in rematch(config, store).items():
                    train_in_arm(
                        config,
                        store,
                        TrainingSpec(config.entrants[name], arm, config.seed, config.steps, rates[name]),
                        dial,
                    )
                measure_trained_heads(config, store)
        elif arm == TIME:
            for name, entrant in config.entrants.items():
                steps = steps_in_time(config, store, name)
                train_in_arm(config, store, TrainingSpec(entrant, arm, config.seed, steps, rates[name]), None)
    for name, seed in product(methods_with_extra_seeds(config, store), config.again.seeds):
        train_head(config, store, TrainingSpec(config.entrants[name], STEPS, seed, config.steps, rates[name]))
        if config.again.in_time and TIME in config.arms:
            steps = steps_in_time(config, store, name)
            train_in_arm(config, store, TrainingSpec(config.entrants[name], TIME, seed, steps, rates[name]), None)


def best_rate(config: ComparisonConfig, store: ResultStore, method: MethodSpec) -> float:
    """Of a tie the first. While the best lies at an edge of what was tried, one rate beyond it is tried as well. A
    single rate is not tried."""
    prepare_corpus_first(config, store, method)
    if len(config.rates.values) == 1:
        return config.rates.values[0]

    def tried(rate: float) -> float:
        one = TrainingSpec(method, "rate", config.seed, config.trial_steps, rate)
        return trained_entry(config, store, f"{method.name}.rate-{rate:g}", one)["tau"]

    taus = {rate: tried(rate) for rate in config.rates.values}
    for _ in range(config.rates.beyond):
        beyond = next_rate(taus)
        if beyond is None:
            break
        taus[beyond] = tried(beyond)
    return max(taus, key=lambda rate: taus[rate])


def next_rate(taus: Mapping[float, float]) -> float | None:
    """As far beyond as its neighbour lies within; None where the best rate has neighbours on both sides.

    1 -> 1.2   2 -> 1.4   4 -> 1.5    ->    8
    """
    rates, best = sorted(taus), max(taus, key=lambda rate: taus[rate])
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:g}")


def prepare_corpus_first(config: ComparisonConfig, store: ResultStore, method: MethodSpec) -> None:
    """Corpus and stored states are made by whoever comes first, and shall be counted to nobody's training."""
    trained_entry(
        config, store, "prepare", TrainingSpec(method, "prepare", config.seed, 1, config.rates.values[0]), first=True
    )


def train_in_arm(
    config: ComparisonConfig, store: ResultStore, one: TrainingSpec, match_method: SizeMatch | None
) -> None:
    """An entrant that an arm leaves as it was is not trained again: its entry names the head it shares."""
    as_it_was = run_name(config, one.entrant.name, STEPS, one.seed)
    name = run_name(config, one.entrant.name, one.arm, one.seed)
    unchanged = match_method is None or match_method.value is None
    if one.arm == TIME:
        unchanged = one.steps == config.steps
    if unchanged:
        entry = {**store.read(TRAINING)[as_it_was], "arm": one.arm, "same_as": as_it_was}
        store.add(TRAINING, name, entry)
        return
    dial = (
        (match_method.key, match_method.value) if match_method is not None and match_method.value is not None else None
    )
    trained_entry(config, store, name, TrainingSpec(one.entrant, one.arm, one.seed, one.steps, one.rate, dial))


def train_head(config: ComparisonConfig, store: ResultStore, one: TrainingSpec) -> Entry:
    return trained_entry(config, store, run_name(config, one.entrant.name, one.arm, one.seed), one)


def trained_entry(
    config: ComparisonConfig, store: ResultStore, name: str, one: TrainingSpec, first: bool = False
) -> Entry:
    """The book's entry of a head, trained now where it is not there. first: anybody's run of that name will do."""
    overrides = train_overrides(config, name, store, one)
    if first and name in store.read(TRAINING):
        return store.read(TRAINING)[name]
    found = store.find_trained(name, overrides)
    return found if found is not None else store.add(TRAINING, name, train_and_record(store, name, overrides, one))


def train_and_record(store: ResultStore, name: str, overrides: Sequence[str], one: TrainingSpec) -> Entry:
    run_script("train.py", overrides, store.log_file(name))
    job = read_job(store.run_folder(name))
    if job is None:
        raise InputError(f"{store.run_folder(name)} was trained without a probe; arena.rates.prompts must be 1 or more")
    return {
        "entrant": one.entrant.name, "arm": one.arm, "seed": one.seed, "words": list(overrides), "steps": one.steps,
        "learning_rate": one.rate, "dial": one.dial, "factors": dict(one.entrant.factors),
        "readings": list(one.entrant.readings), "parameters": count_head_parameters(store, name), "tau": job.tau,
        "loss": job.loss, "same_as": None,
        "seconds": {clock: round(spent, 2) for clock, spent in job.seconds_by_clock.items()},
    }  # fmt: skip


def count_head_parameters(store: ResultStore, name: str) -> int:
    """Trained numbers of a head: all that its file holds."""
    from math import prod

    from safetensors import safe_open

    with safe_open(store.run_folder(name) / "drafter.safetensors", "pt") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def seconds_per_step(config: ComparisonConfig, store: ResultStore, method: str) -> float:
    """Seconds of a step in its run of equal steps."""
    name = run_name(config, method, STEPS, config.seed)
    entry = store.read(TRAINING)[name]
    spent = entry.get("seconds", {}).get(config.clock)
    if spent is None:
        raise InputError(
            f"{name} in {store.out} was trained by a version that kept no clock of its steps; remove it there, and it "
            "is trained again"
        )
    return spent / entry["steps"]


def steps_in_time(config: ComparisonConfig, store: ResultStore, method: str) -> int:
    """As many steps as fit into the seconds that are given, or that the reference spent on its own."""
    budget = (
        config.seconds
        if config.seconds is not None
        else config.steps * seconds_per_step(config, store, config.reference)
    )
    return max(1, round(budget / seconds_per_step(config, store, method)))


def methods_with_extra_seeds(config: ComparisonConfig, store: ResultStore) -> list[str]:
    """Who is trained with more seeds: those named, and the rival with the best tau on the held-out prompts."""
    names, there = config.again.entrants, store.read(TRAINING)
    rivals = [name for name, entrant in config.entrants.items() if entrant.rival and name not in names]
    tau = partial(held_out_tau, there, config)
    best = [max(rivals, key=tau)] if config.again.best_rival and rivals else []
    return [*names, *best]


def held_out_tau(there: dict[str, Any], config: ComparisonConfig, method: str) -> float:
    return there[run_name(config, method, STEPS, config.seed)]["tau"]
