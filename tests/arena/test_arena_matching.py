"""Budgets: dials turned on real heads of a random base."""

from dataclasses import asdict

import pytest
import torch
from arenas import load_comparison_config
from hydra import initialize_config_dir
from safetensors.torch import load_file
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.corpus.prepared import PreparedCorpus
from ctcdraft.corpus.token_store import Row
from ctcdraft.errors import InputError
from ctcdraft.training.run_directory import RunDirectory
from studies.comparison.draft_cost import geometric_mean
from studies.comparison.matching import (
    OWN,
    REFERENCE,
    UNTRAINED,
    CostMeter,
    SizeMatch,
    count_parameters,
    extrapolated_seconds,
    match_sizes,
)
from studies.comparison.rematch import AFTER_TRAINING, measure_trained_heads, rematch
from studies.comparison.store import MATCHING, TRAINING, ResultStore


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    random_lm().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        words = f"arena.base=['base=local','base.path={folder}','device=cpu']"
        matching = "arena.matching={tolerance:0.05,prompts:2,tokens:6,repeats:2}"
        made = CostMeter(load_comparison_config("arena", words, matching), ResultStore(folder / "arena"))
        made.prompts = [torch.arange(5, 21), torch.arange(9, 15)]
        for name in ("ctc_gru", "medusa", "eagle"):
            head = made.build(made.rules.entrants[name])
            with torch.no_grad():
                next(iter(head.trainable_parameters())).add_(0.5)  # as if trained: two untrained ones are the same
            RunDirectory(made.book.run(name)).save_head(head)
        yield made


@pytest.mark.parametrize("name", ["medusa", "hydra", "medusa_gru"])
def test_heads_of_as_many_parameters(bench, name):
    found = bench.match_method(bench.config.entrants[name], "parameters")
    dial = bench.config.entrants[name].dials["parameters"]
    head = bench.build(bench.config.entrants[name], dial, found.value)
    assert found.ratio == count_parameters(head) / count_parameters(bench.build(bench.config.entrants["ctc_gru"]))
    assert abs(found.ratio - 1) < 0.05


def test_who_has_no_dial_stays_and_the_reference_too(bench):
    found = bench.match_method(bench.config.entrants["eagle"], "parameters")
    assert found.value is None
    assert "no dial" in found.how
    assert bench.match_method(bench.config.entrants["ctc_gru"], "latency").how == "the reference"


def test_what_nobody_trained_yet_costs_is_told_by_what_bodies_differ_by():
    taken = {REFERENCE: [9.0, 9.0], OWN: [5.0, 6.0], UNTRAINED: [3.0, 3.5], "64": [4.0, 4.0]}
    assert extrapolated_seconds(taken, "64") == [6.0, 6.5]


