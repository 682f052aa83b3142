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


def run_name(rules: ComparisonConfig, entrant: str, arm: str, seed: int) -> str:
    """ctc, ctc.time, ctc.time.s1"""
    parts = [entrant, *([arm] if arm != STEPS else []), *([f"s{seed}"] if seed != rules.seed else [])]
    return ".".join(parts)


def train_overrides(rules: ComparisonConfig, name: str, book: ResultStore, one: TrainingSpec) -> list[str]:
    return [
        *rules.work, *one.entrant.words,
        *([f"{one.dial[0]}={one.dial[1]}"] if one.dial is not None else []),
        f"trainer.learning_rate={one.rate:g}", f"trainer.steps={one.steps}", f"trainer.probe_every={one.steps}",
        f"trainer.probe_prompts={rules.rates.prompts}", f"seed={one.seed}", f"drafter.name={name}",
        f"run={book.run(name)}", "overwrite=true",
        *([f"data_seed={rules.seed}"] if one.seed != rules.seed else []),  # the corpus stays what it is
    ]  # fmt: skip


def train_all(rules: ComparisonConfig, book: ResultStore) -> None:
    """Every head of every arm that is not there yet."""
    if rules.small is not None:
        save_first_layers(train_config(rules, ()).base.path, rules.small, book.out / "small")
    rates = {name: best_rate(rules, book, entrant) for name, entrant in rules.entrants.items()}
    for name, entrant in rules.entrants.items():
        train_head(rules, book, TrainingSpec(entrant, STEPS, rules.seed, rules.steps, rates[name]))
    for arm in rules.arms:
        if arm in (PARAMETERS, LATENCY):
            matched = match_sizes(rules, book, arm)
            for name, entrant in rules.entrants.items():
                train_in_arm(rules, book, TrainingSpec(entrant, arm, rules.seed, rules.steps, rates[name]), matched.get(name))
            if arm == LATENCY:
                measure_trained_heads(rules, book)
                for name, dial in rematch(rules, book).items():
                    train_in_arm(rules, book, TrainingSpec(rules.entrants[name], arm, rules.seed, rules.steps, rates[name]), dial)
                measure_trained_heads(rules, book)
        elif arm == TIME:
            for name, entrant in rules.entrants.items():
                steps = steps_in_time(rules, book, name)
                train_in_arm(rules, book, TrainingSpec(entrant, arm, rules.seed, steps, rates[name]), None)
    for name, seed in product(methods_with_extra_seeds(rules, book), rules.again.seeds):
        train_head(rules, book, TrainingSpec(rules.entrants[name], STEPS, seed, rules.steps, rates[name]))
        if rules.again.in_time and TIME in rules.arms:
            steps = steps_in_time(rules, book, name)
            train_in_arm(rules, book, TrainingSpec(rules.entrants[name], TIME, seed, steps, rates[name]), None)


def best_rate(rules: ComparisonConfig, book: ResultStore, entrant: MethodSpec) -> float:
    """Of a tie the first. While the best lies at an edge of what was tried, one rate beyond it is tried as well. A
    single rate is not tried."""
    prepare_corpus_first(rules, book, entrant)
    if len(rules.rates.values) == 1:
        return rules.rates.values[0]

    def tried(rate: float) -> float:
        one = TrainingSpec(entrant, "rate", rules.seed, rules.trial_steps, rate)
        return trained_entry(rules, book, f"{entrant.name}.rate-{rate:g}", one)["tau"]

    taus = {rate: tried(rate) for rate in rules.rates.values}
    for _ in range(rules.rates.beyond):
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


def prepare_corpus_first(rules: ComparisonConfig, book: ResultStore, entrant: MethodSpec) -> None:
    """Corpus and stored states are made by whoever comes first, and shall be counted to nobody's training."""
    trained_entry(rules, book, "prepare", TrainingSpec(entrant, "prepare", rules.seed, 1, rules.rates.values[0]), first=True)


