"""Names of classes, keys and options from before they were renamed: understood in files and on command lines."""

import copy
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from ctcdraft.config.allowed import ALLOWED_TARGETS
from ctcdraft.config.cli import CONFIGS, compose_config
from ctcdraft.config.contestants import resolve
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.renamed import (
    CONTEXT_MEMBERS,
    DRAFT_HEAD_MEMBERS,
    KEYS,
    OPTIONS,
    TARGETS,
    current,
    current_argument,
)
from ctcdraft.training.search import TrialRegistry


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("drafter/paths=direct", "drafter/tree=per_frame"),
        ("drafter/paths=direct,collapse", "drafter/tree=per_frame,collapse"),
        ("+drafter/growth=best", "+drafter/tree=dynamic"),
        ("drafter/paths=chain", "drafter/tree=per_frame_chain"),
        ("drafter/growth=chain", "drafter/tree=chain"),
        ("drafter.paths.words_per_frame=4", "drafter.tree.tokens_per_frame=4"),
        ("drafter.growth.words=3", "drafter.tree.children=3"),
        ("explorer.words=3", "trace.tokens_per_frame=3"),
        ("++drafter.growth.width=3", "++drafter.tree.width=3"),
        ("~drafter.growth", "~drafter.tree"),
        ("drafter.paths._target_=ctcdraft.drafters.direct.Direct",
         "drafter.tree._target_=ctcdraft.drafters.trees.per_frame.PerFrameTree"),
        ("trainer.rows=4", "trainer.batch_size=4"),
        ("trainer.warmup=100,200", "trainer.warmup_steps=100,200"),
        ("states=stored", "hidden_states=offline"),
        ("states.path=FOLDER", "hidden_states.path=FOLDER"),
        ("base.taps=[last,4]", "base.aux_layers=[last,4]"),
        ("explorer.questions=0", "trace.questions=0"),
        ("objective.states=0.5", "objective.hidden_states=0.5"),
        ("drafter/tree=chain", "drafter/tree=chain"),
        ("drafter/paths=choice(direct,chain)", "drafter/tree=choice(per_frame,per_frame_chain)"),
        ("drafter/paths=shuffle(direct, 'chain')", "drafter/tree=shuffle(per_frame, 'per_frame_chain')"),
        ("drafter/paths=[direct,chain]", "drafter/tree=[per_frame,per_frame_chain]"),
        ("drafter/paths='direct',\"drawn\"", "drafter/tree='per_frame',\"sampled\""),
        ("drafter/growth=choice([best],[drawn,chain])", "drafter/tree=choice([dynamic],[sampled_sequential,chain])"),
        ("drafter/paths=glob(*,exclude=direct)", "drafter/tree=glob(*,exclude=per_frame)"),
        ("drafter/paths@x.drafter.paths=direct", "drafter/tree@x.drafter.tree=per_frame"),
        ("+drafter/growth@drafter.growth:x.y=best", "+drafter/tree@drafter.tree:x.y=dynamic"),
        ("hydra.sweeper.params.trainer.rows=1,2", "hydra.sweeper.params.trainer.batch_size=1,2"),
        ("objective.parts.eagle.words=0.2", "objective.parts.eagle.tokens=0.2"),
        ("drafter/tree@_global_=chain", "drafter/tree@_global_=chain"),
        ("drafter.pathsfinder=1", "drafter.pathsfinder=1"),
        ("contestants=[drafter/paths=direct]", "contestants=[drafter/paths=direct]"),
        ("-m", "-m"),
    ],
)  # fmt: skip
def test_an_old_argument_has_its_present_name(old, new):
    assert current_argument(old) == new
    assert current_argument(new) == new


def test_old_keys_of_a_run_directory_have_their_present_names():
    old = {"drafter": {"frames": 4, "paths": {"_target_": "ctcdraft.drafters.direct.Direct", "words": 1}}, "paths": 3}
    tree = {"_target_": "ctcdraft.drafters.trees.per_frame.PerFrameTree", "children": 1}
    assert current(old) == {"drafter": {"frames": 4, "tree": tree}, "paths": 3}
    assert current(current(old)) == current(old)


def test_parts_of_a_sum_are_objectives_and_classes_of_a_user_keep_their_keys():
    eagle = {"_target_": "ctcdraft.objectives.eagle.Eagle", "states": 1.0, "words": 0.1}
    assert current({"objective": {"parts": {"mine": eagle}, "weights": {"mine": 1.0}}}) == {
        "objective": {"parts": {"mine": {"_target_": eagle["_target_"], "hidden_states": 1.0, "tokens": 0.1}},
                      "weights": {"mine": 1.0}}
    }  # fmt: skip
    own = {"objective": {"_target_": "mine.Own", "states": 1.0, "words": 0.1}}
    assert current(own) == own


def test_a_config_of_before_the_renaming_composes_to_the_present_keys():
    """Every key of such a run's trainer, base and hidden states is a key that train.py has today."""
    old = {
        "trainer": {"steps": 9, "rows": 8, "anchors": 64, "pack": None, "accumulate": 1, "warmup": 100,
                    "final_share": 0.05, "clip_norm": 1.0, "keep": 2, "patience": 10, "threads": None},
        "base": {"taps": ["last"], "fixed": False, "quantised": None},
        "states": {"_target_": "ctcdraft.corpus.states.Stored", "rows": 64},
    }  # fmt: skip
    new = current(old)
    composed = OmegaConf.to_container(compose_config("train", "base=local", "hidden_states=offline"), resolve=False)
    for node in ("trainer", "base", "hidden_states"):
        assert set(new[node]) <= set(composed[node])
    assert list(new["trainer"].values()) == list(old["trainer"].values())
    assert new["hidden_states"]["_target_"] == composed["hidden_states"]["_target_"]


