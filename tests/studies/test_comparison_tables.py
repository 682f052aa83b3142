"""Tables and figures from rows, reports and counts that were made up."""

import gzip
import json

import pandas as pd
import pytest
from comparison_parts import report, training

from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec
from studies.comparison.figures import front
from studies.comparison.page import publish, write_page
from studies.comparison.statistics import QUESTIONS, SEEDS
from studies.comparison.store import ResultStore
from studies.comparison.tables import predicted_costs, rebuild

TREES = {
    "chain": {"ce": "per_frame_chain", "ctc": "collapse_chain"},
    "frames": {"ce": "per_frame", "ctc": "collapse"},
    "prefix": {"ctc": "prefix_search"},
}


def test_a_front_has_what_no_cheaper_method_reaches():
    assert front([(0.3, 2.0), (0.1, 1.5), (0.2, 1.4), (0.3, 2.5), (0.9, 2.4)]) == [(0.1, 1.5), (0.3, 2.5)]


def test_predicted_costs_are_the_slower_of_bytes_and_operations():
    plan = HardwareSpec.of({"flops": 100.0, "bandwidth": 10.0})
    cost = {"bytes": 20, "operations": 10, "base_bytes": 100, "base_operations": 50}
    # A step takes 10 s for its bytes; a draft 2 s; 16 nodes 8 s of operations, hidden behind the bytes; 64 nodes 32 s.
    assert predicted_costs(cost, 16, plan) == (0.2, 1.0)
    assert predicted_costs(cost, 64, plan) == (0.2, 3.2)
    with pytest.raises(InputError, match=r"counted\.plan needs flops and bandwidth"):
        predicted_costs(cost, 16, HardwareSpec.of({}))


@pytest.fixture
def store(tmp_path):
    """Two heads with budgets and seeds, and a crossed table of two bodies and two losses."""
    store = ResultStore(tmp_path / "out", tmp_path / "published")
    rows = [training(f"ctc.1x-{rate}.s0", "ctc", "1x", rate=rate, tau=500 * rate) for rate in (0.002, 0.004)]
    rows.append(training("medusa.1x-0.004.s0", "medusa", "1x", tau=1.5))
    for method, tau in {"ctc": 2.02, "medusa": 1.8}.items():
        rows += [training(f"{method}.2x.s{seed}", method, "2x", seed, steps=200, tau=tau) for seed in (0, 1)]
        rows.append(training(f"{method}.4x.s0", method, "4x", steps=400))
    cells = {(body, loss): f"{body}-{loss}-none" for body in ("one", "deep") for loss in ("ce", "ctc")}
    for (body, loss), name in cells.items():
        levels = {"body": body, "objective": loss, "correction": "none"}
        rows += [training(f"{name}.crossed.s{n}", name, "crossed", n, steps=77, levels=levels) for n in (1, 0)]
    for row in rows:
        store.append_row(row)
    cost = {"launches": 9, "synchronisations": 1, "bytes": 20, "operations": 1, "base_bytes": 100, "base_operations": 5}
    store.costs.write_text(json.dumps({"ctc": cost, "medusa": cost}))
    once = {
        "ctc.2x.s0": 2.4,
        "medusa.2x.s0": 1.6,
        "medusa.2x.s0@sparse": 1.9,
        "broken.2x.s0": 9.0,
        "off.2x.s0": 8.0,
        "prompt_lookup": 1.5,
    }
    report(store, "gsm8k-replay-2x.s0", once, ["broken.2x.s0"], ["off.2x.s0"])
    report(store, "gsm8k-replay-4x.s0", {"ctc.4x.s0": 2.4, "medusa.4x.s0": 2.4})
    report(store, "gsm8k-replay-2x.s0.1", {"ctc.2x.s0": 2.5}, size=64)
    report(store, "gsm8k-replay-2x.s1", {"ctc.2x.s1": 2.6, "medusa.2x.s1": 1.6})
    report(store, "gsm8k-adaptive-2x.s0", {"ctc.2x.s0": 2.4, "medusa.2x.s0": 1.6}, timed=True)
    report(store, "gsm8k-fixed_again-2x.s0", {"ctc.2x.s0": 3.0}, timed=True)
    report(store, "gsm8k-fixed-2x.s0", {"ctc.2x.s0": 2.7, "medusa.2x.s0": 1.6, "prompt_lookup": 1.4}, timed=True)
    crossed = {f"{name}.crossed.s0@{TREES['chain'][loss]}": 1.5 + (body == "deep") + 0.25 * (loss == "ctc")
               for (body, loss), name in cells.items()}  # fmt: skip
    # tau of ctc 0.5 more in the prefix tree than in the tree of its frames, which ce builds in another way.
    for (_, loss), name in cells.items():
        frames, prefix = (f"{name}.crossed.s0@{TREES[tree].get(loss)}" for tree in ("frames", "prefix"))
        crossed |= {frames: 2.5, prefix: 3.0} if loss == "ctc" else {frames: 2.0}
    report(store, "gsm8k-replay-crossed.s0", crossed)
    # Another seed of all cells, in chains alone: with it CTC gains 0.25 on one body and 0.55 on the other.
    again = {f"{name}.crossed.s1@{TREES['chain'][loss]}": 1.5 + (body == "deep") + 0.25 * (loss == "ctc")
             + 0.3 * (body == "deep" and loss == "ctc") for (body, loss), name in cells.items()}  # fmt: skip
    report(store, "gsm8k-replay-crossed.s1", again)
    return store


