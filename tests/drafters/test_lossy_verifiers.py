"""Typical and relaxed acceptance, which change the output."""

from __future__ import annotations

import pytest
import torch
from chi_square import MIN_P_VALUE, p_value
from test_sampled_drafts import PROMPT, SampledFrames, base, exact, settings, texts  # noqa: F401

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.lossy_acceptance import RelaxedAcceptance, TypicalAcceptance
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import (
    match,
)
from ctcdraft.errors import InputError


def test_typical_acceptance_by_hand():
    """Uniform over four: H = log 4, threshold min(0.3, 0.5 / 4) = 1/8 < 1/4: all are accepted. Nearly certain: 0.3."""
    tree = TokenTree.from_paths(torch.tensor(0), torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 2]), 9)
    probs = torch.tensor([[0.25] * 4, [0.1, 0.1, 0.2, 0.6], [0.25] * 4, [0.6, 0.1, 0.2, 0.1], [0.25] * 4])
    verdict = TypicalAcceptance(0.3, 0.5)(tree, probs.log(), GumbelNoise(0), 5)
    # Both first tokens are accepted. H(.6 .2 .1 .1) = 1.089, so min(0.3, 0.5 x 0.337) = 0.168: 2 (0.2) and 0 (0.6)
    # are too; of the two longest paths 3 0 is more probable under the base.
    assert verdict.path_K[: verdict.length].tolist() == [0, 3, 4]
    verdict = TypicalAcceptance(0.22, 2.0)(
        tree, probs.log(), GumbelNoise(0), 5
    )  # 0.22 everywhere, as without it 0.5 behind the root
    assert verdict.path_K[: verdict.length].tolist() == [0, 3, 4]
    verdict = TypicalAcceptance(0.3, 2.0)(
        tree, probs.log(), GumbelNoise(0), 5
    )  # 0.3 everywhere: not even the first tokens are accepted
    assert verdict.path_K[: verdict.length].tolist() == [0]


def test_typical_acceptance_changes_the_output(base, exact):  # noqa: F811
    """It is marked lossy: the chi-square test that the others pass rejects it."""
    assert p_value(texts(base, SampledFrames(1), TypicalAcceptance(0.09, 0.3), 400), exact) < MIN_P_VALUE


def test_lossy_verifiers_refuse_impossible_values():
    with pytest.raises(InputError, match=r"epsilon must be a number > 0 and < 1, got 1\.5"):
        TypicalAcceptance(1.5, 0.3)
    with pytest.raises(InputError, match=r"decoding\.verify\.beta must be an integer >= 1, got 0"):
        RelaxedAcceptance(0, 1.0)
    with pytest.raises(InputError, match=r"decoding\.verify\.tau must be a number >= 0, got -1"):
        RelaxedAcceptance(1, -1.0)


# After the root, p(token) is .5 .3 .15 .05; the distances from the best log-probability are 0, 0.51, 1.20 and 2.30.
RELAXED_CASES = [  # (beta, tau, the draft tokens that are accepted alone)
    (1, 9.0, [0]), (2, 9.0, [0, 1]), (4, 9.0, [0, 1, 2, 3]), (9, 9.0, [0, 1, 2, 3]),
    (4, 0.0, [0]), (4, 0.5, [0]), (4, 0.52, [0, 1]), (4, 1.2, [0, 1]), (4, 1.21, [0, 1, 2]), (4, 2.3, [0, 1, 2]),
    (4, 2.31, [0, 1, 2, 3]), (2, 1.21, [0, 1]), (3, 0.52, [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize("noise", [None, GumbelNoise(0)], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("beta", "tau", "accepted"), RELAXED_CASES)
def test_relaxed_acceptance_by_hand(beta, tau, accepted, noise):
    """Greedy verifiers are given logits, which are log-probabilities but for a constant of each row."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]).log()
    if noise is None:
        scores = scores + torch.tensor([[7.0], [-2.0]])
    for token in range(4):
        tree = TokenTree.chain(torch.tensor(1), torch.tensor([token]))
        verdict = RelaxedAcceptance(beta, tau)(tree, scores, noise, 5)
        assert (int(verdict.length) == 2) == (token in accepted)
        if noise is None:
            assert int(verdict.bonus) == (3 if token in accepted else 0)  # the argmax after the last accepted token


def test_relaxed_acceptance_takes_the_most_probable_of_the_longest_paths():
    """0 - 1 is more probable than 1 - 0, and both are longer than 0 - 3, of which 3 is rejected."""
    tree = TokenTree.from_lists(torch.tensor(0), [1, 0, 0, 1, 3], [-1, -1, 0, 1, 1])
    after = torch.tensor([[0.5, 0.4, 0.06, 0.04], [0.5, 0.4, 0.06, 0.04], [0.3, 0.6, 0.06, 0.04]]).log().repeat(2, 1)
    logits = after + torch.tensor([[0.0], [50.0], [0.0], [0.0], [0.0], [0.0]])  # a constant must not decide
    assert RelaxedAcceptance(2, 1.0)(tree, logits, None, 5).path_K.tolist() == [0, 2, 4]


def test_relaxed_acceptance_changes_the_output_unless_only_the_best_token_is_accepted(base):  # noqa: F811
    def decode(verify):
        how = settings(verify, 0.0, tokens=12, lossless=False)
        return [generate(base, SampledFrames(3), PROMPT, how, frozenset(), seed).tokens for seed in range(6)]

    truth = decode(match)
    assert decode(RelaxedAcceptance(1, 3.0)) == decode(RelaxedAcceptance(3, 0.0)) == truth
    assert decode(RelaxedAcceptance(3, 3.0)) != truth
