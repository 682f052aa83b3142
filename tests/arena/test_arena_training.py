"""Who is trained with what: train.py is a stand-in that leaves its files and says what it took."""

import json
from dataclasses import replace

import pytest
import torch
from arenas import load_comparison_config
from safetensors.torch import save_file

from ctcdraft.errors import InputError
from studies.comparison import train
from studies.comparison import train as comparison_train
from studies.comparison.config import ExtraSeeds
from studies.comparison.matching import SizeMatch
from studies.comparison.store import TRAINING, ResultStore

A_STEP = {"ctc_gru": 0.2, "medusa": 0.05, "hydra": 0.1}
BEST = {"ctc_gru": 0.006, "medusa": 0.012, "hydra": 0.002}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Three entrants, a book, and the commands that were run."""
    ran = []

    def train(script, words, log):
        said = dict(word.split("=", 1) for word in words)
        name = said["drafter.name"]
        entrant = "prepare" if name == "prepare" else name.partition(".")[0]
        steps, rate = int(said["trainer.steps"]), float(said["trainer.learning_rate"])
        folder = book.run_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        tau = 2.0 + ("hydra" in name) - abs(rate - BEST.get(entrant, 0.0))
        (folder / "config.yaml").write_text("seed: 0\n")
        spent = A_STEP.get(entrant, 1.0)
        line = {"loss": 1.0, "tau": tau, "processor_seconds": spent, "wall_seconds": 2 * spent}
        (folder / "metrics.jsonl").write_text((json.dumps(line) + "\n") * steps)
        save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(4)}, folder / "drafter.safetensors")
        ran.append(name)

    rules = load_comparison_config("arena", f"arena.out={tmp_path}", "arena.steps=100", "arena.small=null")
    entrants = {name: rules.entrants[name] for name in A_STEP}
    rules = replace(rules, entrants=entrants, arms=("steps", "parameters", "time"))
    rules = replace(rules, again=ExtraSeeds((1,), ("ctc_gru",), best_rival=True))
    book = ResultStore(rules.out)
    matched = {
        "ctc_gru": SizeMatch("", None, 1.0, None, "the reference"),
        "medusa": SizeMatch("drafter.body.inner", 77, 1.0, None, "counted"),
        "hydra": SizeMatch("", None, 0.9, None, "it has no dial"),
    }
    monkeypatch.setattr(comparison_train, "run_script", train)
    monkeypatch.setattr(comparison_train, "match_sizes", lambda rules, book, arm: matched)
    return rules, book, ran


def test_rates_arms_time_and_seeds(world):
    rules, book, ran = world
    train.train_all(rules, book)
    there = book.read(TRAINING)
    assert ran[0] == "prepare"
    assert ran[1:4] == ["ctc_gru.rate-0.002", "ctc_gru.rate-0.006", "ctc_gru.rate-0.012"]
    assert {name: there[name]["learning_rate"] for name in A_STEP} == BEST
    # Medusa's best is the highest of the grid: one beyond it is tried, and then it lies inside.
    assert [name for name in ran if name.startswith("medusa.rate")][3:] == ["medusa.rate-0.024"]
    assert there["ctc_gru"]["parameters"] == 16
    # 100 steps of the reference take 20 seconds; as many seconds are 400 steps of Medusa, 200 of Hydra.
    assert [there[f"{name}.time"]["steps"] for name in A_STEP] == [100, 400, 200]
    assert there["ctc_gru.time"]["same_as"] == "ctc_gru"
    assert there["medusa.parameters"]["dial"] == ["drafter.body.inner", 77]
    assert "drafter.body.inner=77" in there["medusa.parameters"]["words"]
    assert there["hydra.parameters"]["same_as"] == "hydra"
    # The default head again, and the best rival by its tau on held-out prompts.
    assert [name for name in ran if name.endswith(".s1")] == ["ctc_gru.s1", "hydra.s1"]
    assert {"seed=1", "data_seed=0"} <= set(there["hydra.s1"]["words"])
    assert not [word for word in there["hydra"]["words"] if word.startswith("data_seed")]
    words = there["medusa"]["words"]
    assert {"trainer.steps=100", "trainer.probe_every=100", "trainer.learning_rate=0.012"} <= set(words)
    assert there["medusa"]["seconds"] == {"processor": 5.0, "wall": 10.0}


def test_seeds_at_equal_training_time(world):
    """As many steps as the first seed's, from one corpus; the reference's own are those of equal steps."""
    rules, book, ran = world
    train.train_all(replace(rules, again=replace(rules.again, in_time=True)), book)
    there = book.read(TRAINING)
    assert [name for name in ran if name.endswith(".s1")] == ["ctc_gru.s1", "hydra.s1", "hydra.time.s1"]
    assert (there["hydra.time.s1"]["steps"], there["hydra.time.s1"]["seed"]) == (there["hydra.time"]["steps"], 1)
    assert {"seed=1", "data_seed=0", "trainer.steps=200"} <= set(there["hydra.time.s1"]["words"])
    assert (there["ctc_gru.time.s1"]["same_as"], there["ctc_gru.time.s1"]["arm"]) == ("ctc_gru.s1", "time")
    once = list(ran)
    train.train_all(replace(rules, arms=("steps",), again=replace(rules.again, in_time=True)), book)
    assert ran == once, "without that arm nobody's seeds are in it"


def test_a_single_rate_is_not_tried(world):
    rules, book, ran = world
    train.train_all(replace(rules, rates=replace(rules.rates, values=(0.03,)), arms=("steps",)), book)
    assert ran[:4] == ["prepare", *A_STEP]
    assert {book.read(TRAINING)[name]["learning_rate"] for name in A_STEP} == {0.03}


def test_heads_of_equal_draft_time_are_timed_when_all_of_them_are_trained(world, monkeypatch):
    rules, book, _ = world
    known = []
    monkeypatch.setattr(train, "measure_trained_heads", lambda rules, book: known.append(book.read(TRAINING)))
    wider = SizeMatch("drafter.body.inner", 99, 1.0, None, "turned again", again=True)

    def turned(rules, book):
        book.write(TRAINING, {name: one for name, one in book.read(TRAINING).items() if name != "medusa.latency"})
        return {"medusa": wider}

    monkeypatch.setattr(train, "rematch", turned)
    train.train_all(
        replace(rules, arms=("steps", "latency", "parameters"), again=ExtraSeeds((), (), best_rival=False)), book
    )
    first, second = known
    assert {"ctc_gru.latency", "medusa.latency", "hydra.latency"} <= set(first)
    assert "medusa.parameters" not in first
    assert [one["medusa.latency"]["dial"][1] for one in known] == [77, 99]
    assert second["hydra.latency"] == first["hydra.latency"]


def test_a_head_without_clocks_of_its_steps_is_no_measure_of_time(world):
    rules, book, _ = world
    train.train_all(rules, book)
    old = {name: {**one, "seconds": {}} for name, one in book.read(TRAINING).items()}
    book.write(TRAINING, old)
    with pytest.raises(InputError, match=r"medusa in .* was trained by a version that kept no clock of its steps"):
        train.seconds_per_step(rules, book, "medusa")


def test_one_beyond_the_edge_by_pencil():
    assert train.next_rate({1.0: 1.2, 2.0: 1.4, 4.0: 1.5}) == 8.0
    assert train.next_rate({1.0: 1.5, 3.0: 1.4}) == pytest.approx(1 / 3, rel=1e-5)
    assert train.next_rate({1.0: 1.2, 2.0: 1.4, 4.0: 1.3}) is None
    assert train.next_rate({1.0: 1.2}) is None


def test_what_is_there_is_not_made_again(world):
    rules, book, ran = world
    train.train_all(rules, book)
    once, before = list(ran), book.read(TRAINING)
    train.train_all(rules, book)
    assert ran == once
    assert book.read(TRAINING) == before
    (book.run_folder("medusa.time") / "drafter.safetensors").unlink()
    train.train_all(rules, book)
    assert ran == [*once, "medusa.time"]
    words = tuple(word.replace("trainer.rows=12", "trainer.rows=13") for word in rules.train)
    with pytest.raises(InputError, match=r"was made with trainer\.rows=12 and would now be made with trainer\.rows=13"):
        train.train_all(replace(rules, train=words), book)


def test_wall_seconds_where_a_processor_waits(world):
    rules, book, _ = world
    train.train_all(replace(rules, clock="wall"), book)
    assert train.seconds_per_step(replace(rules, clock="wall"), book, "medusa") == pytest.approx(0.1)
    assert train.seconds_per_step(rules, book, "medusa") == pytest.approx(0.05)
    assert train.steps_in_time(replace(rules, seconds=3.0), book, "medusa") == 60
