"""The rules that ship are rules, and one that makes no sense is one sentence."""

import pytest
from arenas import load_comparison_config
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.config.contestants import resolve
from ctcdraft.errors import InputError
from studies.comparison.config import SizeKey


def test_the_arena_compares_everyone_that_can_be_trained():
    made = load_comparison_config("arena")
    assert set(made.entrants) >= {"ctc_gru", "ctc", "ctc_paper", "medusa", "medusa_gru", "hydra", "eagle"}
    assert made.arms == ("steps", "parameters", "latency", "time")
    assert len(made.rates.values) == 3
    assert made.trial_steps == 600
    assert made.entrants["ctc_paper"].dials == made.entrants["ctc"].dials
    assert made.entrants["medusa"].dials["parameters"] == SizeKey("drafter.body.inner", 8, 16384)
    small = load_comparison_config("arena_small")
    assert "draft_model" not in small.entrants
    assert small.entrants["medusa"] == made.entrants["medusa"]
    assert small.steps < made.steps


@pytest.mark.parametrize("experiment", ["arena", "grid", "grid_weights"])
def test_words_of_every_entrant_compose_and_its_readings_exist(experiment):
    register_resolvers()
    made = load_comparison_config(experiment)
    with initialize_config_dir(str(CONFIGS), version_base=None):
        for entrant in made.entrants.values():
            dials = [f"{dial.key}={dial.least}" for dial in entrant.dials.values()]
            config = compose("train", [*made.work, *entrant.words, *dials])
            assert "tree" in config.drafter
            there = {file.stem for file in (CONFIGS / "drafter" / "tree").glob("*.yaml")}
            assert {reading for reading in entrant.readings if reading} <= there
    for other in made.timing.others:
        assert resolve(OmegaConf.create(other.replace(":", ": ")) if "{" in other else other).name


def test_the_grid_is_one_line_over_all_cells():
    with initialize_config_dir(str(CONFIGS), version_base=None):
        sweep = compose("evaluate", ["experiment=grid"], return_hydra_config=True).hydra.sweeper.params
    levels = {key: str(values).split(",") for key, values in sweep.items()}
    assert [len(values) for values in levels.values()] == [2, 3, 3]
    # Every level of every factor once.
    for number in range(3):
        made = load_comparison_config(
            "grid", *(f"{key}={values[number % len(values)]}" for key, values in levels.items())
        )
        [entrant] = made.entrants.values()
        assert made.group == "-".join(values[number % len(values)] for values in levels.values())
        assert list(entrant.factors.values()) == made.group.split("-")
        words = entrant.factors["loss"] == "cross_entropy"
        assert entrant.readings == (("sparse_likely", "direct") if words else ("collapse", "prefix_search"))
    weights = load_comparison_config("grid_weights", "grid.weight=1e-4")
    [entrant] = weights.entrants.values()
    assert entrant.factors == {"weight": 1e-4}
    assert "objective.ctc=0.0001" in entrant.words


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("arena.reference=nobody", "arena.reference names nobody"),
        ("arena.arms=[time]", "the first is `steps`"),
        ("arena.arms=[steps,speed]", "arena.arms names speed"),
        ("arena.replay.sampled=[speed]", "arena.replay.sampled names speed"),
        ("arena.rates.share=1.5", "the share of the steps lies between 0 and 1"),
        ("arena.rates.values=[]", "give at least one"),
        ("arena.replay.checked=0", "arena.replay.checked=0"),
        ("arena.pairs=[[ctc,nobody]]", "arena.pairs names nobody"),
        ("arena.stages=[paint]", "arena.stages names paint"),
        ("arena.clock=sun", "arena.clock names sun"),
    ],
)
def test_rules_that_make_no_sense(given, sentence):
    with pytest.raises(Exception, match=r"(?s).*") as caught:
        load_comparison_config("arena", given)
    cause = caught.value if isinstance(caught.value, InputError) else caught.value.__cause__
    assert isinstance(cause, InputError)
    assert sentence in str(cause)