def test_old_keys_of_a_file_that_holds_a_drafter_have_their_present_names():
    old = {"defaults": ["ctc", {"override paths": "direct"}, {"growth": "best"}], "growth": {"width": 2}}
    new = {"defaults": ["ctc", {"override tree": "per_frame"}, {"tree": "dynamic"}], "tree": {"width": 2}}
    assert current({"defaults": [{"override /states": "live"}]}) == {
        "defaults": [{"override /hidden_states": "online"}]
    }
    assert current(old, "drafter") == new
    assert current({"growth": "exact"}, "drafter") == {"tree": "top_n"}


@pytest.mark.parametrize(
    ("drafter", "old", "new"),
    [
        ({"body": {}, "paths": {}}, "direct", "per_frame"),
        ({"body": {}, "paths": {}}, "drawn", "sampled"),
        ({"body": {}, "tree": {}}, "chain", "per_frame_chain"),
        ({"growth": {}}, "drawn", "sampled_sequential"),
        ({"growth": {}}, "chain", "chain"),
        ({"tree": {}}, "top_n", "top_n"),
    ],
)
def test_an_old_reading_of_a_run_has_its_present_name(drafter, old, new, tmp_path):
    """`chain` and `drawn` were options of both groups, and mean what they meant for the run's own drafter."""
    OmegaConf.save({"drafter": {"name": "head", **drafter}}, tmp_path / "config.yaml")
    contestant = resolve(f"{tmp_path}@{old}")
    assert (contestant.tree, contestant.name) == (new, f"head@{new}")


def test_old_values_of_a_contestant_have_their_present_names():
    """As in contestants=[{draft_model:{path:FOLDER,growth:best}}]."""
    for values in ({"growth": "best"}, {"tree": "dynamic"}):
        contestant = resolve(OmegaConf.create({"draft_model": {"path": "somewhere", **values}}))
        assert contestant.config.tree == OmegaConf.load(CONFIGS / "drafter/tree/dynamic.yaml")


def test_values_of_a_contestant_may_interpolate_other_keys():
    config = OmegaConf.create({"base": {"path": "here"}, "contestants": [{"draft_model": {"path": "${base.path}"}}]})
    assert resolve(config.contestants[0]).config.path == "here"


def test_a_search_that_goes_on_finds_trials_by_old_names():
    states = Enum("TrialState", ["COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING"])

    def trial(number, **params):
        attributes: dict[str, str] = {}
        return SimpleNamespace(
            number=number, state=states.COMPLETE, params=params, user_attrs=attributes,
            set_user_attr=attributes.__setitem__,
        )  # fmt: skip

    old = trial(0, **{"drafter.paths.words_per_frame": 3, "drafter/growth": "best"})
    new = trial(1, **{"drafter.tree.tokens_per_frame": 3, "drafter/tree": "dynamic"})
    other = trial(2, **{"drafter.tree.tokens_per_frame": 3, "drafter/tree": "top_n"})
    study = SimpleNamespace(get_trials=lambda deepcopy, states: [old])
    registry = TrialRegistry(study, ["python", "train.py", "drafter/tree=per_frame", "trainer.steps=9"], states)
    for command, same in (("trainer.steps=9", True), ("trainer.steps=8", False)):
        old.user_attrs["command"] = f"python train.py drafter/paths=direct {command}"
        with registry.exclusive(new) as equal:
            assert equal is (old if same else None)
        with registry.exclusive(other) as equal:
            assert equal is None


def test_every_rename_ends_at_a_name_that_exists():
    allowed = set().union(*ALLOWED_TARGETS.values())
    assert {new for new in TARGETS.values() if new.startswith("ctcdraft.drafters")} <= allowed
    assert not set(KEYS) & set(KEYS.values())
    assert all(old.rpartition(".")[0] == new.rpartition(".")[0] for old, new in KEYS.items())
    for group, options in OPTIONS.items():
        folder = KEYS.get(group.replace("/", "."), group.replace("/", ".")).replace(".", "/")
        assert all((CONFIGS / folder / f"{option}.yaml").is_file() for option in options.values()), group


def test_a_previous_name_of_a_context_member_names_the_present_one():
    context = Context(torch.tensor([1]), torch.zeros(0, 2), 3, 4)
    for old, new in CONTEXT_MEMBERS.items():
        with pytest.raises(AttributeError, match=f"Context has no {old}; it is called {new} now"):
            getattr(context, old)
        assert hasattr(context, new)
    with pytest.raises(AttributeError, match=r"Context has no colour$"):
        context.colour  # noqa: B018
    assert copy.deepcopy(context).nodes == 4  # looks up members before there are fields


def test_a_draft_head_that_overrides_a_previous_name_is_refused():
    for old, new in DRAFT_HEAD_MEMBERS.items():
        with pytest.raises(InputError, match=rf"Mine\.{old} is called {new} now"):
            type("Mine", (DraftHead,), {old: lambda self: None})
    declared = {"samples_drafts", "has_nested_trees", "uses_hidden_states"}  # read where a drafter declares them
    assert all(hasattr(DraftHead, new) for new in set(DRAFT_HEAD_MEMBERS.values()) - declared)
