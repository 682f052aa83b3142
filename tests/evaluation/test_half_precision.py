"""Divergences in half precision: planted faults are faults, real ones are rounding, and neither stays undecided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simple_drafters import oracle_drafter
from small_evaluations import SETTINGS, Corrupt
from tiny_models import random_base
from training_parts import ctc_head

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding import tree
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation import half_precision
from ctcdraft.evaluation.contestants import EvaluationSetup, StockGenerate
from ctcdraft.evaluation.losslessness import LosslessnessChecker
from ctcdraft.evaluation.runner import turn_prompt
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base

PROMPTS = [torch.randint(5, 261, (12,), generator=torch.Generator().manual_seed(seed)) for seed in range(48)]


class WrongMask(BaseLM):
    """No draft token attends to the root."""

    def read_tree(self, tree, cache):
        if len(tree) > 1 and self.dtype in FAULTY:
            tree.__dict__["ancestors_NN"] = tree.ancestors_NN.clone()
            tree.ancestors_NN[2:, 0] = False
        return super().read_tree(tree, cache)


class WrongPosition(BaseLM):
    """Draft tokens have position ids that are one too large."""

    def read_tree(self, tree, cache):
        if len(tree) > 1 and self.dtype in FAULTY:
            tree.__dict__["depths_N"] = tree.depths_N + (tree.depths_N > 0)
        return super().read_tree(tree, cache)


class WrongRows(BaseLM):
    """The newest row of the cache has the keys of the row before it."""

    def read_tree(self, tree, cache):
        if len(tree) > 2 and self.dtype in FAULTY:
            for keys, _ in cache.layer_buffers:
                keys[:, :, cache.length - 1] = keys[:, :, cache.length - 2]
        return super().read_tree(tree, cache)


class OtherKernel(BaseLM):
    """Trees are read by a kernel that rounds in another way than that of one token, as on some processors."""

    def read_tree(self, tree, cache):
        output = super().read_tree(tree, cache)
        if len(tree) > 1 and self.dtype == torch.bfloat16:
            rng = torch.Generator().manual_seed(cache.length)
            rounding_NV = torch.randn(output.logits_NV.shape, generator=rng) * output.logits_NV.std() / 300
            output.logits_NV.add_(rounding_NV)
        return output


TEXTS = ("Natalia has 4 boxes of 12 pens. How many pens", "Tell me about the sea")
FAULTY = [torch.bfloat16, torch.float32]


def setup_of(fault=None, static=False, spread=0.06, **changes):
    """Return an evaluation of an oracle whose base has many near ties."""
    base = random_base(initializer_range=spread).to(torch.bfloat16)
    base.__class__ = fault or BaseLM
    base.static_shapes = StaticShapes() if static else None
    settings = replace(SETTINGS, max_new_tokens=32, nodes=6, **changes)
    contestants = {"autoregressive": Autoregressive(base), "oracle": None, "ctc": ctc_head(base).for_inference(base)}
    return EvaluationSetup(base, contestants, settings, 0)


def divergences(setup, contestant="oracle", prompts=6):
    found = []
    for seed, prompt_L in enumerate(PROMPTS[:prompts]):
        truth = setup.answer("autoregressive", prompt_L, seed).tokens
        if contestant == "oracle":
            setup.contestants["oracle"] = oracle_drafter(torch.cat([prompt_L, torch.tensor(truth)]), 5)
        tokens = setup.answer(contestant, prompt_L, seed).tokens
        found.append(LosslessnessChecker(setup).compare(contestant, tokens, truth, prompt_L, 0, seed))
    return [one for one in found if one is not None]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_near_ties_are_rounding(changes):
    """Some of so many prompts have one, whatever the processor's own kernels do."""
    found = divergences(setup_of(fault=OtherKernel, **changes), prompts=len(PROMPTS))
    assert found
    assert [one.rounding for one in found] == [True] * len(found)


@torch.inference_mode()
def test_the_first_token_is_judged_by_its_near_tie():
    """The pass over the prompt chose it: padded for one of the two, in its exact shape for the other."""
    setup, found = setup_of(static=True), set()
    for prompt_L in PROMPTS:
        judge = half_precision.Judge(setup, prompt_L, (), (0, 0), 0)
        best, second = judge.plain_V.topk(2).indices.tolist()
        is_near = half_precision.Judge(setup, prompt_L, (), (best, second), 0).is_near_tie()
        both = [second, *PROMPTS[0][:3].tolist()], [best, *PROMPTS[0][:3].tolist()]
        assert half_precision.is_rounding(setup, "ctc", prompt_L, both, 0) is is_near
        found.add(is_near)
    assert found == {True, False}


@torch.inference_mode()
@pytest.mark.parametrize("fault", [None, WrongPosition])
def test_steps_of_fixed_shapes_are_repeated_as_such(fault):
    setup = setup_of(fault=fault, static=True)
    prompt_L, position = PROMPTS[0], 20
    truth = setup.answer("ctc", prompt_L, 0).tokens
    judge = half_precision.Judge(setup, prompt_L, truth[:position], (truth[position],) * 2, 0)
    assert judge.is_sound("ctc", truth) is (fault is None)
    if fault is not None:
        return
    recording = half_precision.Recording(truth, position)
    half_precision.decode_recorded(setup, setup.contestants["ctc"], prompt_L, setup.settings, 0, recording)
    assert {len(tree) for tree, _ in recording.steps} == {setup.settings.nodes}  # with padding
    repeated_V = half_precision.repeat_fixed_shapes(judge.exact, recording, prompt_L)
    assert half_precision.difference(repeated_V, judge.plain_V) < 1e-5