def train_in_arm(rules: ComparisonConfig, book: ResultStore, one: TrainingSpec, matched: SizeMatch | None) -> None:
    """An entrant that an arm leaves as it was is not trained again: its entry names the head it shares."""
    as_it_was = run_name(rules, one.entrant.name, STEPS, one.seed)
    name = run_name(rules, one.entrant.name, one.arm, one.seed)
    unchanged = matched is None or matched.value is None
    if one.arm == TIME:
        unchanged = one.steps == rules.steps
    if unchanged:
        entry = {**book.read(TRAINING)[as_it_was], "arm": one.arm, "same_as": as_it_was}
        book.add(TRAINING, name, entry)
        return
    dial = (matched.key, matched.value) if matched is not None and matched.value is not None else None
    trained_entry(rules, book, name, TrainingSpec(one.entrant, one.arm, one.seed, one.steps, one.rate, dial))


def train_head(rules: ComparisonConfig, book: ResultStore, one: TrainingSpec) -> Entry:
    return trained_entry(rules, book, run_name(rules, one.entrant.name, one.arm, one.seed), one)


def trained_entry(rules: ComparisonConfig, book: ResultStore, name: str, one: TrainingSpec, first: bool = False) -> Entry:
    """The book's entry of a head, trained now where it is not there. first: anybody's run of that name will do."""
    words = train_overrides(rules, name, book, one)
    if first and name in book.read(TRAINING):
        return book.read(TRAINING)[name]
    found = book.trained(name, words)
    return found if found is not None else book.add(TRAINING, name, train_and_record(book, name, words, one))


def train_and_record(book: ResultStore, name: str, words: Sequence[str], one: TrainingSpec) -> Entry:
    run_script("train.py", words, book.log(name))
    job = read_job(book.run(name))
    if job is None:
        raise InputError(f"{book.run(name)} was trained without a probe; arena.rates.prompts must be 1 or more")
    return {
        "entrant": one.entrant.name, "arm": one.arm, "seed": one.seed, "words": list(words), "steps": one.steps,
        "learning_rate": one.rate, "dial": one.dial, "factors": dict(one.entrant.factors),
        "readings": list(one.entrant.readings), "parameters": count_head_parameters(book, name), "tau": job.tau,
        "loss": job.loss, "same_as": None,
        "seconds": {clock: round(spent, 2) for clock, spent in job.seconds_by_clock.items()},
    }  # fmt: skip


def count_head_parameters(book: ResultStore, name: str) -> int:
    """Trained numbers of a head: all that its file holds."""
    from math import prod

    from safetensors import safe_open

    with safe_open(book.run(name) / "drafter.safetensors", "pt") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def seconds_per_step(rules: ComparisonConfig, book: ResultStore, entrant: str) -> float:
    """Seconds of a step in its run of equal steps."""
    name = run_name(rules, entrant, STEPS, rules.seed)
    entry = book.read(TRAINING)[name]
    spent = entry.get("seconds", {}).get(rules.clock)
    if spent is None:
        raise InputError(
            f"{name} in {book.out} was trained by a version that kept no clock of its steps; remove it there, and it "
            "is trained again"
        )
    return spent / entry["steps"]


def steps_in_time(rules: ComparisonConfig, book: ResultStore, entrant: str) -> int:
    """As many steps as fit into the seconds that are given, or that the reference spent on its own."""
    budget = rules.seconds if rules.seconds is not None else rules.steps * seconds_per_step(rules, book, rules.reference)
    return max(1, round(budget / seconds_per_step(rules, book, entrant)))


def methods_with_extra_seeds(rules: ComparisonConfig, book: ResultStore) -> list[str]:
    """Who is trained with more seeds: those named, and the rival with the best tau on the held-out prompts."""
    names, there = rules.again.entrants, book.read(TRAINING)
    rivals = [name for name, entrant in rules.entrants.items() if entrant.rival and name not in names]
    tau = partial(held_out_tau, there, rules)
    best = [max(rivals, key=tau)] if rules.again.best_rival and rivals else []
    return [*names, *best]


def held_out_tau(there: dict[str, Any], rules: ComparisonConfig, entrant: str) -> float:
    return there[run_name(rules, entrant, STEPS, rules.seed)]["tau"]
