"""From finished evaluations to a verdict and a page: real ones of a random base, by contestants without training."""

import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from arenas import load_comparison_config
from sessions import PROMPTS, Corrupt, evaluate_to, make_evaluation, make_setup, replay_to
from tiny_models import random_base

from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from studies.comparison import page
from studies.comparison.config import MethodSpec
from studies.comparison.evaluate import checked_counts, evaluation_specs, write_counts
from studies.comparison.run import rebuild_pages
from studies.comparison.statistics import factor_effects, write_statistics
from studies.comparison.store import EVALUATIONS, MATCHING, RULES, TRAINING, VERDICT, ResultStore

LOOKUPS = {"ctc_gru": (3, 6), "ctc_gru.s1": (3, 5), "medusa": (1, 2), "medusa@direct": (1, 1), "medusa.time": (2, 3)}


def entry(entrant, arm="steps", seed=0, **changes):
    """A line of training.json."""
    made = {
        "entrant": entrant, "arm": arm, "seed": seed, "words": [], "steps": 9, "learning_rate": 0.006, "dial": None,
        "factors": {}, "readings": [None], "parameters": 1000, "seconds": {"processor": 3.0, "wall": 4.0},
        "tau": 2.0, "loss": 1.0, "same_as": None,
    }  # fmt: skip
    return made | changes


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A book with heads that are prompt lookups in truth, replayed and timed, one of the rows corrupt."""
    out = tmp_path_factory.mktemp("arena")
    made = load_comparison_config("arena", f"arena.out={out}", "arena.pairs=[[ctc_gru,medusa],[medusa,medusa@direct]]")
    names = ("ctc_gru", "medusa")
    rules = replace(
        made,
        entrants={name: made.entrants[name] for name in names},
        arms=("steps", "time"),
        replay=replace(made.replay, nodes=(4, 8), temperatures=(0.0,), checked=2),
        timing=replace(made.timing, nodes=(8,), arms=("steps",), others=("corrupt", "transformers_greedy")),
        benchmarks={"made_up": ("benchmark=tiny",)},
    )
    book = ResultStore(out)
    both = {"readings": [None, "direct"]}
    book.write(TRAINING, {
        "ctc_gru": entry("ctc_gru"), "ctc_gru.s1": entry("ctc_gru", seed=1),
        "medusa": entry("medusa", parameters=900, **both), "ctc_gru.time": entry("ctc_gru", "time", same_as="ctc_gru"),
        "ctc_gru.time.s1": entry("ctc_gru", "time", seed=1, same_as="ctc_gru.s1"),
        "medusa.time": entry("medusa", "time", steps=40),
    })  # fmt: skip
    matched = {"key": "drafter.body.inner", "value": 7, "ratio": 0.98, "interval": [0.9, 1.1], "how": "parameters"}
    book.write(MATCHING, {"parameters": {"medusa": matched}})
    here = make_setup(random_base(initializer_range=0.1), corrupt=Corrupt(), max_new_tokens=24)
    lookups = {name: PromptLookup(here.base, *values) for name, values in LOOKUPS.items()}
    here = replace(here, contestants={**here.contestants, **lookups})
    evaluate(book, here, "all-made_up-replay-T0", ReplayEvaluation((4, 8), 2))
    evaluate(book, here, "all-made_up-loop-8", None)
    write_statistics(rules, book)
    page.write_page(rules, book)
    return rules, book


def evaluate(book, here, name, replay):
    one = make_evaluation(here, PROMPTS[:3])
    folder = book.evaluation_folder(name)
    made = evaluate_to(folder, one) if replay is None else replay_to(folder, one, replay)
    nodes = [8] if replay is None else list(replay.nodes)
    kind = "loop" if replay is None else "replay"
    entry = {"words": [], "kind": kind, "benchmark": "made_up", "temperature": 0.0, "nodes": nodes, "group": "all"}
    write_counts(book, name, book.add(EVALUATIONS, name, entry))
    return made


def rows(book, evaluation):
    return json.loads((book.evaluation_folder(evaluation) / "report.json").read_text())["rows"]


def test_the_evaluations_that_are_asked_for(held):
    rules, book = held
    replayed, timed = evaluation_specs(rules, book)
    runs = [str(book.run_folder(name)) for name in ("ctc_gru", "ctc_gru.s1", "medusa", "medusa@direct", "medusa.time")]
    [among] = [word for word in replayed.words if word.startswith("contestants=")]
    # A head that two arms share is asked once; a reading is asked of every head of its entrant.
    assert among.removeprefix("contestants=[").split(",")[:4] == runs[:4]
    assert str(book.run_folder("ctc_gru.time")) not in among
    assert "transformers_greedy" not in among
    assert {"measure=replay", "measure.nodes=[4,8]", "measure.checked=2"} <= set(replayed.words)
    assert "transformers_greedy" in timed.words[-1]
    assert "medusa.time" not in timed.words[-1]
    assert "ctc_gru.s1" not in timed.words[-1], "more seeds are replayed alone"
    hot = replace(rules, replay=replace(rules.replay, temperatures=(0.5,)))
    sampled = next(evaluation_specs(hot, book)).words
    assert {"decoding=sampling", "decoding.temperature=0.5"} <= set(sampled)
    assert "medusa.time" in replayed.words[-1]
    assert "medusa.time" not in sampled[-1], "sampled, the arm of equal steps alone"
    in_time = replace(hot, replay=replace(hot.replay, sampled=("time",)))
    # Both seeds of the head that equal steps and equal time share, and the one trained anew in both its readings.
    among = ",".join([*runs[:2], runs[4], f"{runs[4]}@direct", "corrupt"])
    assert next(evaluation_specs(in_time, book)).words[-1] == f"contestants=[{among}]"


def test_seeds_are_pooled_and_differences_are_those_of_the_reports(held):
    book = held[1]
    told = {
        (one["kind"], one["nodes"], one["arm"], one["more"], one["less"]): one
        for one in book.read(VERDICT)["differences"]
    }
    by_name = {(row["drafter"], row["nodes"]): row for row in rows(book, "all-made_up-replay-T0")}
    tokens, passes = (sum(by_name[name, 8][key] for name in ("ctc_gru", "ctc_gru.s1")) for key in ("tokens", "passes"))
    one = told["replay", 8, "steps", "ctc_gru", "medusa"]
    assert one["seeds"] == [2, 1]
    assert one["tau"] == pytest.approx(tokens / passes - by_name["medusa", 8]["tau"])
    assert one["tau_ci"][0] <= one["tau"] <= one["tau_ci"][1]
    in_time = told["replay", 8, "time", "ctc_gru", "medusa"]
    assert in_time["tau"] == pytest.approx(by_name["ctc_gru", 8]["tau"] - by_name["medusa.time", 8]["tau"])
    assert told["loop", 8, "steps", "ctc_gru", "medusa"]["speedup"] is not None
    assert one["speedup"] is None
    assert told["replay", 4, "steps", "medusa", "medusa@direct"]["questions"] == 3


def test_the_page_prints_what_has_a_certificate_and_names_what_has_not(held):
    book = held[1]
    text = (book.out / "page.md").read_text()
    by_replay = {(row["drafter"], row["nodes"]): row["tau"] for row in rows(book, "all-made_up-replay-T0")}
    assert "Not printed, because it has no certificate: corrupt in all-made_up-loop-8." in text
    assert "| corrupt |" not in text
    assert "## Arm T: equal training time (made_up)" in text
    assert "| medusa@direct | 900 | 0.90 | 9 | 3 | 0.006 |" in text
    assert "4/4, passes 6/6" in text  # two questions of three turns, each at two sizes
    assert "| ctc_gru less medusa | made_up | 0 | steps | 8 | replay | 2 and 1 |" in text
    assert "| parameters | medusa | drafter.body.inner=7 | 0.98 [0.90, 1.10] | parameters |" in text
    assert "## Seeds" in text
    taus = [by_replay[name, 8] for name in ("ctc_gru", "ctc_gru.s1")]
    for arm in ("steps", "time"):
        told = " ".join(f"{tau:.3f}" for tau in taus)
        assert f"| {arm} | ctc_gru | made_up | 8 | {told} |" in text
    for drawing in ("nodes.svg", "costs.svg"):
        shapes = list(ET.parse(book.out / drawing).getroot())
        assert any(node.tag.endswith(("polyline", "circle")) for node in shapes)
    lines = (book.out / "page.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(rows(book, name)) for name in book.read(EVALUATIONS)) - 3  # corrupt: 2 sizes, loop
    assert "/tmp" not in text


def test_it_is_rebuilt_from_the_logs_alone(held, tmp_path, capsys):
    """Without heads, prompts and answers, by `python -m studies.comparison`: verdict, page and figures."""
    rules, book = held
    narrowed = {
        "arms": list(rules.arms), "benchmarks": {"made_up": ["benchmark=tiny"], "tiny": None},
        "entrants": {name: rules.said["entrants"][name] for name in rules.entrants},
        "again": {"seeds": [1], "entrants": ["ctc_gru"], "best_rival": False},
        "replay": {"nodes": [4, 8], "temperatures": [0.0], "checked": 2},
        "timing": {"nodes": [8], "arms": ["steps"], "others": list(rules.timing.others), "words": []},
    }  # fmt: skip
    ResultStore(tmp_path).write(RULES, {**rules.said, **narrowed})
    for name in (TRAINING, MATCHING, EVALUATIONS):
        shutil.copy(book.out / f"{name}.json", tmp_path)
    for name in book.read(EVALUATIONS):
        (tmp_path / "evaluations" / name).mkdir(parents=True)
        for file in ("report.json", "counts.json"):
            shutil.copy(book.evaluation_folder(name) / file, tmp_path / "evaluations" / name)
    rebuild_pages([str(tmp_path)])
    assert str(tmp_path / "page.md") in capsys.readouterr().out
    for name in ("verdict.json", "page.md", "page.csv", "nodes.svg", "costs.svg"):
        assert (tmp_path / name).read_text() == (book.out / name).read_text()
    with pytest.raises(InputError, match=r"evaluations holds no finished comparison: there is no rules\.json"):
        rebuild_pages([str(tmp_path / "evaluations")])
    ResultStore(tmp_path).write(RULES, {"title": "of tomorrow"})
    with pytest.raises(InputError, match=r"rules\.json is of another version"):
        rebuild_pages([str(tmp_path)])


def test_counts_are_those_of_the_rows_and_hold_no_word(held, tmp_path):
    book = held[1]
    name = "all-made_up-loop-8"
    by_name = {row["drafter"]: row for row in rows(book, name)}
    for drafter, sizes in checked_counts(book, name, rows(book, name)).items():
        [sums] = sizes.values()
        assert (sum(sums.passes), sum(sums.committed)) == (by_name[drafter]["passes"], by_name[drafter]["tokens"])
        assert sum(sums.said) / sum(sums.seconds) == pytest.approx(by_name[drafter]["tokens_per_second"], rel=1e-3)
        assert {type(cell) for column in vars(sums).values() for cell in column} <= {int, float}
    assert set(
        checked_counts(book, "all-made_up-replay-T0", rows(book, "all-made_up-replay-T0"))["autoregressive"]
    ) == {4, 8}


def test_counts_of_an_earlier_evaluation_are_counted_again(held, tmp_path):
    book, name = ResultStore(tmp_path), "all-made_up-loop-8"
    shutil.copytree(held[1].evaluation_folder(name), book.evaluation_folder(name))
    entry, file = held[1].read(EVALUATIONS)[name], book.evaluation_folder(name) / "counts.json"
    right = file.read_text()
    one = json.loads(right)
    one["medusa"]["8"]["passes"][0] += 1
    for wrong in (json.dumps(one), "{}", "torn"):
        file.write_text(wrong)
        with pytest.raises(InputError, match=r"does not hold what its report\.json tells of; count again"):
            checked_counts(book, name, rows(book, name))
        write_counts(book, name, entry)
        assert file.read_text() == right
    file.unlink()
    (book.evaluation_folder(name) / "questions.jsonl").unlink()
    with pytest.raises(InputError, match="holds other answers than its report"):
        write_counts(book, name, entry)


def test_a_size_without_a_certificate_is_in_no_verdict(held, tmp_path):
    """Of a drafter whose other size has one."""
    rules, book = held
    shutil.copytree(book.out / "evaluations", tmp_path / "evaluations")
    bad = ResultStore(tmp_path)
    for part in (TRAINING, EVALUATIONS):
        bad.write(part, book.read(part))
    file = bad.evaluation("all-made_up-replay-T0") / "report.json"
    report = json.loads(file.read_text())
    [row] = [row for row in report["rows"] if (row["drafter"], row["nodes"]) == ("medusa", 8)]
    row["lossless"]["owed"]["wrong"] = 1
    file.write_text(json.dumps(report))
    write_statistics(replace(rules, out=tmp_path), bad)
    told = {
        (one["nodes"], one["more"], one["less"])
        for one in bad.read(VERDICT)["differences"]
        if (one["kind"], one["arm"]) == ("replay", "steps")
    }
    assert (4, "ctc_gru", "medusa") in told
    assert (8, "ctc_gru", "medusa") not in told


def test_a_grid_whose_rules_name_its_last_cell_alone_tells_of_every_cell(held):
    rules, book = held
    last = replace(rules, entrants={"medusa": rules.entrants["medusa"]})
    found = page.ComparisonData.of(book)
    assert page.seeds_section(last, found) == page.seeds_section(rules, found)
    assert [tuple(line.split(" | ")[:2]) for line in page.seeds_section(last, found)[1].splitlines()[2:]] == [
        ("| steps", "ctc_gru"),
        ("| time", "ctc_gru"),
    ]

    training = dict(found.training)
    own = ["drafter=eagle", "trainer.anchors=128", "trainer.learning_rate=0.1", "trainer.steps=9"]
    training["ctc_gru"] = {**training["ctc_gru"], "words": [*rules.work, *own]}
    told = page.equal_conditions(last, replace(found, training=training))
    assert told.splitlines()[3:] == ["- not equal: ctc_gru trains with `trainer.anchors=128`"]


def test_who_could_not_be_matched_is_named(held):
    rules, book = held
    one = {"key": "", "value": None, "interval": None, "how": ""}
    told = {"latency": {"medusa": one | {"ratio": 1.0}}, "parameters": {"medusa": one | {"ratio": 0.56}}}
    told["latency, once trained"] = {"ctc_gru": one | {"ratio": 1.0}, "medusa": one | {"ratio": 1.3}}
    found = replace(page.ComparisonData.of(book), matching=told)
    arms = replace(rules, arms=("steps", "parameters", "latency"))
    text = page.conditions_section(arms, found)
    assert "Not matched within 5% in the arm of parameters: medusa, 0.56." in text
    assert "in the arm of latency: medusa, 1.30." in text, "what trained heads take counts, not what was foreseen"
    assert "Not matched" not in page.conditions_section(rules, found), "arms that were not held"


def test_seeds_of_a_cell_are_pooled(held, tmp_path):
    rules, book = held
    cells = {"ctc_gru": ("x", 0), "ctc_gru.s1": ("x", 1), "medusa": ("y", 0), "medusa.time": ("y", 1)}
    lone = {"medusa@direct": entry("x", seed=2, factors={"loss": "y"})}  # x was not trained with that seed
    grid = ResultStore(tmp_path)
    shutil.copytree(book.out / "evaluations", tmp_path / "evaluations")
    grid.write(EVALUATIONS, book.read(EVALUATIONS))
    made = {name: entry(name, seed=seed, factors={"loss": loss}) for name, (loss, seed) in cells.items()}
    grid.write(TRAINING, made | lone)
    write_statistics(replace(rules, entrants={"x": MethodSpec("x", ())}, pairs=(), arms=("steps",)), grid)
    [told] = [one for one in grid.read(VERDICT)["effects"] if one["nodes"] == 8]
    by_name = {(row["drafter"], row["nodes"]): row for row in rows(book, "all-made_up-replay-T0")}

    def tau(*names):
        return sum(by_name[n, 8]["tokens"] for n in names) / sum(by_name[n, 8]["passes"] for n in names)

    assert (told["more"], told["less"], told["twins"], told["seeds"]) == ("y", "x", 1, 2)
    assert told["tau"] == pytest.approx(tau("medusa", "medusa.time") - tau("ctc_gru", "ctc_gru.s1"))


def test_what_a_factor_contributes_is_told_by_twins(held, tmp_path):
    """Four cells of two factors and a cell without a twin; two twins each, whose passes are pooled."""
    rules, book = held
    cells = {"ctc_gru": ("a", "x"), "ctc_gru.s1": ("b", "x"), "medusa": ("a", "y"), "medusa.time": ("b", "y")}
    lone = {"medusa@direct": entry("lone", factors={"body": "c", "loss": "z"})}
    made = {name: entry(name, factors={"body": body, "loss": loss}) for name, (body, loss) in cells.items()}
    grid = ResultStore(tmp_path)
    shutil.copytree(book.out / "evaluations", tmp_path / "evaluations")
    grid.write(EVALUATIONS, book.read(EVALUATIONS))
    grid.write(TRAINING, made | lone)
    write_statistics(replace(rules, entrants={"x": MethodSpec("x", ())}, pairs=(), arms=("steps",)), grid)
    told = {(one["factor"], one["nodes"]): one for one in grid.read(VERDICT)["effects"] if one["nodes"] == 8}
    assert set(told) == {("body", 8), ("loss", 8)}
    by_name = {(row["drafter"], row["nodes"]): row for row in rows(book, "all-made_up-replay-T0")}

    def tau(*names):
        return sum(by_name[n, 8]["tokens"] for n in names) / sum(by_name[n, 8]["passes"] for n in names)

    assert (told["loss", 8]["more"], told["loss", 8]["less"], told["loss", 8]["twins"]) == ("y", "x", 2)
    wanted = tau("medusa", "medusa.time") - tau("ctc_gru", "ctc_gru.s1")
    assert told["loss", 8]["tau"] == pytest.approx(wanted)
    page.write_page(replace(rules, entrants={"x": MethodSpec("x", ())}, pairs=(), arms=("steps",)), grid)
    text = (tmp_path / "page.md").read_text()
    assert "| loss | y less x | all | made_up | 0 | steps | 8 | replay | 2 | 1 |" in text
    drawing = ET.parse(tmp_path / "factors.svg").getroot()
    assert sum(node.tag.endswith("circle") for node in drawing) == 10  # five cells in two panels


def test_what_a_factor_contributes_is_told_for_each_way_to_read(held):
    """y reads best as n most probable texts, x as a raw tree; over both they are even."""
    rules = replace(held[0], readings_as=("raw tree", "probable texts"))
    training = {name: entry(name, factors={"loss": name}, readings=["raw", "best"]) for name in ("x", "y")}
    passes = {"x@raw": 10, "x@best": 20, "y@raw": 20, "y@best": 10, AUTOREGRESSIVE: 40}
    answers = {(name, 8): QuestionSums([40, 40], [count, count]) for name, count in passes.items()}
    told = {(one["factor"], one["within"]): one for one in factor_effects(rules, training, answers, "steps", 8)}
    assert {key: (one["twins"], one["tau"]) for key, one in told.items()} == {
        ("loss", None): (2, 0.0),
        ("loss", "raw tree"): (1, -2.0),
        ("loss", "probable texts"): (1, 2.0),
        ("reading", None): (2, 0.0),
    }


def test_how_learning_rates_were_chosen_is_said():
    several = load_comparison_config("arena")
    said = page.describe_learning_rate(several)
    assert said.startswith("the best of 0.002, 0.006, 0.012 and, past an edge that is the best, up to 2 more for each")
    assert "tried for 600 steps" in said
    one = replace(several, rates=replace(several.rates, values=(0.024,)))
    assert page.describe_learning_rate(one) == "0.024 for all"
