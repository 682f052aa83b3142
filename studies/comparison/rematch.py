"""Heads of the arm of equal draft time, timed once they are trained, and turned again where they are not equal then. It
turns no dial itself (matching.py) and trains nobody (training.py).

Where the clock could not tell 5 %, dials were turned by operations and bytes. On a small base those miss most of what a
draft costs, its many small steps: rivals that were equal by count drafted in half of the reference's time, and an arm
in which the default head may think twice as long proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from studies.comparison.config import LATENCY, ComparisonConfig
from studies.comparison.matching import CostMeter, SizeMatch, match_sizes, ratio_of_medians
from studies.comparison.store import MATCHING, TRAINING, Entry, ResultStore

AFTER_TRAINING = "latency, once trained"  # beside the arms in matching.json


def measure_trained_heads(config: ComparisonConfig, store: ResultStore) -> None:
    """How long the heads of the arm of equal draft time draft once they are trained, over the reference's."""
    there, entries = store.read(MATCHING).get(AFTER_TRAINING, {}), latency_heads(config, store)
    if {name: one["words"] for name, one in there.items()} == {name: one["words"] for name, one in entries.items()}:
        return
    bench, dials, heads = CostMeter(config, store), match_sizes(config, store, LATENCY), {}
    for name, entry in entries.items():
        dial = config.entrants[name].dials.get(LATENCY) if dials[name].value is not None else None
        heads[name] = bench.load_head(config.entrants[name], entry["run"], dial, dials[name].value)
    taken = bench.draft_seconds(heads)
    found = {}
    for name, entry in entries.items():
        ratio, interval = ratio_of_medians(taken[name], taken[config.reference], config.seed)
        how = "draft time of the trained head, medians of interleaved repeats"
        made = SizeMatch(dials[name].key, dials[name].value, ratio, interval, how)
        found[name] = asdict(made) | {"run": entry["run"], "words": entry["words"]}
    store.add(MATCHING, AFTER_TRAINING, found)


def latency_heads(config: ComparisonConfig, store: ResultStore) -> dict[str, Entry]:
    """By entrant, its head of equal draft time, with the name of the run that holds it."""
    return {
        entry["entrant"]: {**entry, "run": entry["same_as"] or name}
        for name, entry in store.read(TRAINING).items()
        if (entry["arm"], entry["seed"]) == (LATENCY, config.seed) and entry["entrant"] in config.entrants
    }


def rematch(config: ComparisonConfig, store: ResultStore) -> dict[str, SizeMatch]:
    """Entrants whose trained heads are not as dear as the reference's, with the value of their dials that comes nearer.
    Their heads are forgotten. Once an arm: nobody's budget depends on how often a command was run."""
    dials, entries, bench, moved = match_sizes(config, store, LATENCY), latency_heads(config, store), None, {}
    if any(one.again for one in dials.values()):
        return {}
    for name, ratio in mismatched_heads(config, store, dials):
        bench = bench or CostMeter(config, store)
        made = bench.rematch(config.entrants[name], entries[name]["run"], dials[name], ratio)
        if abs(made.ratio - 1) < abs(ratio - 1):
            moved[name] = made
    runs = {entries[name]["run"] for name in moved}
    # First forgotten, then turned: in the other order a kill between would leave heads that no dial here made.
    store.write(TRAINING, {name: one for name, one in store.read(TRAINING).items() if name not in runs})
    turned = {name: replace(moved.get(name, one), again=True) for name, one in dials.items()}
    store.add(MATCHING, LATENCY, {name: asdict(one) for name, one in turned.items()})
    return moved


def mismatched_heads(
    config: ComparisonConfig, store: ResultStore, dials: Mapping[str, SizeMatch]
) -> Iterator[tuple[str, float]]:
    """Whose trained head takes a time that no tolerance makes the reference's, and whose dial has not come to its end;
    and how long it takes, over the reference's."""
    tolerance = config.matching.tolerance
    for name, measured in store.read(MATCHING)[AFTER_TRAINING].items():
        one, dial, (low, high) = dials[name], config.entrants[name].dials.get(LATENCY), measured["interval"]
        if one.value is None or dial is None or low - tolerance <= 1 <= high + tolerance:
            continue
        if one.value < dial.most if measured["ratio"] < 1 else one.value > dial.least:
            yield name, measured["ratio"]
