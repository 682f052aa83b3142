"""Every body, correction and objective of the parallel drafter: each trains, and each decodes losslessly."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sequential_parts import make_sequential_drafter
from tiny_models import random_base
from torch import nn
from training_parts import DECODING, block_head, ctc_head, make_trainer

from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch, TransducerSearch
from ctcdraft.drafters.trees.per_frame import PerFrameTree, StaticPerFrameTree, likely_choices
from ctcdraft.errors import InputError
from ctcdraft.nn.bodies import AttentionBody, FeedForwardBody, ResidualBody
from ctcdraft.nn.frame_correction import FrameGRUCorrection
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.peagle_body import PEagleBody
from ctcdraft.nn.slot_bodies import DFlashBody
from ctcdraft.objectives.base import WeightedSum
from ctcdraft.objectives.compatibility import describe_reading
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.ctc import CTC, PrefixCTC, PrefixTransducer, Transducer
from ctcdraft.objectives.distillation import Distill, kl
from ctcdraft.objectives.eagle import Eagle, EagleCTC
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory, load_trainable_state

BODIES = {
    "attention": partial(AttentionBody, root_input=True, causal=False),
    "two blocks": partial(AttentionBody, root_input=True, causal=False, blocks=2),
    "dflash": partial(DFlashBody, blocks=2),
    "peagle": partial(PEagleBody, blocks=2, like_base=True),
    "residual": partial(ResidualBody, blocks=1),
    "feed-forward": partial(FeedForwardBody, inner=None),
}
OBJECTIVES = {
    "ctc": CTC(3),
    "prefix_ctc": PrefixCTC(3, 0.8),
    "transducer": Transducer(3),
    "prefix_transducer": PrefixTransducer(3, 0.8),
    "cross_entropy": CrossEntropy(3, 0.8),
    "distill": Distill(3, 0.8, kl),
    "sum": WeightedSum(3, {"ctc": CTC(3), "distill": Distill(3, 0.8, kl)}, {"ctc": 1.0, "distill": 0.5}),
}
READ = {
    "alignments": (PrefixSearch(16), 6),
    "transductions": (TransducerSearch(), 6),
    "tokens": (PerFrameTree(None), 3),
}
CORRECTIONS = {"none": None, "markov": partial(MarkovCorrection, rank=8), "gru": partial(GRUCorrection, rank=8)}
CELLS = [("attention", objective, correction) for objective in OBJECTIVES for correction in CORRECTIONS]
CELLS += [
    (body, objective, "none")
    for body in BODIES if body != "attention"
    for objective in OBJECTIVES if "transducer" not in objective
]  # fmt: skip
OF_TOKENS = {
    "own_embedding": partial(MarkovCorrection, rank=8, own_embedding=True),
    "frame_gru": partial(FrameGRUCorrection, rank=8, memory=6, uncorrected=1),
}
CELLS += [("dflash", objective, correction) for objective in ("cross_entropy", "distill") for correction in OF_TOKENS]


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


@pytest.mark.parametrize(("body", "objective", "correction"), CELLS)
def test_every_parameter_trains_and_decoding_stays_lossless(base, tmp_path, body, objective, correction):
    objective = OBJECTIVES[objective]
    paths, frames = READ[objective.supervises]
    drafter = block_head(base, BODIES[body], paths, {**CORRECTIONS, **OF_TOKENS}[correction], frames)
    run = RunDirectory(tmp_path)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, steps=30, drafter=drafter, objective=objective, learning_rate=1e-2)
    before = {name: value.detach().clone() for name, value in drafter.trainable_state_dict().items()}
    assert one.fit([JsonlLogger(run.metrics, 0)]) >= 1.0
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    still = {name for name, value in drafter.trainable_state_dict().items() if torch.equal(value, before[name])}
    assert still == ({"head.blank_D", "head.blank_bias"} if objective.supervises == "tokens" else set())
    prompt = torch.arange(10, 16)
    truth = generate(base, Autoregressive(base), prompt, DECODING, base.stop_token_ids, 0).tokens
    assert generate(base, drafter.eval(), prompt, DECODING, base.stop_token_ids, 0).tokens == truth


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("objective", ["ctc", "sum"])
def test_a_float32_head_beside_a_bfloat16_base(tmp_path, objective, correction, autocast):
    base = random_base(context=64)
    base.lm.to(torch.bfloat16)
    drafter = block_head(base, BODIES["two blocks"], PrefixSearch(16), CORRECTIONS[correction])
    run = RunDirectory(tmp_path)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, steps=6, drafter=drafter, objective=OBJECTIVES[objective], autocast=autocast)
    assert one.fit([JsonlLogger(run.metrics, 0)]) >= 1.0
    assert {value.dtype for value in drafter.trainable_parameters()} == {torch.float32}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("body", BODIES)
def test_a_bfloat16_head_decodes_beside_a_bfloat16_base(body, correction):
    """As in evaluation on an accelerator, where the head is cast to the dtype of the base model."""
    base = random_base(context=64)
    base.lm.to(torch.bfloat16)
    sparse = StaticPerFrameTree(likely_choices(9, 3, 3, 0.6, 0.4, 1.0))
    for paths in (PrefixSearch(16), Collapse(9, 3, 0.4), PerFrameTree(None), sparse):
        drafter = block_head(base, BODIES[body], paths, CORRECTIONS[correction]).to(torch.bfloat16).eval()
        assert (
            len(generate(base, drafter, torch.arange(10, 16), DECODING, frozenset(), 0).tokens)
            == DECODING.max_new_tokens
        )


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_new_correction_changes_no_loss(base, correction):
    """It is initialised to zero."""
    batch = make_trainer(None, base, steps=1).batches.batch(0)
    plain = CTC(3)(block_head(base, BODIES["attention"], PrefixSearch(16))(batch), batch).value
    corrected = block_head(base, BODIES["attention"], PrefixSearch(16), CORRECTIONS[correction])
    corrected.load_state_dict(block_head(base, BODIES["attention"], PrefixSearch(16)).state_dict(), strict=False)
    assert torch.allclose(CTC(3)(corrected(batch), batch).value, plain, atol=1e-5)


def test_two_blocks_start_as_one(base):
    """The second block is initialised to add nothing."""
    batch = make_trainer(None, base, steps=1).batches.batch(0)
    one, two = (block_head(base, BODIES[body], PrefixSearch(16)) for body in ("attention", "two blocks"))
    two.load_state_dict(one.state_dict(), strict=False)
    assert torch.equal(one(batch).states_BATD, two(batch).states_BATD)


def test_an_objective_and_a_tree_that_differ_are_refused_or_named(base):
    body = BODIES["attention"]
    transducer = block_head(base, body, TransducerSearch())
    sparse_tree = StaticPerFrameTree(likely_choices(9, 3, 3, 0.6, 0.4, 1))
    all_paths = (PrefixSearch(16), Collapse(9, 3, 0.4), PerFrameTree(None), sparse_tree)
    search, collapse, direct, sparse = (block_head(base, body, paths) for paths in all_paths)
    with pytest.raises(InputError, match=r"leaves the blank untrained, but PrefixSearch.*drafter/tree=per_frame"):
        describe_reading(OBJECTIVES["cross_entropy"], search, 3)
    with pytest.raises(InputError, match=r"3 of 6 frames would learn nothing; set objective\.labels=6 or drafter\.f"):
        describe_reading(OBJECTIVES["cross_entropy"], direct, 6)
    with pytest.raises(InputError, match=r"sums over alignments with blanks"):
        describe_reading(OBJECTIVES["cross_entropy"], transducer, 3)
    with pytest.raises(InputError, match=r"never merge, but PrefixSearch.*transducer_search"):
        describe_reading(OBJECTIVES["transducer"], search, 3)
    with pytest.raises(InputError, match=r"merge into one token, but TransducerSearch.*objective=transducer"):
        describe_reading(OBJECTIVES["ctc"], transducer, 3)
    assert (
        describe_reading(OBJECTIVES["transducer"], transducer, 3) == "trained as transductions, read as transductions"
    )
    assert "Table 2" in describe_reading(OBJECTIVES["cross_entropy"], collapse, 3)
    assert "Table 2" in describe_reading(OBJECTIVES["ctc"], direct, 6)
    for objective, head in [("ctc", search), ("ctc", collapse), ("distill", direct), ("cross_entropy", sparse)]:
        assert "Table 2" not in describe_reading(OBJECTIVES[objective], head, 3)


def test_an_objective_that_a_sequential_drafter_cannot_train_is_refused(base, tmp_path):
    """Hydra's heads have separate weights and predict tokens; EAGLE has one layer, which predicts hidden states."""
    hydra, eagle = (make_sequential_drafter(kind, base, tmp_path) for kind in ("hydra", "eagle"))
    for objective in (Eagle(1, 1.0, 0.1), EagleCTC(3, 6, 1.0, 0.1, 0.01)):
        with pytest.raises(InputError, match=r"states, which Hydra does not make; .* are for drafter=eagle"):
            describe_reading(objective, hydra, 4)
        assert describe_reading(objective, eagle, 4) == "in the drafter's own way"
    with pytest.raises(InputError, match=r"2 of 4 frames would learn nothing"):
        describe_reading(CrossEntropy(2, 0.8), hydra, 4)
    assert describe_reading(CrossEntropy(2, 0.8), eagle, 4) == "in the drafter's own way"


