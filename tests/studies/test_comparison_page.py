"""From finished evaluations to statistics and a page: real ones of a random base, with methods without training."""

import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from comparison_parts import load_comparison_config
from small_evaluations import PROMPTS, Corrupt, evaluate_to, make_evaluation, make_setup, replay_to
from tiny_models import random_base

from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from studies.comparison import page
from studies.comparison.config import MethodSpec
from studies.comparison.evaluate import checked_counts, evaluation_specs, write_counts
from studies.comparison.page import rebuild_pages
from studies.comparison.statistics import factor_effects, write_statistics
from studies.comparison.store import EVALUATIONS, MATCHING, OLD_KEYS, RULES, TRAINING, VERDICT, ResultStore

LOOKUPS = {"ctc_gru": (3, 6), "ctc_gru.s1": (3, 5), "medusa": (1, 2), "medusa@per_frame": (1, 1), "medusa.time": (2, 3)}


def entry(entrant, arm="steps", seed=0, **changes):
    """A line of training.json."""
    values = {
        "entrant": entrant, "arm": arm, "seed": seed, "overrides": [], "steps": 9, "learning_rate": 0.006, "dial": None,
        "factors": {}, "readings": [None], "parameters": 1000, "seconds": {"processor": 3.0, "wall": 4.0},
        "tau": 2.0, "loss": 1.0, "same_as": None,
    }  # fmt: skip
    return values | changes


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A store whose heads are really prompt lookups, replayed and timed; one more method is corrupt."""
    out = tmp_path_factory.mktemp("arena")
    shipped = load_comparison_config(
        "arena", f"arena.out={out}", "arena.pairs=[[ctc_gru,medusa],[medusa,medusa@per_frame]]"
    )
    names = ("ctc_gru", "medusa")
    config = replace(
        shipped,
        entrants={name: shipped.entrants[name] for name in names},
        arms=("steps", "time"),
        replay=replace(shipped.replay, nodes=(4, 8), temperatures=(0.0,), checked=2),
        timing=replace(shipped.timing, nodes=(8,), arms=("steps",), others=("corrupt", "transformers_greedy")),
        benchmarks={"made_up": ("benchmark=tiny",)},
    )
    store = ResultStore(out)
    both = {"readings": [None, "per_frame"]}
    store.write(TRAINING, {
        "ctc_gru": entry("ctc_gru"), "ctc_gru.s1": entry("ctc_gru", seed=1),
        "medusa": entry("medusa", parameters=900, **both), "ctc_gru.time": entry("ctc_gru", "time", same_as="ctc_gru"),
        "ctc_gru.time.s1": entry("ctc_gru", "time", seed=1, same_as="ctc_gru.s1"),
        "medusa.time": entry("medusa", "time", steps=40),
    })  # fmt: skip
    matched = {"key": "drafter.body.inner", "value": 7, "ratio": 0.98, "interval": [0.9, 1.1], "how": "parameters"}
    store.write(MATCHING, {"parameters": {"medusa": matched}})
    setup = make_setup(random_base(initializer_range=0.1), corrupt=Corrupt(), max_new_tokens=24)
    lookups = {name: PromptLookup(setup.base, *values) for name, values in LOOKUPS.items()}
    setup = replace(setup, contestants={**setup.contestants, **lookups})
    evaluate(store, setup, "all-made_up-replay-T0", ReplayEvaluation((4, 8), 2))
    evaluate(store, setup, "all-made_up-loop-8", None)
    write_statistics(config, store)
    page.write_page(config, store)
    return config, store


def evaluate(store, setup, name, replay):
    one = make_evaluation(setup, PROMPTS[:3])
    folder = store.evaluation_folder(name)
    report = evaluate_to(folder, one) if replay is None else replay_to(folder, one, replay)
    nodes = [8] if replay is None else list(replay.nodes)
    kind = "loop" if replay is None else "replay"
    entry = {"overrides": [], "kind": kind, "benchmark": "made_up", "temperature": 0.0, "nodes": nodes, "group": "all"}
    write_counts(store, name, store.add(EVALUATIONS, name, entry))
    return report


def rows(store, evaluation):
    return json.loads((store.evaluation_folder(evaluation) / "report.json").read_text())["rows"]


def test_the_overrides_of_the_evaluations(finished):
    config, store = finished
    replayed, timed = evaluation_specs(config, store)
    runs = [
        str(store.run_folder(name)) for name in ("ctc_gru", "ctc_gru.s1", "medusa", "medusa@per_frame", "medusa.time")
    ]
    [contestants] = [argument for argument in replayed.overrides if argument.startswith("contestants=")]
    # A head that two arms share is evaluated once; every head of a method with all its readings.
    assert contestants.removeprefix("contestants=[").split(",")[:4] == runs[:4]
    assert str(store.run_folder("ctc_gru.time")) not in contestants
    assert "transformers_greedy" not in contestants
    assert {"measure=replay", "measure.nodes=[4,8]", "measure.checked=2"} <= set(replayed.overrides)
    assert "transformers_greedy" in timed.overrides[-1]
    assert "medusa.time" not in timed.overrides[-1]
    assert "ctc_gru.s1" not in timed.overrides[-1], "more seeds are replayed alone"
    hot = replace(config, replay=replace(config.replay, temperatures=(0.5,)))
    sampled = next(evaluation_specs(hot, store)).overrides
    assert {"decoding=sampling", "decoding.temperature=0.5"} <= set(sampled)
    assert "medusa.time" in replayed.overrides[-1]
    assert "medusa.time" not in sampled[-1], "sampled decoding is of the arm of equal steps alone"
    in_time = replace(hot, replay=replace(hot.replay, sampled=("time",)))
    # Both seeds of the head that equal steps and equal time share, and the one trained anew in both its readings.
    contestants = ",".join([*runs[:2], runs[4], f"{runs[4]}@per_frame", "corrupt"])
    assert next(evaluation_specs(in_time, store)).overrides[-1] == f"contestants=[{contestants}]"


def test_seeds_are_pooled_and_differences_are_those_of_the_reports(finished):
    store = finished[1]
    differences = {
        (one["kind"], one["nodes"], one["arm"], one["more"], one["less"]): one
        for one in store.read(VERDICT)["differences"]
    }
    by_name = {(row["drafter"], row["nodes"]): row for row in rows(store, "all-made_up-replay-T0")}
    tokens, passes = (sum(by_name[name, 8][key] for name in ("ctc_gru", "ctc_gru.s1")) for key in ("tokens", "passes"))
    one = differences["replay", 8, "steps", "ctc_gru", "medusa"]
    assert one["seeds"] == [2, 1]
    assert one["tau"] == pytest.approx(tokens / passes - by_name["medusa", 8]["tau"])
    assert one["tau_ci"][0] <= one["tau"] <= one["tau_ci"][1]
    in_time = differences["replay", 8, "time", "ctc_gru", "medusa"]
    assert in_time["tau"] == pytest.approx(by_name["ctc_gru", 8]["tau"] - by_name["medusa.time", 8]["tau"])
    assert differences["loop", 8, "steps", "ctc_gru", "medusa"]["speedup"] is not None
    assert one["speedup"] is None
    assert differences["replay", 4, "steps", "medusa", "medusa@per_frame"]["questions"] == 3


def test_the_page_names_rows_that_failed_the_losslessness_check_instead_of_printing_them(finished):
    store = finished[1]
    text = (store.out / "page.md").read_text()
    by_replay = {(row["drafter"], row["nodes"]): row["tau"] for row in rows(store, "all-made_up-replay-T0")}
    assert "Not printed, as it failed the losslessness check: corrupt, all-made_up-loop-8." in text
    assert "| corrupt |" not in text
    assert "## Equal training time (made_up)" in text
    assert "| medusa@per_frame | 900 | 0.90 | 9 | 3 | 0.006 |" in text
    assert "4/4, steps 6/6" in text  # two questions of three turns, each at two sizes
    assert "| ctc_gru minus medusa | made_up | 0 | steps | 8 | replay | 2 and 1 |" in text
    assert "| parameters | medusa | drafter.body.inner=7 | 0.98 [0.90, 1.10] | parameters |" in text
    assert "## Seeds" in text
    taus = [by_replay[name, 8] for name in ("ctc_gru", "ctc_gru.s1")]
    for arm in ("steps", "time"):
        shown = " ".join(f"{tau:.3f}" for tau in taus)
        assert f"| {arm} | ctc_gru | made_up | 8 | {shown} |" in text
    for drawing in ("nodes.svg", "costs.svg"):
        shapes = list(ET.parse(store.out / drawing).getroot())
        assert any(node.tag.endswith(("polyline", "circle")) for node in shapes)
    lines = (store.out / "page.csv").read_text().splitlines()
    assert (
        len(lines) == 1 + sum(len(rows(store, name)) for name in store.read(EVALUATIONS)) - 3
    )  # corrupt: 2 sizes, loop
    assert "/tmp" not in text


def test_it_is_rebuilt_from_its_json_files_alone(finished, tmp_path, capsys):
    """Without heads, prompts and responses: statistics, page and figures."""
    config, store = finished
    narrowed = {
        "arms": list(config.arms), "benchmarks": {"made_up": ["benchmark=tiny"], "tiny": None},
        "entrants": {name: config.raw_config["entrants"][name] for name in config.entrants},
        "extra_seeds": {"seeds": [1], "entrants": ["ctc_gru"], "best_rival": False},
        "replay": {"nodes": [4, 8], "temperatures": [0.0], "checked": 2},
        "timing": {"nodes": [8], "arms": ["steps"], "others": list(config.timing.others), "overrides": []},
    }  # fmt: skip
    ResultStore(tmp_path).write(RULES, {**config.raw_config, **narrowed})
    for name in (TRAINING, MATCHING, EVALUATIONS):
        shutil.copy(store.out / f"{name}.json", tmp_path)
    for name in store.read(EVALUATIONS):
        (tmp_path / "evaluations" / name).mkdir(parents=True)
        for file in ("report.json", "counts.json"):
            shutil.copy(store.evaluation_folder(name) / file, tmp_path / "evaluations" / name)
    rebuild_pages([str(tmp_path)])
    assert str(tmp_path / "page.md") in capsys.readouterr().out
    for name in ("verdict.json", "page.md", "page.csv", "nodes.svg", "costs.svg"):
        assert (tmp_path / name).read_text() == (store.out / name).read_text()
    for file in tmp_path.glob("*.json"):  # as it was written before these keys were renamed
        text = file.read_text()
        for old, new in OLD_KEYS.items():
            text = text.replace(f'"{new}":', f'"{old}":')
        file.write_text(text)
    assert '"words":' in (tmp_path / "training.json").read_text()
    rebuild_pages([str(tmp_path)])
    assert (tmp_path / "page.md").read_text() == (store.out / "page.md").read_text()
    with pytest.raises(InputError, match=r"evaluations holds no finished comparison: there is no rules\.json"):
        rebuild_pages([str(tmp_path / "evaluations")])
    ResultStore(tmp_path).write(RULES, {"title": "of tomorrow"})
    with pytest.raises(InputError, match=r"rules\.json is of another version"):
        rebuild_pages([str(tmp_path)])


def test_counts_sum_to_the_rows_and_hold_no_text(finished, tmp_path):
    store = finished[1]
    name = "all-made_up-loop-8"
    by_name = {row["drafter"]: row for row in rows(store, name)}
    for drafter, sizes in checked_counts(store, name, rows(store, name)).items():
        [sums] = sizes.values()
        assert (sum(sums.passes), sum(sums.committed)) == (by_name[drafter]["passes"], by_name[drafter]["tokens"])
        assert sum(sums.said) / sum(sums.seconds) == pytest.approx(by_name[drafter]["tokens_per_second"], rel=1e-3)
        assert {type(cell) for column in vars(sums).values() for cell in column} <= {int, float}
    assert set(
        checked_counts(store, "all-made_up-replay-T0", rows(store, "all-made_up-replay-T0"))["autoregressive"]
    ) == {4, 8}


def test_counts_of_an_earlier_evaluation_are_counted_again(finished, tmp_path):
    store, name = ResultStore(tmp_path), "all-made_up-loop-8"
    shutil.copytree(finished[1].evaluation_folder(name), store.evaluation_folder(name))
    entry, file = finished[1].read(EVALUATIONS)[name], store.evaluation_folder(name) / "counts.json"
    right = file.read_text()
    one = json.loads(right)
    one["medusa"]["8"]["passes"][0] += 1
    for wrong in (json.dumps(one), "{}", "torn"):
        file.write_text(wrong)
        with pytest.raises(InputError, match=r"does not match the report\.json beside it; count again"):
            checked_counts(store, name, rows(store, name))
        write_counts(store, name, entry)
        assert file.read_text() == right
    file.unlink()
    (store.evaluation_folder(name) / "questions.jsonl").unlink()
    with pytest.raises(InputError, match="are not those of its report"):
        write_counts(store, name, entry)


def test_a_size_that_failed_the_losslessness_check_is_in_no_statistics(finished, tmp_path):
    """Even of a drafter whose other size passed it."""
    config, store = finished
    shutil.copytree(store.out / "evaluations", tmp_path / "evaluations")
    bad = ResultStore(tmp_path)
    for part in (TRAINING, EVALUATIONS):
        bad.write(part, store.read(part))
    file = bad.evaluation_folder("all-made_up-replay-T0") / "report.json"
    report = json.loads(file.read_text())
    [row] = [row for row in report["rows"] if (row["drafter"], row["nodes"]) == ("medusa", 8)]
    row["lossless"]["owed"]["wrong"] = 1
    file.write_text(json.dumps(report))
    write_statistics(replace(config, out=tmp_path), bad)
    differences = {
        (one["nodes"], one["more"], one["less"])
        for one in bad.read(VERDICT)["differences"]
        if (one["kind"], one["arm"]) == ("replay", "steps")
    }
    assert (4, "ctc_gru", "medusa") in differences
    assert (8, "ctc_gru", "medusa") not in differences


def test_the_page_of_a_grid_shows_every_cell_though_its_config_names_the_last_alone(finished):
    config, store = finished
    last = replace(config, entrants={"medusa": config.entrants["medusa"]})
    data = page.ComparisonData.of(store)
    assert page.seeds_section(last, data) == page.seeds_section(config, data)
    assert [tuple(line.split(" | ")[:2]) for line in page.seeds_section(last, data)[1].splitlines()[2:]] == [
        ("| steps", "ctc_gru"),
        ("| time", "ctc_gru"),
    ]

    training = dict(data.training)
    own = ["drafter=eagle", "trainer.anchors_per_sequence=128", "trainer.learning_rate=0.1", "trainer.steps=9"]
    training["ctc_gru"] = {**training["ctc_gru"], "overrides": [*config.shared_overrides, *own]}
    text = page.equal_conditions(last, replace(data, training=training))
    assert text.splitlines()[3:] == ["- not equal: ctc_gru trains with `trainer.anchors_per_sequence=128`"]


def test_unmatched_methods_are_named(finished):
    config, store = finished
    one = {"key": "", "value": None, "interval": None, "how": ""}
    matching = {"latency": {"medusa": one | {"ratio": 1.0}}, "parameters": {"medusa": one | {"ratio": 0.56}}}
    matching["latency, once trained"] = {"ctc_gru": one | {"ratio": 1.0}, "medusa": one | {"ratio": 1.3}}
    data = replace(page.ComparisonData.of(store), matching=matching)
    arms = replace(config, arms=("steps", "parameters", "latency"))
    text = page.conditions_section(arms, data)
    assert "Not matched within 5% in the arm of parameters: medusa, 0.56." in text
    assert "in the arm of latency: medusa, 1.30." in text, "the draft time of the trained heads counts"
    assert "Not matched" not in page.conditions_section(config, data), "arms that are not part of the comparison"


def test_seeds_of_a_cell_are_pooled(finished, tmp_path):
    config, store = finished
    cells = {"ctc_gru": ("x", 0), "ctc_gru.s1": ("x", 1), "medusa": ("y", 0), "medusa.time": ("y", 1)}
    lone = {"medusa@per_frame": entry("x", seed=2, factors={"loss": "y"})}  # x was not trained with that seed
    grid = ResultStore(tmp_path)
    shutil.copytree(store.out / "evaluations", tmp_path / "evaluations")
    grid.write(EVALUATIONS, store.read(EVALUATIONS))
    training = {name: entry(name, seed=seed, factors={"loss": loss}) for name, (loss, seed) in cells.items()}
    grid.write(TRAINING, training | lone)
    write_statistics(replace(config, entrants={"x": MethodSpec("x", ())}, pairs=(), arms=("steps",)), grid)
    [effects] = [one for one in grid.read(VERDICT)["effects"] if one["nodes"] == 8]
    by_name = {(row["drafter"], row["nodes"]): row for row in rows(store, "all-made_up-replay-T0")}

    def tau(*names):
        return sum(by_name[n, 8]["tokens"] for n in names) / sum(by_name[n, 8]["passes"] for n in names)

    assert (effects["more"], effects["less"], effects["twins"], effects["seeds"]) == ("y", "x", 1, 2)
    assert effects["tau"] == pytest.approx(tau("medusa", "medusa.time") - tau("ctc_gru", "ctc_gru.s1"))


def test_the_effect_of_a_factor_is_over_cells_that_differ_in_it_alone(finished, tmp_path):
    """Four cells of two factors, two pairs for each, and a cell without a pair."""
    config, store = finished
    cells = {"ctc_gru": ("a", "x"), "ctc_gru.s1": ("b", "x"), "medusa": ("a", "y"), "medusa.time": ("b", "y")}
    lone = {"medusa@per_frame": entry("lone", factors={"body": "c", "loss": "z"})}
    training = {name: entry(name, factors={"body": body, "loss": loss}) for name, (body, loss) in cells.items()}
    grid = ResultStore(tmp_path)
    shutil.copytree(store.out / "evaluations", tmp_path / "evaluations")
    grid.write(EVALUATIONS, store.read(EVALUATIONS))
    grid.write(TRAINING, training | lone)
    write_statistics(replace(config, entrants={"x": MethodSpec("x", ())}, pairs=(), arms=("steps",)), grid)
    effects = {(one["factor"], one["nodes"]): one for one in grid.read(VERDICT)["effects"] if one["nodes"] == 8}
    assert set(effects) == {("body", 8), ("loss", 8)}
    by_name = {(row["drafter"], row["nodes"]): row for row in rows(store, "all-made_up-replay-T0")}

    def tau(*names):
        return sum(by_name[n, 8]["tokens"] for n in names) / sum(by_name[n, 8]["passes"] for n in names)

    assert (effects["loss", 8]["more"], effects["loss", 8]["less"], effects["loss", 8]["twins"]) == ("y", "x", 2)
    wanted = tau("medusa", "medusa.time") - tau("ctc_gru", "ctc_gru.s1")
    assert effects["loss", 8]["tau"] == pytest.approx(wanted)
    page.write_page(replace(config, entrants={"x": MethodSpec("x", ())}, pairs=(), arms=("steps",)), grid)
    text = (tmp_path / "page.md").read_text()
    assert "| loss | y minus x | all | made_up | 0 | steps | 8 | replay | 2 | 1 |" in text
    drawing = ET.parse(tmp_path / "factors.svg").getroot()
    assert sum(node.tag.endswith("circle") for node in drawing) == 10  # five cells in two panels


def test_the_effect_of_a_factor_is_also_computed_for_each_tree(finished):
    """y is better with the n most probable texts, x with a raw tree; over both they are equal."""
    config = replace(finished[0], readings_as=("raw tree", "probable texts"))
    training = {name: entry(name, factors={"loss": name}, readings=["raw", "best"]) for name in ("x", "y")}
    passes = {"x@raw": 10, "x@best": 20, "y@raw": 20, "y@best": 10, AUTOREGRESSIVE: 40}
    answers = {(name, 8): QuestionSums([40, 40], [count, count]) for name, count in passes.items()}
    effects = {(one["factor"], one["within"]): one for one in factor_effects(config, training, answers, "steps", 8)}
    assert {key: (one["twins"], one["tau"]) for key, one in effects.items()} == {
        ("loss", None): (2, 0.0),
        ("loss", "raw tree"): (1, -2.0),
        ("loss", "probable texts"): (1, 2.0),
        ("reading", None): (2, 0.0),
    }


def test_the_choice_of_learning_rates_is_described():
    several = load_comparison_config("arena")
    text = page.describe_learning_rate(several)
    assert text.startswith("the best of 0.002, 0.006, 0.012 and up to 2 more beyond an edge for each method")
    assert "tried for 600 steps" in text
    one = replace(several, learning_rates=replace(several.learning_rates, values=(0.024,)))
    assert page.describe_learning_rate(one) == "0.024 for all"
