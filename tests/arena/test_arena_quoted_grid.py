"""What READMEs quote of a grid, by pencil: cells side by side, and effects one factor after the other."""

import json

import pytest
from arenas import rules_of

from ctcdraft.errors import InputError
from studies.comparison.tables import Found
from studies.readme_grid_tables import ADDED, CELLS, Grid, cells, effects


def head(body, loss, arm="steps", seed=0, readings=("direct", "sparse")):
    factors = {"body": body, "loss": loss, "correction": "none"}
    return {"entrant": f"{body}-{loss}", "arm": arm, "seed": seed, "same_as": None} | {
        "factors": factors,
        "readings": list(readings),
    }


def row(drafter, tau, **changes):
    place = {"kind": "replay", "benchmark": "gsm8k", "temperature": 0.0, "nodes": 16, "drafter": drafter}
    return place | {"tau": tau, "tau_ci": [tau - 0.25, tau + 0.25], "fingerprint": {"base": "a base"}} | changes


def effect(factor, more, less, asked="gsm8k", arm="steps", **changes):
    place = {"kind": "replay", "benchmark": asked, "temperature": 0.0, "nodes": 16, "arm": arm, "factor": factor}
    return (
        place
        | {"more": more, "less": less, "within": "raw tree", "twins": 2, "seeds": 1, "tau": 0.5, "tau_ci": [0.25, 0.75]}
        | changes
    )


@pytest.fixture
def grid():
    training = {
        "a": head("residual", "cross_entropy"),
        "b": head("residual", "ctc"),
        "b.s1": head("residual", "ctc", seed=1),
        "c": head("attention", "ctc"),
        "c.time": head("attention", "ctc", arm="time"),
        "prepare": {"arm": "prepare", "factors": {}},
    }
    rows = [row(f"{run}@{reading}", tau) for run, tau in {"a": 1.5, "b": 1.25, "b.s1": 9.0, "c": 2.0}.items()
            for reading in ("direct", "sparse")]  # fmt: skip
    rows += [row("c@direct", 8.0, nodes=64), row("c@direct", 7.0, benchmark="mt_bench"), row("c.time@direct", 3.0)]
    told = [
        effect("loss", "ctc", "cross_entropy", asked="mt_bench"),
        effect("loss", "ctc", "cross_entropy"),
        effect("loss", "ctc", "cross_entropy", within=None),
        effect("loss", "ctc", "cross_entropy", nodes=64),
        effect("loss", "ctc", "cross_entropy", arm="time"),
        effect("reading", "most probable texts", "raw tree", within=None),
        effect("body", "attention", "residual", within="most probable texts"),
        effect("weight", 0.01, 0),
    ]
    return Grid("a folder", rules_of("grid"), Found(training, {}, {"effects": told}, rows, ()))


def said(columns, row):
    return [cell(row) for cell in columns.values()]


def test_losses_stand_side_by_side_and_a_cell_that_is_not_there_is_a_dash(grid):
    raw, likely = grid.rules.readings_as
    assert [said(CELLS, row) for row in cells(grid)] == [
        ["a base", "steps", "residual heads", "none", raw, "1.50 [1.25, 1.75]", "-", "1.25 [1.00, 1.50]", "-"],
        ["a base", "steps", "residual heads", "none", likely, "1.50 [1.25, 1.75]", "-", "1.25 [1.00, 1.50]", "-"],
        ["a base", "steps", "transformer", "none", raw, "-", "-", "2.00 [1.75, 2.25]", "-"],
        ["a base", "steps", "transformer", "none", likely, "-", "-", "2.00 [1.75, 2.25]", "-"],
        ["a base", "training time", "transformer", "none", raw, "-", "-", "3.00 [2.75, 3.25]", "-"],
    ]


def test_effects_go_factor_by_factor_then_by_what_was_equal(grid):
    gain = "+0.50 [+0.25, +0.75]"
    assert [said(ADDED, row) for row in effects(grid)] == [
        ["a base", "body", "transformer less residual heads", "most probable texts", "steps", "GSM8K", "2", "1", gain],
        ["a base", "loss", "CTC less cross-entropy", "raw tree", "steps", "GSM8K", "2", "1", gain],
        ["a base", "loss", "CTC less cross-entropy", "raw tree", "steps", "MT-Bench", "2", "1", gain],
        ["a base", "loss", "CTC less cross-entropy", "raw tree", "training time", "GSM8K", "2", "1", gain],
        ["a base", "tree", "most probable texts less raw tree", "-", "steps", "GSM8K", "2", "1", gain],
        ["a base", "weight of CTC", "0.01 less 0", "raw tree", "steps", "GSM8K", "2", "1", gain],
    ]


def test_a_grid_that_was_not_measured_is_refused(tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps(rules_of("grid").said))
    (tmp_path / "verdict.json").write_text(json.dumps({"differences": [], "effects": []}))
    with pytest.raises(InputError, match="holds no finished grid, but a README quotes it"):
        Grid.read(tmp_path)