def test_runs_older_than_correction_and_blocks_still_load(base):
    """Their config has neither key, and their tensors are those of the defaults."""
    old = ctc_head(base)
    assert {name.split(".")[0] for name in old.trainable_state_dict()} == {"body", "head"}
    assert not [name for name in old.trainable_state_dict() if "deeper" in name or "correction" in name]
    tensors = {name: value.detach().clone() for name, value in old.trainable_state_dict().items()}
    load_trainable_state(
        old, tensors | {"head.blank_bias": torch.tensor(0.25)}, Path("run")
    )  # it was stored as a number, not as one row
    assert old.head.blank_bias.tolist() == [0.25]
    with pytest.raises(InputError, match=r"first difference: head\.blank_D"):
        load_trainable_state(old, tensors | {"head.blank_D": torch.zeros(1)}, Path("run"))


def test_the_repeat_rate_of_frames(base, monkeypatch):
    """Best classes a a - a b: one of four frames repeats a token; a repeated blank does not count."""
    head = BlankHead(nn.Linear(3, 2, bias=False), 3)
    head.words.weight.data, head.blank_D.data = torch.eye(3)[:2], torch.eye(3)[2]
    cases = {"a a - a b": ([0, 0, 2, 0, 1], 1 / 4), "- - b b b": ([2, 2, 1, 1, 1], 2 / 4)}
    for best, rate in cases.values():
        drafter, windows = ctc_head(base), SimpleNamespace(lengths_BA=torch.ones(1, 1))
        drafter.head = head
        monkeypatch.setattr(drafter, "forward", lambda _, best=best: Emissions(torch.eye(3)[best][None, None], head))
        assert drafter.metrics(windows)["repeat_rate"] == pytest.approx(rate)
