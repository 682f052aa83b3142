"""Items of contestants=: drafters from outside the package, with values, and composites. All are lossless."""

from __future__ import annotations

import json

import pytest
import torch
from entry_parts import expect_error, run_script, train_args
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sequential_parts import saved_lm

from ctcdraft.config.cli import compose_config
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.config.drafters import load_drafter
from ctcdraft.config.early_checks import DRAFTER_CONFIGS
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.training.run_directory import RunDirectory

TRUST = ["parrots.Parrot", "parrots.Echo"]
MODULE = '''
"""Two drafters outside the package: one without weights, one that is trained."""

import torch
from torch import nn

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import DraftHead
from ctcdraft.nn.heads import BlankHead, Emissions


class Parrot:
    reads_states = False

    def __init__(self, base, times):
        self.times = times

    def draft(self, context, memory, rng):
        return TokenTree.chain(context.root, context.root.repeat(min(self.times, context.depth))), memory


class Echo(DraftHead):
    initialised = "at random"

    def __init__(self, base, frames):
        super().__init__()
        self.frames = frames
        self.turn = nn.Linear(2 * base.width, frames * base.width)
        self.head = BlankHead(base.head, base.width)
        self.embedding = base.embedding

    def emit(self, states_BAD, roots_BA):
        inputs = torch.cat([states_BAD, self.embedding(roots_BA)], dim=-1)
        return Emissions(self.turn(inputs).unflatten(-1, (self.frames, -1)), self.head)

    def forward(self, batch):
        index = batch.anchors_BA[..., None].expand(-1, -1, batch.states_BLD.shape[-1])
        return self.emit(batch.states_BLD.gather(1, index), batch.roots_BA)

    def draft(self, context, memory, rng):
        logits = self.emit(context.new_states_KD[None, -1:], context.root.reshape(1, 1)).logits()[0, 0, :, :-1]
        return TokenTree.chain(context.root, logits.argmax(dim=-1)[: context.depth]), memory
'''