def test_draft_times_are_those_of_trained_heads(bench, monkeypatch):
    """The clock is replaced: a trained Medusa's draft takes 4, an untrained one's 1 and a 300th of its columns."""
    medusa, trained = bench.config.entrants["medusa"], {}

    def costs(drafters):
        trained.update({name: one for name, one in drafters.items() if name in (REFERENCE, OWN)})
        known = {REFERENCE: 5.0, OWN: 4.0, UNTRAINED: 1.0}
        return {name: [known[name] if name in known else 1 + int(name) / 300] * 3 for name in drafters}

    monkeypatch.setattr(bench, "seconds", costs)
    found = bench.match_method(medusa, "latency")
    assert 290 < found.value < 310
    assert found.ratio == pytest.approx(1, abs=0.01)
    assert found.how.startswith("draft time")
    saved = load_file(bench.book.run("medusa") / "drafter.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in trained[OWN].trainable_state_dict().items())
    assert bench.match_method(bench.config.entrants["eagle"], "latency").key == "drafter.frames"


def test_a_kill_between_two_dials_loses_one_of_them(bench, tmp_path, monkeypatch):
    asked = []

    def killed(self, entrant, arm):
        asked.append(entrant.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return SizeMatch("", None, 1.0, None, "")

    monkeypatch.setattr(CostMeter, "match_method", killed)
    book = ResultStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        match_sizes(bench.config, book, "parameters")
    found = match_sizes(bench.config, book, "parameters")
    assert asked == [*asked[:3], asked[2], *list(bench.config.entrants)[3:]]
    assert list(found) == list(bench.config.entrants)


def test_where_the_clock_is_unsteady_drafts_of_trained_heads_are_counted(bench, monkeypatch):
    """The clock never agrees with itself. What the chosen size and the reference count for is asked for again."""
    noise = [1.0, 9.0, 2.0, 7.0]
    monkeypatch.setattr(
        bench, "seconds", lambda drafters: {name: noise[:: -1 if name == REFERENCE else 1] for name in drafters}
    )
    medusa, reference = bench.config.entrants["medusa"], bench.config.entrants["ctc_gru"]
    found = bench.match_method(medusa, "latency")
    assert found.how.startswith("operations and bytes of a draft, because the clock told")
    own, plain, there = (
        bench.draft_work(head) for head in (bench.load_head(medusa), bench.build(medusa), bench.load_head(reference))
    )
    at = bench.draft_work(bench.build(medusa, medusa.dials["latency"], found.value))
    assert found.ratio == pytest.approx(geometric_mean(own + at - plain) / geometric_mean(there))
    assert abs(found.ratio - 1) < 0.05


def test_heads_of_equal_draft_time_are_timed_once_more_when_they_are_trained(bench, monkeypatch):
    """The clock is replaced. Who has no dial of its own shares the head of equal steps."""
    rules, book, timed = bench.config, bench.book, {}
    dials = {name: asdict(SizeMatch("", None, 1.0, None, "")) for name in rules.entrants}
    dials["medusa"] |= {"key": "drafter.body.inner", "value": 24}
    book.add(MATCHING, "latency", dials)
    entries = {"ctc_gru.latency": ("ctc_gru", "ctc_gru"), "medusa.latency": ("medusa", None)}
    for name, (entrant, same_as) in entries.items():
        book.add(TRAINING, name, {"entrant": entrant, "arm": "latency", "seed": 0, "same_as": same_as, "words": []})
    book.add(
        TRAINING, "medusa.latency.s1", {"entrant": "medusa", "arm": "latency", "seed": 1, "same_as": None, "words": []}
    )
    wide = bench.build(rules.entrants["medusa"], rules.entrants["medusa"].dials["latency"], 24)
    RunDirectory(book.run_folder("medusa.latency")).save_head(wide)

    def costs(self, heads):
        timed.update(heads)
        return {"ctc_gru": [2.0, 4.0, 2.0], "medusa": [3.0, 6.0, 3.0]}

    monkeypatch.setattr(CostMeter, "seconds", costs)
    measure_trained_heads(rules, book)
    told = book.read(MATCHING)[AFTER_TRAINING]
    assert {name: one["ratio"] for name, one in told.items()} == {"ctc_gru": 1.0, "medusa": 1.5}
    assert told["medusa"]["value"] == 24
    assert count_parameters(timed["medusa"]) == count_parameters(wide)
    timed.clear()
    measure_trained_heads(rules, book)
    assert not timed, "what is known is not timed again"
    other = {"entrant": "medusa", "arm": "latency", "seed": 0, "same_as": None, "words": ["trainer.learning_rate=1"]}
    book.add(TRAINING, "medusa.latency", other)
    measure_trained_heads(rules, book)
    assert timed, "a head trained with other words is"


@pytest.fixture
def unequal(bench, tmp_path, monkeypatch):
    """A book whose heads of equal draft time are not, and a clock by which a column takes a hundredth and a trained
    head of 24 columns 5 where the reference takes 10. Hydra is equal within the tolerance, the transformer has as many
    blocks as its dial goes to, and a corrected Medusa is too dear whatever its columns."""
    rules, book = bench.config, ResultStore(tmp_path)
    values = {"medusa": 24, "hydra": 9, "ctc": 5, "medusa_gru": 1000}
    dials = {name: asdict(SizeMatch("", None, 1.0, None, "")) for name in rules.entrants}
    for name, value in values.items():
        dials[name] |= {"key": rules.entrants[name].dials["latency"].key, "value": value}
    book.add(MATCHING, "latency", dials)
    ratios = {"ctc_gru": 1.0, "medusa": 0.5, "hydra": 0.93, "ctc": 0.6, "medusa_gru": 1.2}
    told = {name: {"ratio": ratio, "interval": [ratio - 0.04, ratio + 0.04]} for name, ratio in ratios.items()}
    book.add(MATCHING, AFTER_TRAINING, told)
    for name in ratios:
        shared = name if name == "ctc_gru" else None
        entry = {"entrant": name, "arm": "latency", "seed": 0, "same_as": shared, "words": []}
        book.add(TRAINING, f"{name}.latency", entry)
    plain = {}
    for name, seconds in {"medusa": (5.0, 0.24), "medusa_gru": (12.0, 0.08)}.items():
        head = bench.build(rules.entrants[name], rules.entrants[name].dials["latency"], values[name])
        RunDirectory(book.run_folder(f"{name}.latency")).save_head(head)
        plain[count_parameters(head)] = dict(zip((OWN, UNTRAINED), seconds, strict=True)) | {REFERENCE: 10.0}
    RunDirectory(book.run_folder("ctc_gru")).save_head(bench.build(rules.entrants["ctc_gru"]))

    def costs(self, heads):
        known = plain[count_parameters(heads[OWN])]
        return {name: [known[name] if name in known else int(name) / 100] * 3 for name in heads}

    monkeypatch.setattr(CostMeter, "seconds", costs)
    return rules, book


def test_a_trained_head_of_another_draft_time_is_turned_once_more(unequal):
    rules, book = unequal
    found = rematch(rules, book)
    assert list(found) == ["medusa"]
    assert found["medusa"].value == 524, "24 columns take 5, and 5 more are wanted"
    assert found["medusa"].ratio == pytest.approx(1)
    assert "trained head of 24, 0.50" in found["medusa"].how
    assert "medusa.latency" not in book.read(TRAINING), "it is trained again"
    assert {f"{name}.latency" for name in ("ctc_gru", "hydra", "ctc", "medusa_gru")} == set(book.read(TRAINING))
    turned = {name: one["value"] for name, one in book.read(MATCHING)["latency"].items() if one["value"] is not None}
    assert turned == {"medusa": 524, "hydra": 9, "ctc": 5, "medusa_gru": 1000}
    told = book.read(MATCHING)[AFTER_TRAINING]
    book.add(MATCHING, AFTER_TRAINING, told | {"hydra": {"ratio": 0.5, "interval": [0.4, 0.6]}})
    assert rematch(rules, book) == {}, "the same command, run again, changes nobody's budget"


def test_a_kill_while_dials_are_turned_leaves_no_head_that_no_dial_made(unequal, monkeypatch):
    rules, book = unequal

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ResultStore, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        rematch(rules, book)
    assert book.read(MATCHING)["latency"]["medusa"]["value"] == 24
    assert "medusa.latency" not in book.read(TRAINING), "what is trained next is what the old dial says"


def test_prompts_to_draft_for_are_spread_over_the_corpus(bench, monkeypatch):
    def row(number, said):
        mask_L = torch.tensor([False] * 4 + [True] * said)
        return Row(f"p{number}", 0, "chat", torch.arange(number, number + 4 + said, dtype=torch.int32), mask_L, True)

    rows = [row(number, 6 if number % 2 else 5) for number in range(20)]  # the even ones are too short
    monkeypatch.setattr(
        "studies.comparison.matching.prepared.read_corpus", lambda path, fingerprint: PreparedCorpus({}, rows)
    )
    monkeypatch.delitem(bench.__dict__, "prompts")
    assert [prompt_L.tolist() for prompt_L in bench.prompts] == [[1, 2, 3, 4], [11, 12, 13, 14]]
    monkeypatch.delitem(bench.__dict__, "prompts")
    del rows[3:]
    with pytest.raises(InputError, match=r"1 answers in .* have 6 tokens, and drafts are timed on 2 of"):
        _ = bench.prompts


def test_work_is_counted_not_timed(bench):
    medusa = bench.config.entrants["medusa"]
    dial = medusa.dials["latency"]
    one, same, wide = (geometric_mean(bench.draft_work(bench.build(medusa, dial, value))) for value in (8, 8, 512))
    assert one == same < wide
    eagle = bench.config.entrants["eagle"]
    shallow, deep = (
        geometric_mean(bench.draft_work(bench.build(eagle, eagle.dials["latency"], frames))) for frames in (1, 5)
    )
    assert deep > 2 * shallow  # a pass a depth


def test_draft_times_are_taken_in_turns(bench):
    heads = {name: bench.build(bench.config.entrants[name]) for name in ("ctc", "eagle")}
    taken = bench.draft_seconds(heads)
    assert {name: len(some) for name, some in taken.items()} == {"ctc": 2, "eagle": 2}
    assert all(one > 0 for some in taken.values() for one in some)