@pytest.fixture
def rules(store):
    return {
        "converged": 0.02, "claims": [["ctc", "medusa"]], "trees": TREES, "unlike": ["frames"], "timed": {"tiny": "2x"},
        "levels": {"body": ["one", "deep"], "objective": ["ce", "ctc"], "correction": ["none"]},
        "counted": {"nodes": 16, "plan": {"flops": 1e3, "bandwidth": 10.0}}, "trainings": [*store.rows()],
        "evaluations": [*store.measured()],
    }  # fmt: skip


def test_heads_and_claims(store, rules, tmp_path):
    rebuild(rules, store, tmp_path / "tables")
    heads = pd.read_csv(tmp_path / "tables" / "heads.csv")
    assert not {"broken.2x.s0", "off.2x.s0"} & {*heads.method}, "not lossless; replayed with another tau than decoded"
    ctc = heads[(heads.method == "ctc") & (heads.measure == "replay") & (heads.seed == 0)].iloc[0]
    assert (ctc.tau, ctc.trials, ctc.hours, ctc.converged, ctc.rate_at_edge) == (2.4, 2, 2.0, "2x", True)
    assert ctc.hours_with_trials == 4.0
    other = heads[heads.method == "medusa@sparse"].iloc[0]
    assert (other.tau, other.tree, other.seed) == (1.9, "sparse", 0)
    assert pd.isna(other.c_counted), "the draft of another tree was not counted"
    assert ctc.predicted == pytest.approx(2.4 / 1.2)
    assert set(heads[heads.method == "medusa"].converged) == {"not converged"}
    assert set(heads[heads.role == "crossed"].tree) == {"chain", "frames", "prefix"}
    lookup = heads[(heads.method == "prompt_lookup") & (heads.measure == "replay")].iloc[0]
    assert (lookup.c_counted, lookup.predicted) == (0.0, 1.5), "a draft without weights"
    main = pd.read_csv(tmp_path / "tables" / "main.csv").set_index(["method", "role", "seed"])
    row = main.loc[("ctc", "2x", 0)]
    assert (row.equal_16, row.compared_16) == (3, 3)
    costs = (row.speedup, row.speedup_16, row.c_16)  # adaptive, then 16 nodes
    assert (row.tau_16, *costs, row.predicted, row.hours) == pytest.approx((2.4, 1.6, 1.8, 0.27, 2.0, 2.0))
    assert (main.loc[("ctc", "2x", 1)].tau_16, main.loc[("ctc", "4x", 0)].tau_16) == (2.6, 2.4)
    claims = pd.read_csv(tmp_path / "tables" / "claims.csv")
    doubled = claims[claims.role == "2x to 4x"].set_index("more")
    assert doubled.tau.to_dict() == pytest.approx({"ctc": 0.0, "medusa": 0.8})
    assert doubled.gain_high.to_dict() == pytest.approx({"ctc": 0.0, "medusa": 0.5})
    seeds = claims[(claims.interval == SEEDS) & (claims.role == "2x")]
    assert list(zip(seeds.more, seeds.less, seeds.seeds, seeds.tau.round(6), strict=True)) == [
        ("ctc", "medusa", "2+2", 0.9)
    ]
    assert seeds.tau_low.iloc[0] == pytest.approx(0.9 - 4.303 * 0.1)
    timed = claims[claims.measure == "fixed"].iloc[0]
    assert (timed.interval, timed.speedup > 0) == (QUESTIONS, True)
    crossed = claims[claims.role == "crossed"]
    decided = crossed[(crossed.tree == "chain") & (crossed.interval == SEEDS)].set_index("factor")
    assert [*decided.index] == ["objective", "body", "body", "objective", "body by objective"]
    interaction = decided.loc["body by objective"]
    assert interaction.more == "deep-ctc-none minus one-ctc-none"
    # (2.75 + 3.05) / 2 - 1.75 - 1: 0.15; squares 0.045 over 4 degrees of freedom, 2.776 sqrt(0.01125 (4 / 2))
    assert (interaction.tau, interaction.tau_low) == pytest.approx((0.15, 0.15 - 2.776 * 0.15))
    effects = crossed[(crossed.interval == QUESTIONS) & (crossed.tree != "both")].set_index(["tree", "factor", "less"])
    assert effects.loc[("chain", "body", "one"), ["more", "pairs"]].tolist() == ["deep", 2]
    assert effects.tau.to_dict() == pytest.approx({
        ("chain", "body", "one"): 1.0, ("chain", "objective", "ce"): 0.25,
        ("frames", "body", "one"): 0.0, ("prefix", "body", "one"): 0.0,  # losses are not compared in `frames`
        ("own", "body", "one"): 0.0, ("own", "objective", "ce"): 1.0,  # ce in its frames, ctc in the prefix tree
    })  # fmt: skip
    trees = crossed[crossed.tree == "both"].set_index(["more", "objective", "less"]).tau.to_dict()
    assert trees == pytest.approx({
        ("frames", "ce", "chain"): 0.0, ("frames", "ctc", "chain"): 0.25, ("prefix", "all", "chain"): 0.75,
        ("prefix", "ctc", "frames"): 0.5,
    }), "the tree of frames is another one for each loss"  # fmt: skip
    names = {file.name for file in (tmp_path / "tables").glob("*.svg")}
    assert names == {"front-tiny.svg", "front-counted-tiny.svg", "budgets-tiny.svg"}


