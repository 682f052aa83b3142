"""Training of a comparison's heads by train.py: learning rates, arms and seeds.

rates    every method tries every learning rate for a share of the steps; the best tau on held-out prompts wins
steps    all methods train on the same batches for the same number of steps
...      the other arms change one size of a head (matching.py) or its number of steps, and nothing else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ctcdraft.drafters.draft_model import save_first_layers
from ctcdraft.errors import InputError
from ctcdraft.training.sweep import read_job
from studies.comparison.config import LATENCY, PARAMETERS, STEPS, TIME, ComparisonConfig, MethodSpec
from studies.comparison.matching import SizeMatch, match_sizes, measure_trained_heads, train_config
from studies.comparison.store import TRAINING, Entry, ResultStore, run_script


@dataclass(frozen=True)
class TrainingSpec:
    """A head to train."""

    method: MethodSpec
    arm: str
    seed: int
    steps: int
    rate: float
    size: tuple[str, int] | None = None  # where the arm changes it


def run_name(config: ComparisonConfig, method: str, arm: str, seed: int) -> str:
    """ctc, ctc.time, ctc.time.s1"""
    parts = [method, *([arm] if arm != STEPS else []), *([f"s{seed}"] if seed != config.seed else [])]
    return ".".join(parts)


def train_overrides(config: ComparisonConfig, name: str, store: ResultStore, spec: TrainingSpec) -> list[str]:
    return [
        *config.shared_overrides, *spec.method.overrides,
        *([f"{spec.size[0]}={spec.size[1]}"] if spec.size is not None else []),
        f"trainer.learning_rate={spec.rate:g}", f"trainer.steps={spec.steps}", f"trainer.probe_every={spec.steps}",
        f"trainer.probe_prompts={config.learning_rates.prompts}", f"seed={spec.seed}", f"drafter.name={name}",
        f"run={store.run_folder(name)}", "overwrite=true",
        *([f"data_seed={config.seed}"] if spec.seed != config.seed else []),  # or the corpus would be split anew
    ]  # fmt: skip


def train_all(config: ComparisonConfig, store: ResultStore) -> None:
    if config.small is not None:
        save_first_layers(train_config(config, ()).base.path, config.small, store.out / "small")
    rates = {name: best_rate(config, store, method) for name, method in config.entrants.items()}

    def spec(name: str, arm: str, steps: int = config.steps, seed: int = config.seed) -> TrainingSpec:
        return TrainingSpec(config.entrants[name], arm, seed, steps, rates[name])

    # First, since the other arms take from these heads their learned draft times and seconds per step.
    for name in config.entrants:
        train_head(config, store, spec(name, STEPS))
    for arm in config.arms:
        if arm in (PARAMETERS, LATENCY):
            sizes = match_sizes(config, store, arm)
            for name in config.entrants:
                train_in_arm(config, store, spec(name, arm), sizes[name])
            if arm == LATENCY:
                measure_trained_heads(config, store)
        elif arm == TIME:
            for name in config.entrants:
                train_in_arm(config, store, spec(name, arm, steps_in_time(config, store, name)))
    for name, seed in product(methods_with_extra_seeds(config, store), config.extra_seeds.seeds):
        train_head(config, store, spec(name, STEPS, seed=seed))
        if config.extra_seeds.in_time and TIME in config.arms:
            train_in_arm(config, store, spec(name, TIME, steps_in_time(config, store, name), seed))


def best_rate(config: ComparisonConfig, store: ResultStore, method: MethodSpec) -> float:
    """Return the learning rate with the best held-out tau, of a tie the first; a single rate is not tried."""
    prepare_corpus_first(config, store, method)
    if len(config.learning_rates.values) == 1:
        return config.learning_rates.values[0]

    def trial_tau(rate: float) -> float:
        spec = TrainingSpec(method, "rate", config.seed, config.trial_steps, rate)
        return trained_entry(config, store, f"{method.name}.rate-{rate:g}", spec)["tau"]

    taus = {rate: trial_tau(rate) for rate in config.learning_rates.values}
    for _ in range(config.learning_rates.beyond):
        if (beyond := next_rate(taus)) is None:
            break
        taus[beyond] = trial_tau(beyond)
    return max(taus, key=lambda rate: taus[rate])


def next_rate(taus: Mapping[float, float]) -> float | None:
    """Return the next rate beyond the best one, at its distance from its neighbour; None between two neighbours.

    1 -> 1.2   2 -> 1.4   4 -> 1.5    ->    8
    """
    rates, best = sorted(taus), max(taus, key=lambda rate: taus[rate])
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:g}")


def prepare_corpus_first(config: ComparisonConfig, store: ResultStore, method: MethodSpec) -> None:
    # One step makes the corpus and the stored hidden states, so that their time counts for no method's training.
    spec = TrainingSpec(method, "prepare", config.seed, 1, config.learning_rates.values[0])
    trained_entry(config, store, "prepare", spec, any_method=True)


def train_in_arm(
    config: ComparisonConfig, store: ResultStore, spec: TrainingSpec, match: SizeMatch | None = None
) -> None:
    equal_steps = run_name(config, spec.method.name, STEPS, spec.seed)
    name = run_name(config, spec.method.name, spec.arm, spec.seed)
    size = (match.key, match.value) if match is not None and match.value is not None else None
    if size is None and spec.steps == config.steps:  # the arm does not change it: its entry names the other head
        entry = {**store.read(TRAINING)[equal_steps], "arm": spec.arm, "same_as": equal_steps}
        store.add(TRAINING, name, entry)
    else:
        trained_entry(config, store, name, replace(spec, size=size))


def train_head(config: ComparisonConfig, store: ResultStore, spec: TrainingSpec) -> Entry:
    return trained_entry(config, store, run_name(config, spec.method.name, spec.arm, spec.seed), spec)


def trained_entry(
    config: ComparisonConfig, store: ResultStore, name: str, spec: TrainingSpec, any_method: bool = False
) -> Entry:
    """Return the entry of a head, which is trained now if it is missing; with `any_method` whatever its overrides."""
    overrides = train_overrides(config, name, store, spec)
    if any_method and name in store.read(TRAINING):  # the corpus is the same, whichever method made it
        return store.read(TRAINING)[name]
    entry = store.find_trained(name, overrides)
    return entry if entry is not None else store.add(TRAINING, name, train_and_record(store, name, overrides, spec))


def train_and_record(store: ResultStore, name: str, overrides: Sequence[str], spec: TrainingSpec) -> Entry:
    run_script("train.py", overrides, store.log_file(name))
    job = read_job(store.run_folder(name))
    if job is None:
        raise InputError(
            f"{store.run_folder(name)} has no validation by decoding; arena.learning_rates.prompts must be >= 1"
        )
    return {
        "entrant": spec.method.name, "arm": spec.arm, "seed": spec.seed, "overrides": list(overrides),
        "steps": spec.steps, "learning_rate": spec.rate, "dial": spec.size, "factors": dict(spec.method.factors),
        "readings": list(spec.method.readings), "parameters": count_head_parameters(store, name), "tau": job.tau,
        "loss": job.loss, "same_as": None,
        "seconds": {clock: round(seconds, 2) for clock, seconds in job.seconds_by_clock.items()},
    }  # fmt: skip


def count_head_parameters(store: ResultStore, name: str) -> int:
    """Return the number of trained parameters: all that the head's file holds."""
    from safetensors import safe_open

    with safe_open(store.run_folder(name) / "drafter.safetensors", "pt") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def seconds_per_step(config: ComparisonConfig, store: ResultStore, method: str) -> float:
    name = run_name(config, method, STEPS, config.seed)
    entry = store.read(TRAINING)[name]
    seconds = entry.get("seconds", {}).get(config.clock)
    if seconds is None:
        untimed = "was trained by a version that did not time its steps"
        raise InputError(f"{name} in {store.out} {untimed}; remove it there to have it trained again")
    return seconds / entry["steps"]


def steps_in_time(config: ComparisonConfig, store: ResultStore, method: str) -> int:
    """Return the number of steps that take the given training time, or the reference's."""
    budget = config.seconds
    if budget is None:
        budget = config.steps * seconds_per_step(config, store, config.reference)
    return max(1, round(budget / seconds_per_step(config, store, method)))


def methods_with_extra_seeds(config: ComparisonConfig, store: ResultStore) -> list[str]:
    """Return the methods trained with more seeds: those named, and the rival with the best held-out tau."""
    names, training = config.extra_seeds.entrants, store.read(TRAINING)
    rivals = [name for name, method in config.entrants.items() if method.rival and name not in names]
    taus = {name: training[run_name(config, name, STEPS, config.seed)]["tau"] for name in rivals}
    return [*names, *([max(rivals, key=taus.__getitem__)] if config.extra_seeds.best_rival and rivals else [])]
