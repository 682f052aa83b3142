"""Matched budgets, on real heads of a random base."""

from dataclasses import asdict

import pytest
import torch
from comparison_parts import load_comparison_config
from hydra import initialize_config_dir
from safetensors.torch import load_file
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.config.drafters import build_drafter
from ctcdraft.corpus.prepared import PreparedCorpus
from ctcdraft.corpus.token_store import Row
from ctcdraft.errors import InputError
from ctcdraft.training.run_directory import RunDirectory
from studies.comparison.matching import (
    AFTER_TRAINING,
    OWN,
    REFERENCE,
    UNTRAINED,
    CostMeter,
    SizeMatch,
    count_parameters,
    extrapolated_seconds,
    match_sizes,
    measure_trained_heads,
)
from studies.comparison.store import MATCHING, TRAINING, ResultStore


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    random_lm().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        arguments = f"arena.base=['base=local','base.path={folder}','device=cpu']"
        matching = "arena.matching={tolerance:0.05,prompts:2,tokens:6,repeats:2}"
        cost_meter = CostMeter(load_comparison_config("arena", arguments, matching), ResultStore(folder / "arena"))
        cost_meter.prompts = [torch.arange(5, 21), torch.arange(9, 15)]
        for name in ("ctc_gru", "medusa", "eagle"):
            head = cost_meter.build(cost_meter.config.entrants[name])
            with torch.no_grad():
                next(iter(head.trainable_parameters())).add_(0.5)  # as if trained: untrained ones are equal
            RunDirectory(cost_meter.store.run_folder(name)).save_head(head)
        yield cost_meter


@pytest.mark.parametrize("name", ["medusa", "hydra", "medusa_gru"])
def test_heads_of_as_many_parameters(meter, name):
    match = meter.match_method(meter.config.entrants[name], "parameters")
    size_key = meter.config.entrants[name].size_keys["parameters"]
    head = meter.build(meter.config.entrants[name], size_key, match.value)
    assert match.ratio == count_parameters(head) / count_parameters(meter.build(meter.config.entrants["ctc_gru"]))
    assert abs(match.ratio - 1) < 0.05


def test_every_head_is_built_for_the_layers_it_is_trained_on(meter):
    """The reference reads several layers of the base; Medusa the last, and is trained on a base with that alone."""
    medusa = meter.config.entrants["medusa"]
    trained = build_drafter(meter.configs["medusa"].drafter, random_base())
    assert len(meter.base.aux_layers) > 1
    assert count_parameters(meter.build(medusa)) == count_parameters(trained)
    assert meter.build(meter.config.entrants["ctc_gru"]).fuse is not None


def test_methods_without_a_size_and_the_reference_stay_as_they_are(meter):
    match = meter.match_method(meter.config.entrants["eagle"], "parameters")
    assert match.value is None
    assert "no size" in match.how
    assert meter.match_method(meter.config.entrants["ctc_gru"], "latency").how == "the reference"


def test_an_untrained_size_costs_the_trained_head_plus_the_difference_of_untrained_heads():
    seconds = {REFERENCE: [9.0, 9.0], OWN: [5.0, 6.0], UNTRAINED: [3.0, 3.5], "64": [4.0, 4.0]}
    assert extrapolated_seconds(seconds, "64") == [6.0, 6.5]


