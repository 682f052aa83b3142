"""The distribution test accepts samples of the base model and rejects biased ones."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.decoding.verification import (
    Rejection,
    k_sequential,
    match,
    multi_round,
    residual_distribution,
)
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees import sampled as growths
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.drafters.trees.sampled import SampledLabels
from ctcdraft.evaluation.distribution_test import (
    HISTOGRAM_CELLS,
    MIN_TOKENS_FOR_P_VALUE,
    ChiSquareFit,
    PITHistogram,
    count_pit_values,
    draft_base_ratio,
    draft_distributions,
    pit_histogram,
    pit_interval,
)
from ctcdraft.models.base_model import BaseLM


class Sampled:
    """Frames that depend on the root, over the whole vocabulary."""

    def __init__(self, chains: int, vocabulary: int) -> None:
        self.frame_tree = SampledLabels(chains)
        self.vocabulary = vocabulary

    def draft(self, context, memory, rng):
        seeded = torch.Generator().manual_seed(int(context.root))
        log_probs_TC = (3 * torch.randn(4, self.vocabulary + 1, generator=seeded)).log_softmax(-1)
        return self.frame_tree(log_probs_TC, TreeRequest.of(context, (), rng)), None


class Biased(Sampled):
    """Reports far too small probabilities for its draft tokens, so that the verifier always accepts them."""

    def draft(self, context, memory, rng):
        tree, _ = super().draft(context, memory, rng)
        probs = tree.draft_probs_NV
        return (tree if probs is None else TokenTree(tree.tokens_N, tree.parents_N, tree.height, probs * 1e-9)), None


def test_intervals_by_hand():
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25]], dtype=torch.float64)
    before, own = pit_interval(probs, torch.tensor([0, 2]), probs)
    assert before.tolist() == pytest.approx([0.8, 0.75])
    assert own.tolist() == pytest.approx([0.2, 0.25])
    draft = torch.tensor([[0.1, 0.1, 0.8], [0.0, 1.0, 0.0]], dtype=torch.float64)  # q / p is 1/2 1/5 8/3, and 0 2 0
    before, own = pit_interval(probs, torch.tensor([0, 2]), draft_base_ratio(draft, probs))
    assert before.tolist() == pytest.approx([0.3, 0.75])
    assert own.tolist() == pytest.approx([0.2, 0.25])


def test_the_fit_by_hand():
    fit = ChiSquareFit.from_counts([90, 60])
    assert (fit.tokens, fit.chi_square, fit.tv) == (150, 6, 0.1)
    assert fit.p_value == pytest.approx(0.0143059, abs=1e-7)  # of chi-square 6 at one degree of freedom
    assert ChiSquareFit.from_counts([50, 50]).p_value == 1
    assert ChiSquareFit.from_counts([]) is None


def test_a_few_tokens_have_no_p_value():
    """The chi-square distribution is a limit for many tokens: 99 of them prove nothing."""
    few = ChiSquareFit.from_counts([MIN_TOKENS_FOR_P_VALUE - 1] + [0] * (HISTOGRAM_CELLS - 1))
    assert few.p_value is None
    assert few.chi_square > 1000
    assert ChiSquareFit.from_counts([MIN_TOKENS_FOR_P_VALUE] + [0] * (HISTOGRAM_CELLS - 1)).p_value < 1e-100


# --- rules that are known to be biased, in the shape of verification.py's --------------------------------------


def independent_uniforms(p_NV, q_NV, tokens_NK, uniform_NK):
    """Test every sample against the whole p; the first accepted one is taken."""
    accepted_NK = (uniform_NK * q_NV.gather(1, tokens_NK.clamp(min=0)) < p_NV.gather(1, tokens_NK.clamp(min=0))) & (
        tokens_NK >= 0
    )
    return torch.where(accepted_NK.any(1), accepted_NK.int().argmax(1), -1), residual_distribution(p_NV, p_NV - q_NV)


def mixed_stop(p_NV, q_NV, tokens_NK, uniform_NK):
    """Test samples by the distribution without stopping, and sample from the residual of that one after a stop."""
    total_N1 = q_NV.sum(1, keepdim=True)
    return multi_round(p_NV, torch.where(total_N1 > 0, q_NV / total_N1, 0.0), tokens_NK, uniform_NK)


def p_values(rule, stop=0.0, draws=3, positions=4000, vocabulary=48):
    """Return the p-values, by p and by q / p, of the tokens a rule emits, for random pairs of similar distributions."""
    rng = torch.Generator().manual_seed(0)
    log_NV = (2 * torch.randn(positions, vocabulary, generator=rng, dtype=torch.float64)).log_softmax(-1)
    p_NV = log_NV.exp()
    q_NV = (log_NV + 0.7 * torch.randn(positions, vocabulary, generator=rng, dtype=torch.float64)).softmax(-1) * (
        1 - stop
    )
    full_NV = torch.cat([q_NV, 1 - q_NV.sum(1, keepdim=True).clamp(max=1)], 1)
    tokens_NK = torch.multinomial(full_NV, draws, replacement=True, generator=rng)
    tokens_NK = torch.where(tokens_NK == vocabulary, NO_TOKEN, tokens_NK)
    uniform_NK = torch.rand(tokens_NK.shape, generator=rng, dtype=torch.float64)
    accepted_N, rest_NV = rule(p_NV, q_NV, tokens_NK, uniform_NK)
    own_N = torch.multinomial(rest_NV, 1, generator=rng)[:, 0]
    sampled_N = torch.where(accepted_N >= 0, tokens_NK.gather(1, accepted_N.clamp(min=0)[:, None])[:, 0], own_N)
    orders = (p_NV, draft_base_ratio(q_NV, p_NV))
    return [
        ChiSquareFit.from_counts(count_pit_values(p_NV, sampled_N, keys_NV, random.Random(0))).p_value
        for keys_NV in orders
    ]


@pytest.mark.parametrize(("rule", "stop"), [(multi_round, 0.0), (multi_round, 0.25), (k_sequential, 0.0)])
def test_exact_rules_fit_in_both_orders(rule, stop):
    assert min(p_values(rule, stop)) > 1e-3


@pytest.mark.parametrize(
    ("rule", "stop", "draws"),
    [(independent_uniforms, 0.0, 3), (mixed_stop, 0.25, 1)],
    ids=["uniforms", "stop"],
)
def test_biased_rules_are_detected_in_the_order_of_draft_over_base(rule, stop, draws):
    by_base, by_draft = p_values(rule, stop, draws)
    assert by_draft < 1e-6
    assert by_base > 1e-4  # this order alone does not detect the bias


def histogram_of(base, drafter, verify, draws, temperature=1.0, lossless=True):
    settings = DecodingSettings(24, 12, temperature, 0, 1.0, verify, lossless, token_for_token=False)
    prompt, histogram = torch.tensor([0, 7, 9]), PITHistogram.empty()
    for seed in range(draws):
        result = generate(base, drafter, prompt, settings, frozenset(), seed)
        drafts = draft_distributions(base, drafter, prompt, settings, seed, result.tokens) if result.drawn else {}
        histogram += pit_histogram(base, prompt, result.tokens, settings, seed, drafts)
    return histogram


def p_values_of(base, drafter, verify, draws=30):
    histogram = histogram_of(base, drafter, verify, draws)
    assert sum(histogram.by_base) == 24 * draws
    return [
        fit and fit.p_value
        for fit in (ChiSquareFit.from_counts(histogram.by_base), ChiSquareFit.from_counts(histogram.by_draft))
    ]


def test_exact_samples_fit_and_biased_ones_do_not():
    base = random_base()
    vocabulary = base.vocabulary
    by_base, by_draft = p_values_of(base, Autoregressive(base), match)
    assert by_base > 1e-4
    assert by_draft is None
    assert min(p_values_of(base, Sampled(1, vocabulary), Rejection(multi_round))) > 1e-4
    assert p_values_of(base, Biased(1, vocabulary), Rejection(multi_round))[0] < 1e-12


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """A base model and a draft model close to it, so that several rounds of sampling matter."""
    lm = random_lm(seed=0, initializer_range=0.15)
    base = BaseLM(lm, tiny_tokenizer(), "base")
    folder = tmp_path_factory.mktemp("near")
    other = copy.deepcopy(lm)
    rng = torch.Generator().manual_seed(1)
    for value in other.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=rng)
    other.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return base, str(folder)


def test_a_biased_rule_is_detected_with_a_draft_model_and_the_exact_one_is_not(near):
    base, folder = near
    drafter = DraftModel(base, folder, None, 1, growths.SampledChains(3)).eval()
    assert min(p_values_of(base, drafter, Rejection(multi_round), 25)) > 1e-4
    by_base, by_draft = p_values_of(base, drafter, Rejection(independent_uniforms), 25)
    assert by_draft < 1e-6
    assert by_base > 1e-4


def test_recorded_distributions_are_those_of_the_draft_model(near):
    """Per position, the draft model's distribution given the text before it; none for the token of the prefill."""
    base, folder = near
    drafter = DraftModel(base, folder, None, 3, growths.SampledChains(1)).eval()
    settings = DecodingSettings(12, 12, 1.0, 0, 1.0, Rejection(multi_round), True, token_for_token=False)
    prompt = torch.tensor([0, 7, 9])
    result = generate(base, drafter, prompt, settings, base.stop_token_ids, 3).tokens
    probs = draft_distributions(base, drafter, prompt, settings, 3, result)
    with torch.inference_mode():
        logits = drafter.lm.lm(torch.cat([prompt, torch.tensor(result)])[None]).logits[0]
    assert 0 not in probs
    assert len(probs) > 6
    for index, distribution in probs.items():
        assert distribution.tolist() == pytest.approx(logits[len(prompt) + index - 1].softmax(-1).tolist(), abs=1e-5)


def test_auxiliary_layers_do_not_change_the_histogram():
    base = random_base()
    tapped = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 1])
    settings = DecodingSettings(20, 8, 1.0, 0, 1.0, match, True)
    ours, plain = (pit_histogram(one, torch.tensor([0, 7, 9]), (5, 6, 7, 8), settings, 0, {}) for one in (tapped, base))
    assert ours == plain
    assert sum(ours.by_base) == 4