def test_a_head_at_another_rate_is_compared_in_its_place(store, rules, tmp_path):
    for seed in (0, 1):
        store.append_row(training(f"medusa.2x_again.s{seed}", "medusa", "2x_again", seed, steps=200, rate=0.008))
        report(store, f"gsm8k-replay-2x_again.s{seed}", {f"medusa.2x_again.s{seed}": 2.0})
    store.append_row(training("medusa.4x_again.s0", "medusa", "4x_again", steps=400, rate=0.008))
    report(store, "gsm8k-replay-4x_again.s0", {"medusa.4x_again.s0": 2.0})
    rebuild({**rules, "trainings": [*store.rows()], "evaluations": [*store.measured()]}, store, tmp_path)
    claims = pd.read_csv(tmp_path / "claims.csv")
    claims = claims[claims.role.isin(["2x", "2x_again"]) & (claims.interval == SEEDS) & (claims.nodes == 16)]
    assert claims.set_index("role").tau.to_dict() == pytest.approx({"2x": 0.9, "2x_again": 0.5})
    heads = pd.read_csv(tmp_path / "heads.csv")
    ends = heads[(heads.method == "medusa") & (heads.measure == "replay")].groupby("role").converged.unique()
    of_role = {role: ",".join(found) for role, found in ends.items()}
    assert of_role == {"2x": "not converged", "4x": "not converged", "2x_again": "2x", "4x_again": "2x"}


def test_a_cell_at_another_rate_is_compared_in_its_place(store, rules, tmp_path):
    levels = {"body": "deep", "objective": "ctc", "correction": "none"}
    for seed in (0, 1):
        store.append_row(training(f"deep-ctc-none.crossed_again.s{seed}", "deep-ctc-none", "crossed_again", seed,
                                  steps=77, levels=levels, rate=0.008))  # fmt: skip
        report(store, f"gsm8k-replay-crossed_again.s{seed}",
               {f"deep-ctc-none.crossed_again.s{seed}@collapse_chain": 2.5 + 0.1 * seed})  # fmt: skip
    rebuild({**rules, "trainings": [*store.rows()], "evaluations": [*store.measured()]}, store, tmp_path)
    claims = pd.read_csv(tmp_path / "claims.csv")
    again = claims[claims.role == "crossed_again"].set_index("factor")
    assert [*again.index] == ["body", "objective", "body by objective"], "pairs without it are not repeated"
    assert [*again.more] == ["deep-ctc-none", "deep-ctc-none", "deep-ctc-none minus one-ctc-none"]
    assert again.tau.tolist() == pytest.approx([2.55 - 1.75, 2.55 - 2.5, 0.8 - 1.0])
    crossed = claims[(claims.role == "crossed") & (claims.interval == SEEDS) & (claims.more == "deep-ctc-none")]
    assert crossed.tau.tolist() == pytest.approx([2.9 - 1.75, 2.9 - 2.5]), "the cell itself stays as it is"
    heads = pd.read_csv(tmp_path / "heads.csv")
    assert set(heads[heads.role == "crossed_again"].learning_rate) == {0.008}
    assert not set(pd.read_csv(tmp_path / "main.csv").role) & {"crossed", "crossed_again"}


