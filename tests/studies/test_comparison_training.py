"""Which heads are trained with which overrides; train.py is replaced by a stand-in that writes its files."""

import json
from dataclasses import replace

import pytest
import torch
from comparison_parts import load_comparison_config
from safetensors.torch import save_file

from ctcdraft.errors import InputError
from studies.comparison import train
from studies.comparison.config import ExtraSeeds
from studies.comparison.matching import SizeMatch
from studies.comparison.store import TRAINING, ResultStore

STEP_SECONDS = {"ctc_gru": 0.2, "medusa": 0.05, "hydra": 0.1}
BEST = {"ctc_gru": 0.006, "medusa": 0.012, "hydra": 0.002}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Three methods, a store, and the names of the runs that were trained."""
    ran = []

    def run_script(script, arguments, log):
        overrides = dict(argument.split("=", 1) for argument in arguments)
        name = overrides["drafter.name"]
        method = "prepare" if name == "prepare" else name.partition(".")[0]
        steps, rate = int(overrides["trainer.steps"]), float(overrides["trainer.learning_rate"])
        folder = store.run_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        tau = 2.0 + ("hydra" in name) - abs(rate - BEST.get(method, 0.0))
        (folder / "config.yaml").write_text("seed: 0\n")
        seconds = STEP_SECONDS.get(method, 1.0)
        line = {"loss": 1.0, "tau": tau, "processor_seconds": seconds, "wall_seconds": 2 * seconds}
        (folder / "metrics.jsonl").write_text((json.dumps(line) + "\n") * steps)
        save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(4)}, folder / "drafter.safetensors")
        ran.append(name)

    config = load_comparison_config("arena", f"arena.out={tmp_path}", "arena.steps=100", "arena.small=null")
    entrants = {name: config.entrants[name] for name in STEP_SECONDS}
    config = replace(config, entrants=entrants, arms=("steps", "parameters", "time"))
    config = replace(config, extra_seeds=ExtraSeeds((1,), ("ctc_gru",), best_rival=True))
    store = ResultStore(config.out)
    matched = {
        "ctc_gru": SizeMatch("", None, 1.0, None, "the reference"),
        "medusa": SizeMatch("drafter.body.inner", 77, 1.0, None, "counted"),
        "hydra": SizeMatch("", None, 0.9, None, "it has no size"),
    }
    monkeypatch.setattr(train, "run_script", run_script)
    monkeypatch.setattr(train, "match_sizes", lambda config, store, arm: matched)
    return config, store, ran


def test_rates_arms_time_and_seeds(world):
    config, store, ran = world
    train.train_all(config, store)
    training = store.read(TRAINING)
    assert ran[0] == "prepare"
    assert ran[1:4] == ["ctc_gru.rate-0.002", "ctc_gru.rate-0.006", "ctc_gru.rate-0.012"]
    assert {name: training[name]["learning_rate"] for name in STEP_SECONDS} == BEST
    # Medusa's best rate is the highest of the grid, so one beyond it is tried.
    assert [name for name in ran if name.startswith("medusa.rate")][3:] == ["medusa.rate-0.024"]
    assert training["ctc_gru"]["parameters"] == 16
    # 100 steps of the reference take 20 s, in which Medusa makes 400 steps and Hydra 200.
    assert [training[f"{name}.time"]["steps"] for name in STEP_SECONDS] == [100, 400, 200]
    assert training["ctc_gru.time"]["same_as"] == "ctc_gru"
    assert training["medusa.parameters"]["dial"] == ["drafter.body.inner", 77]
    assert "drafter.body.inner=77" in training["medusa.parameters"]["overrides"]
    assert training["hydra.parameters"]["same_as"] == "hydra"
    # The reference, and the rival with the best tau on held-out prompts.
    assert [name for name in ran if name.endswith(".s1")] == ["ctc_gru.s1", "hydra.s1"]
    assert {"seed=1", "data_seed=0"} <= set(training["hydra.s1"]["overrides"])
    assert not [argument for argument in training["hydra"]["overrides"] if argument.startswith("data_seed")]
    arguments = training["medusa"]["overrides"]
    assert {"trainer.steps=100", "trainer.probe_every=100", "trainer.learning_rate=0.012"} <= set(arguments)
    assert training["medusa"]["seconds"] == {"processor": 5.0, "wall": 10.0}


def test_seeds_at_equal_training_time(world):
    """As many steps as the first seed's, on the same corpus; the reference shares its heads of equal steps."""
    config, store, ran = world
    train.train_all(replace(config, extra_seeds=replace(config.extra_seeds, in_time=True)), store)
    training = store.read(TRAINING)
    assert [name for name in ran if name.endswith(".s1")] == ["ctc_gru.s1", "hydra.s1", "hydra.time.s1"]
    assert (training["hydra.time.s1"]["steps"], training["hydra.time.s1"]["seed"]) == (
        training["hydra.time"]["steps"],
        1,
    )
    assert {"seed=1", "data_seed=0", "trainer.steps=200"} <= set(training["hydra.time.s1"]["overrides"])
    assert (training["ctc_gru.time.s1"]["same_as"], training["ctc_gru.time.s1"]["arm"]) == ("ctc_gru.s1", "time")
    once = list(ran)
    train.train_all(replace(config, arms=("steps",), extra_seeds=replace(config.extra_seeds, in_time=True)), store)
    assert ran == once, "without that arm no seeds are trained in it"