def test_draft_times_are_those_of_trained_heads(meter, monkeypatch):
    """The clock is replaced: a draft of the trained Medusa takes 4, of an untrained one 1 + its width / 300."""
    medusa, trained = meter.config.entrants["medusa"], {}

    def draft_seconds(drafters):
        trained.update({name: one for name, one in drafters.items() if name in (REFERENCE, OWN)})
        known = {REFERENCE: 5.0, OWN: 4.0, UNTRAINED: 1.0}
        return {name: [known[name] if name in known else 1 + int(name) / 300] * 3 for name in drafters}

    monkeypatch.setattr(meter, "draft_seconds", draft_seconds)
    match = meter.match_method(medusa, "latency")
    assert 290 < match.value < 310
    assert match.ratio == pytest.approx(1, abs=0.01)
    assert match.how.startswith("draft time")
    saved = load_file(meter.store.run_folder("medusa") / "drafter.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in trained[OWN].trainable_state_dict().items())
    assert meter.match_method(meter.config.entrants["eagle"], "latency").key == "drafter.frames"


def test_an_interruption_loses_one_size_at_most(meter, tmp_path, monkeypatch):
    matched = []

    def interrupted(self, method, arm):
        matched.append(method.name)
        if len(matched) == 3:
            raise KeyboardInterrupt
        return SizeMatch("", None, 1.0, None, "")

    monkeypatch.setattr(CostMeter, "match_method", interrupted)
    store = ResultStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        match_sizes(meter.config, store, "parameters")
    sizes = match_sizes(meter.config, store, "parameters")
    assert matched == [*matched[:3], matched[2], *list(meter.config.entrants)[3:]]
    assert list(sizes) == list(meter.config.entrants)


def test_trained_heads_of_equal_draft_time_are_timed(meter, monkeypatch):
    """The clock is replaced. A method without a size shares the head of equal steps."""
    config, store, timed = meter.config, meter.store, {}
    sizes = {name: asdict(SizeMatch("", None, 1.0, None, "")) for name in config.entrants}
    sizes["medusa"] |= {"key": "drafter.body.inner", "value": 24}
    store.add(MATCHING, "latency", sizes)
    entries = {"ctc_gru.latency": ("ctc_gru", "ctc_gru"), "medusa.latency": ("medusa", None)}
    for name, (entrant, same_as) in entries.items():
        store.add(
            TRAINING, name, {"entrant": entrant, "arm": "latency", "seed": 0, "same_as": same_as, "overrides": []}
        )
    store.add(
        TRAINING,
        "medusa.latency.s1",
        {"entrant": "medusa", "arm": "latency", "seed": 1, "same_as": None, "overrides": []},
    )
    wide = meter.build(config.entrants["medusa"], config.entrants["medusa"].size_keys["latency"], 24)
    RunDirectory(store.run_folder("medusa.latency")).save_head(wide)

    def draft_seconds(self, heads):
        timed.update(heads)
        return {"ctc_gru": [2.0, 4.0, 2.0], "medusa": [3.0, 6.0, 3.0]}

    monkeypatch.setattr(CostMeter, "draft_seconds", draft_seconds)
    measure_trained_heads(config, store)
    matches = store.read(MATCHING)[AFTER_TRAINING]
    assert {name: one["ratio"] for name, one in matches.items()} == {"ctc_gru": 1.0, "medusa": 1.5}
    assert matches["medusa"]["value"] == 24
    assert count_parameters(timed["medusa"]) == count_parameters(wide)
    timed.clear()
    measure_trained_heads(config, store)
    assert not timed, "timed heads are not timed again"
    other = {
        "entrant": "medusa",
        "arm": "latency",
        "seed": 0,
        "same_as": None,
        "overrides": ["trainer.learning_rate=1"],
    }
    store.add(TRAINING, "medusa.latency", other)
    measure_trained_heads(config, store)
    assert timed, "a head trained with other overrides is"


def test_prompts_are_spread_evenly_over_the_corpus(meter, monkeypatch):
    def row(number, length):
        tokens_L = torch.arange(number, number + 4 + length, dtype=torch.int32)
        return Row(f"p{number}", 0, "chat", tokens_L, [(4, 4 + length, True)])

    rows = [row(number, 6 if number % 2 else 5) for number in range(20)]  # the even ones are too short
    monkeypatch.setattr(
        "studies.comparison.matching.prepared.read_corpus", lambda path, fingerprint: PreparedCorpus({}, rows)
    )
    monkeypatch.delitem(meter.__dict__, "prompts")
    assert [prompt_L.tolist() for prompt_L in meter.prompts] == [[1, 2, 3, 4], [11, 12, 13, 14]]
    monkeypatch.delitem(meter.__dict__, "prompts")
    del rows[3:]
    with pytest.raises(InputError, match=r"1 responses in .* have 6 tokens, and drafts are timed on 2 of"):
        _ = meter.prompts


def test_draft_times_are_interleaved(meter):
    heads = {name: meter.build(meter.config.entrants[name]) for name in ("ctc", "eagle")}
    seconds = meter.draft_seconds(heads)
    assert {name: len(repeats) for name, repeats in seconds.items()} == {"ctc": 2, "eagle": 2}
    assert all(one > 0 for repeats in seconds.values() for one in repeats)