def test_jobs_that_are_not_of_the_config_or_came_later_are_left_out(store, rules, tmp_path):
    store.append_row(training("ctc.1x-0.008.s0", "ctc", "1x", rate=0.008))
    rebuild({**rules, "evaluations": ["tiny/gsm8k-fixed-2x.s0"]}, store, tmp_path)
    heads = pd.read_csv(tmp_path / "heads.csv")
    assert set(heads.measure) == {"fixed"}
    assert set(heads[heads.method == "ctc"].trials) == {2}, "with the later training there are three"


def test_the_page_has_every_table_that_has_rows(store, rules):
    page = (write_page(store, rules) / "page.md").read_text()
    assert "| tiny | ctc | 1.60 [1.20, 2.40] | 2.40 | 9.0 | 0.24 | 3/3 |" in page
    assert "| tiny | ctc minus medusa | 2x | 2+2 | +0.90 [+0.47, +1.33] [+0.47, +1.33] |" in page
    assert page.index("| tiny | ctc | 1.60") < page.index("| tiny | medusa | 1.07"), "sorted by speed-up"
    assert "| one | none | chain | 1.50 | 1.75 |" in page
    trained = "| tiny | ctc | 2x | 0 | 1,000 | 2 | 2.00 | 2x | "
    assert trained + "2.40 | 2.50 | 0.27 | 1.60 [1.20, 2.40] | 9.0 | 1.80 | 2.00 | 3/3 |" in page
    assert "| prefix | frames | CTC | +0.50 [" in page
    assert "| ctc | 1.60 (1.71) | 1.80 (1.93) | 2.00 (2.14) |" in page, "timed twice with 16 nodes"
    assert page.count("<!-- table: ") == 18


def test_published_tables_are_rebuilt(store, rules, tmp_path, capsys):
    for old in ("summary.csv", "raw.tar.gz"):
        (store.results / old).write_text("old\n")
    with pytest.raises(InputError, match="2 rows failed a check"):
        publish(store, rules)
    printed = capsys.readouterr().out
    assert all(f"failed a check: {head}.2x.s0 in tiny/gsm8k-replay-2x.s0\n" in printed for head in ("broken", "off"))
    from studies import results

    names = {file.name for file in store.results.iterdir()}
    kept = {"trainings.csv", "evaluations.jsonl.gz", "costs.json"}
    figures = {"front-tiny.svg", "front-counted-tiny.svg", "budgets-tiny.svg"}
    assert names == kept | figures | {"comparison.json", "main.csv", "heads.csv", "claims.csv"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "RESULTS", store.results.parent)
        patch.setitem(results.STUDIES, "published", {})
        (tmp_path / "again").mkdir()
        results.rebuild("published", tmp_path / "again")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (store.results / file.name).read_bytes(), file.name


def test_evaluations_name_no_folder_of_this_machine(store):
    packed = store.evaluations.read_bytes()
    assert packed[4:8] == bytes(4), "no time, so that the same files give the same bytes"
    text = gzip.decompress(packed).decode()
    assert "out=x" in text
    assert "/tmp" not in text


def test_damaged_evaluations_are_refused(store):
    kept = store.evaluations.read_bytes()
    store.evaluations.write_bytes(kept[:-20])
    with pytest.raises(InputError, match=r"evaluations\.jsonl\.gz is damaged .* restore it"):
        store.measured()


def test_nothing_is_published_without_evaluations(tmp_path):
    with pytest.raises(InputError, match="holds no evaluation"):
        publish(ResultStore(tmp_path / "out", tmp_path / "results"), {})
