"""The losslessness check finds planted differences, and distinguishes rounding from faults."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_evaluations import PROMPTS, Corrupt, make_setup
from tiny_models import random_base

from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.tree_policy import AdaptivePolicy, StepCosts
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.evaluation import losslessness
from ctcdraft.evaluation.losslessness import LosslessnessChecker
from ctcdraft.evaluation.runner import run_question, turn_prompt
from ctcdraft.nn.bodies import ResidualBody


def question(setup, index=0):
    return run_question(setup, LosslessnessChecker(setup), index, PROMPTS[index])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_faithful_contestant_is_equal_and_a_corrupt_one_is_not(temperature):
    record = question(make_setup(corrupt=Corrupt(), temperature=temperature))
    assert record.divergences["prompt_lookup"] == ()
    (divergence,) = record.divergences["corrupt"]
    ours, theirs = record.turns[0].answers["corrupt"].tokens, record.turns[0].answers["autoregressive"].tokens
    assert ours[: divergence.position] == theirs[: divergence.position]
    assert ours[divergence.position] != theirs[divergence.position]
    assert divergence.rounding is False
    assert divergence.margin > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_margin_is_the_bases_own(temperature):
    """Plain recomputation: autoregression's token has the best score at the divergence, by the margin."""
    setup = make_setup(corrupt=Corrupt(), temperature=temperature)
    record = question(setup)
    (divergence,) = record.divergences["corrupt"]
    tokens = record.turns[0].answers["autoregressive"].tokens
    prompt_L, _ = turn_prompt(setup.base, PROMPTS[0], [])
    text = [*prompt_L.tolist(), *tokens[: divergence.position]]
    with torch.no_grad():
        scores_V = setup.base.lm(torch.tensor([text])).logits[0, -1].double()
    if temperature > 0:
        from ctcdraft.decoding.sampling import GumbelNoise
        from ctcdraft.evaluation.runner import turn_seed

        noise_V = GumbelNoise(turn_seed(0, 0, 0)).gumbel(torch.tensor([len(text)]), len(scores_V))[0]
        scores_V = (scores_V / temperature).log_softmax(-1) + noise_V
    best, second = scores_V.topk(2).values.tolist()
    assert int(scores_V.argmax()) == tokens[divergence.position]
    assert divergence.margin == pytest.approx(best - second, abs=1e-4)


def test_near_a_tie_float64_decides(monkeypatch):
    monkeypatch.setattr(losslessness, "TIE_MARGIN", float("inf"))  # any margin is near enough
    (flip,) = question(make_setup(corrupt=Corrupt(only=torch.float32))).divergences["corrupt"]
    assert flip.rounding is True
    (bug,) = question(make_setup(corrupt=Corrupt())).divergences["corrupt"]
    assert bug.rounding is False


@pytest.mark.parametrize(("temperature", "scale"), [(0.0, 1.0), (0.01, 0.01), (0.5, 0.5), (1.0, 1.0), (2.0, 1.0)])
def test_near_is_measured_in_logits(temperature, scale, monkeypatch):
    """Perturbed scores are logits / T: at a low temperature one rounding error is a large margin of theirs."""
    setup = make_setup(corrupt=Corrupt(only=torch.float32), temperature=temperature)
    (far,) = question(setup).divergences["corrupt"]
    assert far.rounding is False
    for tie, rounding in ((0.9, False), (1.1, True)):
        monkeypatch.setattr(losslessness, "TIE_MARGIN", tie * scale * far.margin)
        (divergence,) = question(setup).divergences["corrupt"]
        assert divergence.rounding is rounding
        assert divergence.margin == far.margin  # as measured, whatever it was compared with


def test_the_float64_copy_shares_nothing_with_the_original():
    setup = make_setup()
    copied = LosslessnessChecker(setup)._float64_copy()
    assert copied.base.dtype == torch.float64
    assert setup.base.dtype == torch.float32
    assert set(copied.contestants) == set(setup.contestants)


def test_the_float64_copy_has_drafters_of_adaptive_sizes_in_float64_too():
    setup = make_setup()
    head = ParallelDrafter(setup.base, 3, partial(ResidualBody, blocks=1), PrefixSearch(4))
    costs = StepCosts((1, 4), (0.0, 0.1), (1.0, 1.1))
    adaptive = AdaptiveDrafter(head, AdaptivePolicy.uncut(costs, (1.0, 2.0), AcceptanceModel()))
    copied = LosslessnessChecker(replace(setup, contestants={"ctc": adaptive}))._float64_copy().contestants["ctc"]
    assert {value.dtype for value in copied.drafter.parameters()} == {torch.float64}
    assert {value.dtype for value in head.parameters()} == {torch.float32}


def test_the_float64_copy_is_not_kept(monkeypatch):
    """On a GPU it would count as peak memory of the contestants that run after the first near tie."""
    monkeypatch.setattr(losslessness, "TIE_MARGIN", float("inf"))
    copies, make = [], LosslessnessChecker._float64_copy

    def watched(checker):
        copied = make(checker)
        copies.append(weakref.ref(copied.base))
        return copied

    monkeypatch.setattr(LosslessnessChecker, "_float64_copy", watched)
    setup = make_setup(corrupt=Corrupt(only=torch.float32))
    checker = LosslessnessChecker(setup)
    run_question(setup, checker, 0, PROMPTS[0])
    assert len(copies) == 1
    assert copies[0]() is None


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float16, 1.0)])
def test_without_float32_a_great_margin_is_a_bug_and_a_close_call_is_no_verdict(dtype, temperature, monkeypatch):
    monkeypatch.setattr(losslessness, "is_rounding", lambda *_: None)
    setup = make_setup(random_base().to(dtype), corrupt=Corrupt(), temperature=temperature)
    (divergence,) = question(setup).divergences["corrupt"]
    assert divergence.rounding is False
    monkeypatch.setattr(losslessness, "MAX_ROUNDINGS", 1e9)  # any margin is near enough
    (close,) = question(setup).divergences["corrupt"]
    assert close.rounding is None
    assert close.margin == divergence.margin


def test_where_rounding_ends_by_pencil():
    logits = torch.tensor([[16.0, 15.0, -31.0]])  # their mean is 0
    assert losslessness.rounding_bound(logits) == losslessness.TIE_MARGIN
    assert losslessness.rounding_bound(logits.bfloat16()) == 0.5
    assert losslessness.rounding_bound(logits.half()) == 0.0625
    assert losslessness.rounding_bound((logits - 16).bfloat16()) == 0.5  # a top logit of 0 does not round exactly


def test_on_an_edge_of_top_p_half_precision_alone_proves_nothing(monkeypatch):
    monkeypatch.setattr(losslessness, "is_rounding", lambda *_: None)
    setup = make_setup(random_base().to(torch.bfloat16), corrupt=Corrupt(), temperature=1.0, top_p=0.9)
    (divergence,) = question(setup).divergences["corrupt"]
    assert divergence.rounding is None


def test_an_answer_that_stops_early_diverges_where_it_stops():
    setup = make_setup()
    checker = LosslessnessChecker(setup)
    prompt_L, _ = turn_prompt(setup.base, PROMPTS[0], [])
    assert checker.compare("prompt_lookup", (5, 6), (5, 6, 7), prompt_L, 0, 0).position == 2
    assert checker.compare("prompt_lookup", (5, 6), (5, 6), prompt_L, 0, 0) is None
