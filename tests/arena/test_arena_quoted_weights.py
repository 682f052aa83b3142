"""What a README quotes of a sweep of weights, by pencil: seed by seed, and what a weight adds to none."""

from arenas import rules_of

from studies.comparison.tables import Found
from studies.readme_grid_tables import Grid
from studies.readme_weight_tables import WEIGHED, weighed

CHAIN, TREE = rules_of("grid_weights").readings_as


def head(weight, seed=0, arm="steps"):
    factors = {"body": None, "loss": None, "correction": None, "weight": weight}
    return {"entrant": f"w{weight}", "arm": arm, "seed": seed, "same_as": None, "factors": factors} | {
        "readings": ["chain", "tree"]
    }


def row(drafter, tau, **changes):
    place = {"kind": "replay", "benchmark": "gsm8k", "temperature": 0.0, "nodes": 16, "drafter": drafter}
    return place | {"tau": tau, "tau_ci": [tau, tau], "fingerprint": {"base": "a base"}} | changes


def effect(more, within, tau, **changes):
    place = {"kind": "replay", "benchmark": "gsm8k", "temperature": 0.0, "nodes": 16, "arm": "steps"}
    made = {"factor": "weight", "more": more, "less": 0, "within": within, "twins": 1, "seeds": 2, "tau": tau}
    return place | made | {"tau_ci": [tau - 0.25, tau + 0.25]} | changes


def test_seeds_stand_side_by_side_and_the_first_weight_adds_nothing_to_itself():
    training = {
        "b": head(0.01),  # trained first, told behind the weight that it is set against
        "a": head(0),
        "a.s1": head(0, seed=1),
        "b.s1": head(0.01, seed=1),
        "c": head(1.0),
        "c.time": head(1.0, arm="time"),
    }
    rows = [row(f"{name}@chain", tau) for name, tau in {"a": 1.5, "a.s1": 1.25, "b.s1": 1.75, "b": 2.0}.items()]
    rows += [row("b@tree", 3.0), row("b@tree", 9.0, nodes=64), row("c.time@chain", 9.0)]  # c itself is not certified
    told = [
        effect(0.01, CHAIN, 0.5),
        effect(0.01, CHAIN, 9.0, benchmark="mt_bench"),
        effect(0.01, CHAIN, 9.0, arm="time"),
        effect(1.0, CHAIN, 9.0, factor="loss"),
        effect(0.01, TREE, -0.25),
        effect(0, TREE, 9.0, less=0.01),
    ]
    grid = Grid(
        "a folder", rules_of("grid_weights", "arena.arms=[steps]"), Found(training, {}, {"effects": told}, rows, ())
    )
    assert [[cell(row) for cell in WEIGHED.values()] for row in weighed(grid)] == [
        ["a base", "0", CHAIN, "steps", "1.50, 1.25", "-"],
        ["a base", "0.01", CHAIN, "steps", "2.00, 1.75", "+0.50 [+0.25, +0.75]"],
        ["a base", "0.01", TREE, "steps", "3.00, -", "-0.25 [-0.50, +0.00]"],
    ]