@torch.inference_mode()
def test_wrong_ancestors_of_a_tree_are_a_fault(monkeypatch):
    """A kernel lets the root attend to its first child; tokens, parents and depths are right."""

    def wrong_tree(*args):
        *right, ancestors_NN = padded_tree(*args)
        ancestors_NN[0, 1] = True
        return *right, ancestors_NN

    padded_tree = tree.padded_tree
    monkeypatch.setattr(tree, "padded_tree", wrong_tree)
    setup = setup_of(static=True)
    truth = setup.answer("ctc", PROMPTS[0], 0).tokens
    judge = half_precision.Judge(setup, PROMPTS[0], truth[:20], (truth[20],) * 2, 0)
    # Judged in float32 alone, as for a fault that changes no more than rounding does.
    judge.noise *= 1000
    judge.tolerance_2 *= 1000
    monkeypatch.setattr(half_precision, "EXACT_SHARE", half_precision.EXACT_SHARE / 1000)
    assert judge.is_sound("ctc", truth) is False


class OneLogit(BaseLM):
    """In half precision trees give one token a logit that is too large after `length` tokens."""

    length, token, excess = 0, 0, 0.0

    def read_tree(self, tree, cache):
        rows_N = cache.length + tree.depths_N == self.length - 1
        output = super().read_tree(tree, cache)
        if len(tree) > 1 and self.dtype == torch.bfloat16:
            output.logits_NV[rows_N, self.token] += self.excess
        return output


@torch.inference_mode()
def test_one_wrong_logit_is_a_fault():
    """It exchanges a near tie and is far beyond noise, but hardly seen in a mean over the vocabulary."""
    setup, prompt_L = setup_of(), PROMPTS[0]
    base = setup.base
    truth = setup.answer("autoregressive", prompt_L, 0).tokens
    for position in range(4, 28):
        judge = half_precision.Judge(setup, prompt_L, truth[:position], (truth[position],) * 2, 0)
        best, second = judge.plain_V.topk(2).values.tolist()
        if 2 * judge.noise < best - second < 8 * judge.noise:
            break
    else:
        pytest.fail("no near tie")
    base.__class__ = OneLogit
    base.length, base.excess = len(prompt_L) + position, 20 * judge.noise
    base.token = int(judge.plain_V.topk(2).indices[1])
    assert base.excess / 261**0.5 < 1.3 * judge.noise
    setup.contestants["oracle"] = oracle_drafter(torch.cat([prompt_L, torch.tensor(truth)]), 5)
    tokens = setup.answer("oracle", prompt_L, 0).tokens
    assert (tokens[:position], tokens[position]) == (truth[:position], base.token)
    assert half_precision.is_rounding(setup, "oracle", prompt_L, (tokens, truth), 0) is False
    base.excess = 0.0
    judge = half_precision.Judge(setup, prompt_L, truth[:position], (base.token, truth[position]), 0)
    assert (judge.is_near_tie(), judge.is_sound("oracle", truth)) == (True, True)
    far = int(judge.plain_V.argmin())
    assert half_precision.Judge(setup, prompt_L, truth[:position], (far, truth[position]), 0).is_near_tie() is False


@pytest.mark.parametrize("fault", [WrongMask, WrongPosition, WrongRows])
def test_small_faults_of_the_base_are_faults(fault):
    """On this base they change no more than rounding does."""
    found = divergences(setup_of(fault=fault))
    assert len(found) > 1
    assert [one.rounding for one in found] == [False] * len(found)


@pytest.mark.parametrize("fault", [WrongMask, WrongPosition, WrongRows])
def test_faults_that_float32_does_not_have_are_faults(fault, monkeypatch):
    monkeypatch.setitem(globals(), "FAULTY", [torch.bfloat16])
    base = load_base(str(REPOSITORY / "data/tiny/base"), "bfloat16", "cpu")
    monkeypatch.setitem(
        globals(), "PROMPTS", [turn_prompt(base, Prompt("", "", (text,), None), [])[0] for text in TEXTS]
    )
    setup = setup_of()
    base.__class__ = fault
    contestants = {"autoregressive": Autoregressive(base), "oracle": None}
    found = divergences(replace(setup, base=base, contestants=contestants))
    assert found
    assert [one.rounding for one in found] == [False] * len(found)


def test_a_wrong_choice_is_a_fault():
    setup = setup_of()
    setup.contestants["oracle"] = Corrupt()
    prompt_L, seed = PROMPTS[0], 0
    truth, tokens = (setup.answer(name, prompt_L, seed).tokens for name in ("autoregressive", "oracle"))
    position = next(n for n, pair in enumerate(zip(tokens, truth, strict=True)) if len(set(pair)) == 2)
    assert half_precision.is_rounding(setup, "oracle", prompt_L, (tokens, truth), seed) is False
    second = (*truth[:position], (truth[position] + 1) % 200)  # a response that decoding again does not give
    assert half_precision.is_rounding(setup, "oracle", prompt_L, (second, truth), seed) is False
    assert half_precision.is_rounding(setup, "oracle", prompt_L, (truth[:-1], truth), seed) is False


def test_another_loop_is_judged_by_its_margin():
    setup = setup_of()
    setup.contestants["stock"] = StockGenerate(setup.base, {}, None, None, attention="eager")
    found = divergences(setup, "stock")
    assert found
    assert [one.rounding for one in found] == [True] * len(found)
    truth = setup.answer("autoregressive", PROMPTS[0], 0).tokens
    other = (*truth[:5], (truth[5] + 1) % 261)
    assert half_precision.is_rounding(setup, "stock", PROMPTS[0], (other, truth), 0) is False


def test_a_base_without_a_copy_in_float32_stays_undecided_near_a_tie(monkeypatch):
    monkeypatch.setattr(half_precision, "device_memory_bytes", lambda device: 1000)
    found = divergences(setup_of())
    assert found
    assert {one.rounding for one in found} == {None}