def test_a_single_rate_is_not_tried(world):
    config, store, ran = world
    train.train_all(
        replace(config, learning_rates=replace(config.learning_rates, values=(0.03,)), arms=("steps",)), store
    )
    assert ran[:4] == ["prepare", *STEP_SECONDS]
    assert {store.read(TRAINING)[name]["learning_rate"] for name in STEP_SECONDS} == {0.03}


def test_heads_of_equal_draft_time_are_timed_once_all_are_trained(world, monkeypatch):
    config, store, _ = world
    timed = []
    monkeypatch.setattr(train, "measure_trained_heads", lambda config, store: timed.append(store.read(TRAINING)))
    arms = ("steps", "latency", "parameters")
    train.train_all(replace(config, arms=arms, extra_seeds=ExtraSeeds((), (), best_rival=False)), store)
    [training] = timed
    assert {"ctc_gru.latency", "medusa.latency", "hydra.latency"} <= set(training)
    assert "medusa.parameters" not in training
    assert training["medusa.latency"]["dial"] == ["drafter.body.inner", 77]


def test_a_head_without_timed_steps_is_refused(world):
    config, store, _ = world
    train.train_all(config, store)
    old = {name: {**one, "seconds": {}} for name, one in store.read(TRAINING).items()}
    store.write(TRAINING, old)
    with pytest.raises(InputError, match=r"medusa in .* was trained by a version that did not time its steps"):
        train.seconds_per_step(config, store, "medusa")


def test_the_next_rate_beyond_an_edge_by_hand():
    assert train.next_rate({1.0: 1.2, 2.0: 1.4, 4.0: 1.5}) == 8.0
    assert train.next_rate({1.0: 1.5, 3.0: 1.4}) == pytest.approx(1 / 3, rel=1e-5)
    assert train.next_rate({1.0: 1.2, 2.0: 1.4, 4.0: 1.3}) is None
    assert train.next_rate({1.0: 1.2}) is None


def test_trained_heads_are_not_trained_again(world):
    config, store, ran = world
    train.train_all(config, store)
    once, before = list(ran), store.read(TRAINING)
    train.train_all(config, store)
    assert ran == once
    assert store.read(TRAINING) == before
    (store.run_folder("medusa.time") / "drafter.safetensors").unlink()
    train.train_all(config, store)
    assert ran == [*once, "medusa.time"]
    arguments = tuple(argument.replace("trainer.batch_size=12", "trainer.batch_size=13") for argument in config.train)
    with pytest.raises(
        InputError, match=r"was made with trainer\.batch_size=12 and would now be made with trainer\.batch_size=13"
    ):
        train.train_all(replace(config, train=arguments), store)


def test_wall_time_where_the_processor_waits(world):
    config, store, _ = world
    train.train_all(replace(config, clock="wall"), store)
    assert train.seconds_per_step(replace(config, clock="wall"), store, "medusa") == pytest.approx(0.1)
    assert train.seconds_per_step(config, store, "medusa") == pytest.approx(0.05)
    assert train.steps_in_time(replace(config, seconds=3.0), store, "medusa") == 60