@pytest.fixture(scope="module")
def outsiders(world):
    """Return the folder of `world` with a module, two YAMLs, a trained Echo and small LMs in it."""
    (world / "parrots.py").write_text(MODULE)
    folder = world / "mine" / "drafter"
    folder.mkdir(parents=True)
    (folder / "echo.yaml").write_text("_target_: parrots.Echo\nname: echo\nframes: 5\n")
    (world / "parrot.yaml").write_text("_target_: parrots.Parrot\nname: parrot\ntimes: 3\n")
    for name, changes in {"small": {"hidden_size": 16, "head_dim": 4}, "twin": {"seed": 0}}.items():
        saved_lm(world / name, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        patch.syspath_prepend(world)
        arguments = train_args("run=echo", "drafter=echo", "objective=cross_entropy", "objective.labels=3")
        run_script(patch, "train.py", "--config-dir", "mine", *arguments)
        yield world


def evaluated(patch, world, *contestants: str, more=()):
    arguments = ["base=local", "base.path=base", "benchmark.path=prompts.jsonl", "benchmark.limit=2", "out=seen"]
    arguments += [
        "decoding.max_new_tokens=12",
        "overwrite=true",
        "timing.questions=1",
        f"trust=[{','.join(TRUST)}]",
        *more,
    ]
    run_script(patch, "evaluate.py", f"contestants=[{','.join(contestants)}]", *arguments)
    rows = json.loads((world / "seen" / "report.json").read_text())["rows"]
    for row in rows:
        assert row["lossless"]["equal"] == row["prompts"] == 2, row["drafter"]
    return {row["drafter"]: row for row in rows}


def test_a_drafter_from_outside_trains_is_evaluated_and_is_lossless(outsiders, monkeypatch):
    monkeypatch.chdir(outsiders)
    assert (outsiders / "echo" / "drafter.safetensors").is_file()
    assert OmegaConf.load(outsiders / "echo" / "config.yaml").drafter._target_ == "parrots.Echo"
    lines = [json.loads(line) for line in (outsiders / "echo" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert lines[-1]["tau"] >= 1
    rows = evaluated(
        monkeypatch, outsiders, "echo", "parrot.yaml", "{parrot.yaml:{times:1}}",
        "{merged:{parts:{first:echo,second:parrot.yaml}}}",
    )  # fmt: skip
    assert list(rows) == ["autoregressive", "echo", "parrot", "parrot:times=1", "merged"]
    assert rows["echo"]["draft_parameters"] == rows["merged"]["draft_parameters"] > 0
    drawn = evaluated(monkeypatch, outsiders, "echo", "parrot.yaml", more=["decoding=sampling"])
    assert [row["temperature"] for row in drawn.values()] == [1.0, 1.0, 1.0]


def test_an_untrained_draft_model_alone_and_merged(outsiders, monkeypatch):
    monkeypatch.chdir(outsiders)
    rows = evaluated(
        monkeypatch, outsiders, "{draft_model:{path:small}}", "{draft_model:{path:twin,tree:chain,frames:5}}",
        "{merged:{parts:{first:{draft_model:{path:small}}}}}",
        "{transformers_assisted:{assistant:twin}}", "transformers_prompt_lookup",
    )  # fmt: skip
    twin = rows["draft_model:path=twin,tree=chain,frames=5"]
    assert twin["tau"] > 3  # the draft model is the base itself
    assert twin["alpha"][0] == rows["transformers_assisted"]["alpha"][0] == 1
    assert rows["draft_model"]["draft_parameters"] > 0


@pytest.mark.parametrize(
    ("drafter", "more"),
    [
        ("hydra", ["objective=cross_entropy", "drafter.frames=3"]),
        ("eagle", ["objective=eagle"]),
        ("eagle3", ["objective=distill", "drafter.vocabulary=200"]),
        ("eagle", ["objective=eagle_ctc", "drafter.frames=6", "drafter/tree=greedy_path63"]),
        ("draft_model", ["objective=distill", "drafter.path=small"]),
        ("draft_model", ["objective=cross_entropy", "drafter.path=twin", "drafter.lora_rank=2"]),
    ],
)
def test_sequential_drafters_train_and_decode_with_other_trees(outsiders, monkeypatch, drafter, more):
    monkeypatch.chdir(outsiders)
    labels = ["objective.labels=1"] if "objective=eagle" in more else []
    run_script(
        monkeypatch, "train.py", *train_args("run=steps", "overwrite=true", f"drafter={drafter}", *labels, *more)
    )
    rows = evaluated(monkeypatch, outsiders, "steps", "steps@chain", "steps@medusa63")
    assert list(rows) == ["autoregressive", drafter, f"{drafter}@chain", f"{drafter}@medusa63"]
    saved = load_file(outsiders / "steps" / "drafter.safetensors")
    layers = RunDirectory(outsiders / "steps").base_fingerprint()["taps"]
    base = load_base("base", "float32", "cpu", aux_layers=layers)
    loaded = load_drafter(outsiders / "steps", base, tree=None).trainable_state_dict()
    assert set(saved) == set(loaded)
    assert all(torch.equal(saved[name], value) for name, value in loaded.items())


def test_the_identity_covers_the_weights_of_a_draft_model_and_the_code_of_a_custom_module(outsiders, monkeypatch):
    """The item of contestants= is the same, so results of one would otherwise be reused for the other."""
    monkeypatch.chdir(outsiders)
    base = load_base("base", "float32", "cpu")

    def identities():
        arguments = (
            {"draft_model": {"path": "twin"}},
            "parrot.yaml",
            {"merged": {"parts": {"first": "parrot.yaml"}}},
        )
        return [build_contestant(resolve(item, trust=TRUST), base).identity for item in arguments]

    before = identities()
    assert identities() == before
    saved_lm(outsiders / "twin", seed=1)
    (outsiders / "parrots.py").write_text(f"{MODULE}# changed\n")
    try:
        assert all(one != other for one, other in zip(identities(), before, strict=True))
    finally:
        saved_lm(outsiders / "twin", seed=0)
        (outsiders / "parrots.py").write_text(MODULE)


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("hydra", "drafter hydra has weights: train it"),
        ("draft_model", r"drafter\.path= is missing"),
        ({"draft_model": {"paht": "x"}}, "drafter draft_model has no value paht"),
        ({"draft_model": {"path": "small", "tree": "bset"}}, "tree: bset is none of chain, .*dynamic"),
        ("merged", r"drafter merged needs its part first: contestants=\[\{merged"),
        ({"echo": {"frames": 3}}, "echo is a trained head and has its own values"),
        ("missing", "neither a run directory .* nor one of the drafters autoregressive"),
        ("echo@nothing", "@nothing is not an option of drafter/tree"),
    ],
)
def test_a_wrong_contestant_is_an_input_error(outsiders, monkeypatch, item, sentence):
    monkeypatch.chdir(outsiders)
    with pytest.raises(Exception, match=sentence) as raised:
        build_contestant(resolve(item, trust=TRUST), load_base("base", "float32", "cpu"))
    error = raised.value
    while not isinstance(error, InputError):
        error = error.__cause__
        assert error is not None


def test_a_drafter_without_weights_is_not_trained(outsiders, monkeypatch, capsys):
    monkeypatch.chdir(outsiders)
    arguments = [
        item
        for item in train_args("run=x", "drafter=prompt_lookup")
        if not item.startswith(("drafter.frames", "objective."))
    ]
    assert "drafter=prompt_lookup has no weights to train" in expect_error(monkeypatch, capsys, "train.py", *arguments)


@pytest.mark.parametrize(
    "name",
    [
        "ctc",
        "ctc_gru",
        "transducer",
        "medusa",
        "eagle",
        "eagle3_1",
        "hydra_plus",
        "blockwise",
        "dspark",
        "domino",
        "peagle",
    ],
)
def test_a_drafter_by_name_has_the_values_that_hydra_composes(name):
    composed = compose_config("train", f"drafter={name}").drafter
    found = resolve(name, untrained=True).config
    assert OmegaConf.to_container(found) == OmegaConf.to_container(composed)


@pytest.mark.parametrize("name", sorted(file.stem for file in DRAFTER_CONFIGS.glob("*.yaml") if file.stem != "merged"))
def test_the_values_of_every_shipped_drafter_are_accepted(name):
    assert resolve(name, untrained=True).name == name
