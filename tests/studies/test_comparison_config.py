"""The shipped comparison configs are valid, and impossible ones are refused in one sentence."""

import pytest
from comparison_parts import load_comparison_config
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.config.contestants import resolve
from ctcdraft.errors import InputError
from studies.comparison.config import SizeKey


def test_the_shipped_comparison_has_all_trainable_methods():
    config = load_comparison_config("arena")
    assert set(config.entrants) >= {"ctc_gru", "ctc", "ctc_paper", "medusa", "medusa_gru", "hydra", "eagle"}
    assert config.arms == ("steps", "parameters", "latency", "time")
    assert len(config.learning_rates.values) == 3
    assert config.trial_steps == 600
    assert config.entrants["ctc_paper"].size_keys == config.entrants["ctc"].size_keys
    assert config.entrants["medusa"].size_keys["parameters"] == SizeKey("drafter.body.inner", 8, 16384)
    small = load_comparison_config("arena_small")
    assert "draft_model" not in small.entrants
    assert small.entrants["medusa"] == config.entrants["medusa"]
    assert small.steps < config.steps


@pytest.mark.parametrize("experiment", ["arena", "grid", "grid_weights"])
def test_the_overrides_of_every_method_compose_and_its_trees_exist(experiment):
    register_resolvers()
    config = load_comparison_config(experiment)
    with initialize_config_dir(str(CONFIGS), version_base=None):
        for method in config.entrants.values():
            size_keys = [f"{size.key}={size.least}" for size in method.size_keys.values()]
            composed = compose("train", [*config.shared_overrides, *method.overrides, *size_keys])
            assert "tree" in composed.drafter
            trees = {file.stem for file in (CONFIGS / "drafter" / "tree").glob("*.yaml")}
            assert {reading for reading in method.readings if reading} <= trees
    for other in config.timing.others:
        assert resolve(OmegaConf.create(other.replace(":", ": ")) if "{" in other else other).name


def test_one_command_sweeps_all_cells_of_the_grid():
    with initialize_config_dir(str(CONFIGS), version_base=None):
        sweep = compose("evaluate", ["experiment=grid"], return_hydra_config=True).hydra.sweeper.params
    levels = {key: str(values).split(",") for key, values in sweep.items()}
    assert [len(values) for values in levels.values()] == [2, 3, 3]
    # Every level of every factor once.
    for number in range(3):
        config = load_comparison_config(
            "grid", *(f"{key}={values[number % len(values)]}" for key, values in levels.items())
        )
        [method] = config.entrants.values()
        assert config.group == "-".join(values[number % len(values)] for values in levels.values())
        assert list(method.factors.values()) == config.group.split("-")
        cross_entropy = method.factors["loss"] == "cross_entropy"
        assert method.readings == (("sparse_likely", "per_frame") if cross_entropy else ("collapse", "prefix_search"))
    weights = load_comparison_config("grid_weights", "grid.weight=1e-4")
    [method] = weights.entrants.values()
    assert method.factors == {"weight": 1e-4}
    assert "objective.ctc=0.0001" in method.overrides


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("arena.reference=unknown", "arena.reference must name some of "),
        ("arena.arms=[time]", "arena.arms must begin with `steps`"),
        ("arena.arms=[steps,speed]", "parameters, latency, time, got speed"),
        (
            "arena.replay.sampled=[speed]",
            "arena.replay.sampled must name some of steps, ",
        ),
        ("arena.learning_rates.share=1.5", "arena.learning_rates.share must be between 0 and 1, got 1.5"),
        ("arena.learning_rates.values=[]", "arena.learning_rates.values must hold at least one learning rate"),
        ("arena.replay.checked=0", "arena.replay.checked must be an integer >= 1, got 0"),
        ("arena.pairs=[[ctc,unknown]]", "got unknown"),
        ("arena.stages=[paint]", "arena.stages must name some of train, measure, page, got paint"),
        ("arena.clock=sun", "arena.clock must name some of processor, wall, got sun"),
    ],
)
def test_impossible_configs_are_refused(given, sentence):
    with pytest.raises(Exception, match=r"(?s).*") as caught:
        load_comparison_config("arena", given)
    cause = caught.value if isinstance(caught.value, InputError) else caught.value.__cause__
    assert isinstance(cause, InputError)
    assert sentence in str(cause)
